"""torchtitan's pattern of context parallelism on symm_cp, against one process.

The inner attentions here are small ones of our own with torchtitan's conventions: class names,
(batch, sequence, heads, features), keyword arguments, `torch.compile`d flex attention as a class
attribute, offsets of documents over all samples. The training step cuts a batch, attends in layers
whose forward passes were replaced, and adds up gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

import symm_cp
from symm_cp.context_parallel import context_parallel_unshard
from symm_cp.integrations.torchtitan import (
    apply_cp_to_forward,
    cp_shard,
    last_layout,
    prepare_context_parallel_input,
)
from tests.context_parallel.common import CLOSE, mesh_of
from tests.exhaustive import exhaustive, in_turns, some

VOCABULARY, WIDTH, HEADS, KEY_HEADS, LENGTH, SAMPLES = 29, 32, 4, 2, 32, 2
STARTS = ((0, 11, 19), (0, 5))  # of the documents of each sample
Transform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Offsets(NamedTuple):
    """Where documents begin and end, samples one after the other."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor


class ScaledDotProductAttention(nn.Module):
    def forward(
        self, q: Any, k: Any, v: Any, *, attention_masks: Any = None, **options: Any
    ) -> torch.Tensor:
        assert attention_masks is None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        return out.transpose(1, 2)


class FlexAttention(nn.Module):
    attend: ClassVar[Any] = staticmethod(flex_attention)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        attention_masks: BlockMask,
        out_transform: Transform | None = None,
        **options: Any,
    ) -> torch.Tensor:
        assert isinstance(attention_masks, BlockMask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, aux = type(self).attend(
            q, k, v, block_mask=attention_masks, return_aux=AuxRequest(lse=True), **options
        )
        out, lse = out.transpose(1, 2), aux.lse.transpose(1, 2)
        return out if out_transform is None else out_transform(out, lse)


class CompiledFlexAttention(FlexAttention):
    """Compiled as a class attribute: once, before any context; see `as_in_one_process`."""


class VarlenAttention(nn.Module):
    """Attends within documents and a window to the left; also gives the log-sum-exp."""

    window_size = (6, 0)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        attention_masks: Offsets,
        out_transform: Transform | None = None,
        enable_gqa: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        rows = torch.arange(len(q))
        ids = torch.searchsorted(attention_masks.cu_seq_q[1:], rows, right=True)
        away = rows[:, None] - rows[None]
        seen = (ids[:, None] == ids[None]) & (away >= 0) & (away <= self.window_size[0])
        score = torch.einsum("qhe,khe->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        score = score.masked_fill(~seen, -torch.inf)
        out = torch.einsum("hqk,khe->qhe", score.softmax(-1), v).unflatten(0, (SAMPLES, LENGTH))
        lse = score.logsumexp(-1).T.unflatten(0, (SAMPLES, LENGTH))
        return out if out_transform is None else out_transform(out, lse)


class Dense(nn.Module):
    """Reference for flex attention, which has no backward pass on CPU."""

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        attention_masks: BlockMask,
        out_transform: Transform,
        enable_gqa: bool,
    ) -> torch.Tensor:
        seen = create_mask(attention_masks.mask_mod, SAMPLES, None, LENGTH, LENGTH, device="cpu")
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (k, v))
        score = torch.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
        score = score.masked_fill(~seen, -torch.inf)
        out = torch.einsum("bhqk,bkhe->bqhe", score.softmax(-1), v)
        return out_transform(out, score.logsumexp(-1).transpose(1, 2))


INNER: dict[str, type[nn.Module]] = {
    "sdpa": ScaledDotProductAttention,
    "flex": FlexAttention,
    "compiled": CompiledFlexAttention,
    "varlen": VarlenAttention,
}


class Layer(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        of_head = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * of_head) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.inner_attention = inner()

    def with_sinks(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return out * torch.sigmoid(lse - self.sinks).unsqueeze(-1).to(out.dtype)

    def forward(self, x: torch.Tensor, masks: Any) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, WIDTH // HEADS)) for p in (self.q, self.k, self.v))
        options: dict[str, Any] = {"enable_gqa": True, "attention_masks": masks}
        if masks is not None:
            options["out_transform"] = self.with_sinks
        return x + self.o(self.inner_attention(q, k, v, **options).flatten(2))


class Decoder(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(inner) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Any, *, positions: Any, attention_masks: Any = None) -> torch.Tensor:
        x = self.embed(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attention_masks)
        return self.head(x)


def decoder(inner: type[nn.Module]) -> Decoder:
    torch.manual_seed(1)
    return Decoder(inner).double()


def document_ids() -> torch.Tensor:
    rows = torch.arange(LENGTH)
    starts = (torch.tensor(each) for each in STARTS)
    return torch.stack([torch.searchsorted(each, rows, right=True) for each in starts])


def masks_of(kind: str) -> Any:
    """Returns masks of packed documents; None for SDPA, which torchtitan gives no mask."""
    if kind == "sdpa":
        return None
    if kind == "varlen":
        begins = [start + sample * LENGTH for sample, each in enumerate(STARTS) for start in each]
        offsets = torch.tensor([*begins, SAMPLES * LENGTH], dtype=torch.int32)
        return Offsets(offsets, offsets)
    ids = document_ids()

    def within(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (ids[b, q] == ids[b, kv])

    return create_block_mask(within, SAMPLES, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)


def batch_of(kind: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(SAMPLES, -1).contiguous()
    if kind != "sdpa":
        counts = [torch.arange(LENGTH)[ids == ids] for ids in document_ids()]
        positions = torch.stack(counts)
    extra: dict[str, Any] = {"positions": positions}
    if kind != "sdpa":
        extra["attention_masks"] = masks_of(kind)
    return ids, labels, extra


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum over these tokens divided by the number of all tokens, as torchtitan does."""
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / (SAMPLES * LENGTH)


def cases() -> list[tuple[Any, ...]]:
    ways = (("headtail", None), (None, "ulysses"))
    found: list[tuple[Any, ...]] = [(2, kind, *way) for kind in INNER for way in ways]
    found += [(4, kind, *way) for kind, way in in_turns(INNER, ways)]
    return [*found, (4, "flex", "ptrr", None)]


@pytest.mark.parametrize(
    ("world_size", "kind", "balancing", "method"),
    some((2, "flex", "headtail", None), (2, "varlen", None, "ulysses"), of=cases()),
)
@pytest.mark.ranks
def test_a_training_step_is_that_of_one_process(
    group: dist.ProcessGroup, world_size: int, kind: str, balancing: str | None, method: Any
) -> None:
    if kind == "compiled":
        torch._dynamo.reset()
        CompiledFlexAttention.attend = staticmethod(torch.compile(flex_attention))
    mesh = mesh_of(group)
    model = decoder(INNER[kind] if kind in ("sdpa", "varlen") else Dense)
    ids, labels, extra = batch_of(kind)
    whole = model(ids, **extra)
    loss_of(whole, labels).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    load_balancer: Any = {
        "headtail": None,
        None: symm_cp.Sequential(LENGTH, group.size()),
        "ptrr": last_layout(mesh),
    }[balancing]
    model = decoder(INNER[kind])
    inner = [layer.inner_attention for layer in model.layers]
    apply_cp_to_forward(inner, mesh, load_balancer=load_balancer, method=method)  # type: ignore[arg-type]
    for _ in range(2):
        ids, labels, extra = batch_of(kind)
        ids, labels, extra = prepare_context_parallel_input(
            ids, labels, extra, mesh, ids.device, balancing
        )
        assert ids.shape == labels.shape == extra["positions"].shape
        out = model(ids, **extra)
        loss_of(out, labels).backward()
        balancer = last_layout(mesh)(out.shape[1])
        (gathered,) = context_parallel_unshard(mesh, [out.detach()], [1], balancer)
        torch.testing.assert_close(gathered, whole.detach(), **CLOSE)
        for name, parameter in model.named_parameters():
            if kind == "sdpa" and name.endswith("sinks"):
                continue
            assert parameter.grad is not None, name
            dist.all_reduce(parameter.grad, group=group)
            torch.testing.assert_close(parameter.grad, expected[name], **CLOSE, msg=name)
        model.zero_grad()


@exhaustive
@pytest.mark.ranks(2)
def test_packed_tokens(group: dist.ProcessGroup) -> None:
    """Attends to packed (tokens, heads, features), with a window on both sides."""
    mesh, rank = mesh_of(group), group.rank()
    q, k, v = (torch.randn(LENGTH, HEADS, 8, dtype=torch.float64) for _ in range(3))
    offsets = torch.tensor([0, 11, LENGTH], dtype=torch.int32)

    class VarlenInnerAttention(VarlenAttention):
        window_size = (4, 2)  # type: ignore[assignment]

    inner = VarlenInnerAttention()
    apply_cp_to_forward([inner], mesh)
    (*parts, rows), _ = cp_shard(mesh, (q, k, v, torch.arange(LENGTH)), None, input_seq_dim=0)
    out = inner(*parts, attention_masks=Offsets(offsets, offsets.clone()))
    ids = torch.searchsorted(offsets[1:], torch.arange(LENGTH), right=True)
    away = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (ids[:, None] == ids) & (away <= 4) & (away >= -2)
    dense = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen)
    assert torch.equal(rows, symm_cp.HeadTail(LENGTH, group.size()).positions(rank))
    torch.testing.assert_close(out, dense.transpose(0, 1)[rows], **CLOSE)


@exhaustive
@pytest.mark.ranks(2)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    mesh, ids = mesh_of(group), torch.zeros(2, 8)
    flex = FlexAttention()
    with pytest.raises(NotImplementedError, match="Linear is not a known inner attention"):
        apply_cp_to_forward([flex, nn.Linear(1, 1)], mesh)
    assert "forward" not in vars(flex)
    with pytest.raises(ValueError, match="unknown load_balancer_type='zigzag'; choose"):
        cp_shard(mesh, (ids,), None, "zigzag")
    with pytest.raises(ValueError, match="attention_masks is a NoneType, 'ptrr' requires"):
        cp_shard(mesh, (ids,), None, "ptrr")
    with pytest.raises(ValueError, match="ptrr_mask_key='b' must be one of"):
        cp_shard(mesh, (ids,), {"a": masks_of("flex")}, "ptrr", ptrr_mask_key="b")
    with pytest.raises(ValueError, match="attention_masks is a int, 'ptrr' requires"):
        cp_shard(mesh, (ids,), {"a": 1}, "ptrr", ptrr_mask_key="a")
    varlen = VarlenAttention()
    apply_cp_to_forward([varlen], mesh)
    q = torch.randn(2, 4, 2, 8)
    whole = torch.tensor([0, 4, 2 * 4 * group.size()], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seq_q ends at 4, .* gives it 4 of 8 positions"):
        varlen(q, q, q, attention_masks=Offsets(whole[:2], whole[:2]))
    with pytest.raises(NotImplementedError, match="documents of queries and keys must be the same"):
        varlen(q, q, q, attention_masks=Offsets(whole, whole + 1))
