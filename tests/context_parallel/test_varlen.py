"""`varlen_attn` within context_parallel against dense attention to each document."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import symm_cp
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import pairs as pairs_of
from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, assert_all_close, mesh_of
from tests.context_parallel.common import attention as attended
from tests.context_parallel.test_flex_compiled import graphs, one_graph
from tests.exhaustive import pairs, some

HEADS, KEY_HEADS, FEATURES = 4, 2, 8
# Some longer than all ranks' chunks, of one token, and empty: cumulative lengths may repeat.
DOCUMENTS = ([7, 40, 1, 0, 13], [61], [1, 2, 3, 5, 0])
WINDOWS = ((-1, -1), (-1, 0), (5, 0), (4, 3), (0, 0), (-1, 2))
LAYOUTS: dict[str, Callable[[list[int], int], symm_cp.LoadBalancer]] = {
    "head_tail": lambda lengths, W: symm_cp.HeadTail(sum(lengths), W),
    "sequential": lambda lengths, W: symm_cp.Sequential(sum(lengths), W),
    "documents": symm_cp.PerDocumentHeadTail,
}
Tensors = list[torch.Tensor]
_TAKEN = inspect.signature(varlen_attn).parameters
#: torch 2.11 accepts fewer key heads without an option.
FEWER_KEY_HEADS = {"enable_gqa": True} if "enable_gqa" in _TAKEN else {}


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def inputs(tokens: int) -> Tensors:
    """Queries, keys, values, and gradients of the output and the log-sum-exp; on all ranks."""
    shapes = [(tokens, heads, FEATURES) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return [torch.randn(shape, dtype=torch.float64) for shape in (*shapes, (HEADS, tokens))]


def learning(tensors: Tensors) -> Tensors:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def dense(
    tensors: Tensors, cu_seq: torch.Tensor, window: tuple[int, int], scale: float | None = None
) -> Tensors:
    """Output and log-sum-exp, document by document."""
    left, right = window
    outs, lses = [], []
    for begin, end in itertools.pairwise(cu_seq.tolist()):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in tensors)
        at = torch.arange(end - begin)
        away = at - at[:, None]
        hidden = (away < -left) & (left >= 0) | (away > right) & (right >= 0)
        out, lse = attended(q, k, v, ~hidden, scale=scale)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return [torch.cat(outs), torch.cat(lses, 1)]


def results(
    given: Tensors, rows: torch.Tensor, cu_seq: torch.Tensor, window: tuple[int, int], scale: float
) -> Tensors:
    """The expected output, log-sum-exp and gradients of these rows."""
    whole = learning(given[:3])
    out, lse = dense(whole, cu_seq, window, scale)
    grads = torch.autograd.grad((out, lse), whole, given[3:])
    return [out[rows], lse[:, rows], *(grad[rows] for grad in grads)]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, window: Any, scale: Any
) -> Any:
    options: dict[str, Any] = {"window_size": window, "scale": scale, **FEWER_KEY_HEADS}
    return varlen_attn(q, k, v, cu, cu, 61, 61, return_aux=AuxRequest(lse=True), **options)


def check(
    given: Tensors,
    rows: torch.Tensor,
    cu_seq: torch.Tensor,
    window: tuple[int, int],
    scale: float | None = None,
    function: Callable[..., Any] = attention,
) -> None:
    parts = learning([tensor[rows] for tensor in given[:3]])
    out, lse = function(*parts, cu_seq, window, scale)
    assert out.is_contiguous()
    grads = torch.autograd.grad((out, lse), parts, [given[3][rows], given[4][:, rows]])
    expected = results(given, rows, cu_seq, window, scale or FEATURES**-0.5)
    assert_all_close([out, lse, *grads], expected)


def attends(group: dist.ProcessGroup, layout: str, method: str, seed: int) -> None:
    torch.manual_seed(seed)
    for lengths in DOCUMENTS:
        given, cu_seq = inputs(sum(lengths)), cumulative(lengths)
        balancer = LAYOUTS[layout](lengths, group.size())
        rows = balancer.positions(group.rank())
        with symm_cp.context_parallel(group, load_balancer=balancer, method=method):
            for window in WINDOWS:
                check(given, rows, cu_seq, window, 0.3 if window == (4, 3) else None)


@pytest.mark.parametrize(
    ("world_size", "layout", "method"),
    some(
        (3, "documents", "allgather"),
        (2, "head_tail", "ulysses"),
        of=pairs(
            (1, 2, 3, 4),
            LAYOUTS,
            ("allgather", "ulysses"),
            also=[(3, "documents", "allgather"), (2, "head_tail", "ulysses")],
        ),
    ),
)
def test_documents_are_those_of_one_process(
    ranks: Ranks, world_size: int, layout: str, method: str
) -> None:
    seed = int(torch.randint(2**31, ()))
    ranks.run(world_size, attends, layout, method, seed)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    some((2, "aot_eager"), of=[(2, "inductor"), *((W, "aot_eager") for W in (1, 2, 3, 4))]),
)
@pytest.mark.ranks
def test_compiled_calls_are_in_one_graph(
    group: dist.ProcessGroup, world_size: int, backend: str
) -> None:
    """One graph is enough for all layouts and documents."""
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    torch.compiler.reset()
    before = graphs()
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    with one_graph():
        for layout, lengths in itertools.product(LAYOUTS, ([24, 72], [48, 48])):
            balancer = LAYOUTS[layout](lengths, group.size())  # all ranks hold equally many
            given, rows = inputs(sum(lengths)), balancer.positions(group.rank())
            with symm_cp.context_parallel(group, load_balancer=balancer):
                check(given, rows, cumulative(lengths), (5, 0), None, compiled)
    assert graphs() == before + 1


@pytest.mark.parametrize(
    ("world_size", "of_samples"), some((2, True), (3, False), of=pairs((1, 2, 3, 4), (True, False)))
)
@pytest.mark.ranks
def test_samples_may_be_in_a_row(
    group: dist.ProcessGroup, world_size: int, of_samples: bool
) -> None:
    """A batch whose samples are cut, and which the model then flattens."""
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    torch.compiler.reset()
    W, rank = group.size(), group.rank()
    each = [8 * W, 4 * W, 4 * W], [2 * W, 10 * W, 4 * W], [16 * W]
    length = 16 * W
    balancer: symm_cp.LoadBalancer = symm_cp.HeadTail(length, W)
    if of_samples:
        balancer = symm_cp.PerDocumentHeadTail(each, W)
    held = balancer.positions(rank)
    held = held.expand(len(each), -1) if held.dim() == 1 else held
    rows = (held + torch.arange(len(each))[:, None] * length).flatten()
    given, cu_seq = inputs(len(each) * length), cumulative([n for one in each for n in one])
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with symm_cp.context_parallel(group, load_balancer=balancer):
        for window, function in (
            ((-1, 0), attention),
            ((3, 2), compiled if of_samples else attention),
        ):
            check(given, rows, cu_seq, window, None, function)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_work_within_documents_is_balanced(world_size: int) -> None:
    lengths = [*torch.randint(1, 900, (12,)).tolist(), 4000]
    mask = Mask(None, 0, tuple(cumulative(lengths).tolist()))

    def shares(balancer: symm_cp.LoadBalancer) -> list[float]:
        work = [pairs_of(balancer.layout, mask, rank) for rank in range(world_size)]
        assert sum(work) == sum(n * (n + 1) // 2 for n in lengths)
        return [world_size * each / sum(work) for each in work]

    assert max(shares(symm_cp.PerDocumentHeadTail(lengths, world_size))) < 1.02
    assert max(shares(symm_cp.HeadTail(sum(lengths), world_size))) > 1.1


# --- a model --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention to packed documents as torchtitan's models call it."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * FEATURES
        self.qkv = nn.Linear(width, (HEADS + 2 * KEY_HEADS) * FEATURES)
        self.o = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cu_seq: torch.Tensor, longest: int) -> torch.Tensor:
        heads = self.qkv(x).view(-1, HEADS + 2 * KEY_HEADS, FEATURES)
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        out = varlen_attn(
            *(q, k, v, cu_seq, cu_seq, longest, longest), window_size=(-1, 0), **FEWER_KEY_HEADS
        )
        return x + self.o(out.view(*x.shape))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HEADS * FEATURES)
        self.positions = nn.Embedding(64, HEADS * FEATURES)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HEADS * FEATURES, 50)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, cu_seq: torch.Tensor, longest: int
    ) -> torch.Tensor:
        x = self.embed(ids) + self.positions(positions)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, cu_seq, longest, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("world_size", some(3, of=[2, 3, 4]))
@pytest.mark.ranks
def test_a_model_trains_as_in_one_process(group: dist.ProcessGroup, world_size: int) -> None:
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    lengths = [9, 30, 1, 24]
    ids = torch.randint(50, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    batch["cu_seq_q"] = cumulative(lengths)
    model = Model().double()
    one = symm_cp.context_parallel(dist.new_subgroups(1)[0], load_balancer=None)
    with one:
        logits = model(ids, positions, batch["cu_seq_q"], max(lengths))
        loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
        expected = torch.autograd.grad(loss, list(model.parameters()))
    balancer = symm_cp.PerDocumentHeadTail(lengths, group.size())
    local, reduce_loss = symm_cp.shard_batch(group, batch, load_balancer=balancer)
    with symm_cp.context_parallel(group, load_balancer=reduce_loss.load_balancer):
        logits = model(local["input_ids"], local["position_ids"], local["cu_seq_q"], max(lengths))
        total = reduce_loss(F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten()))
        grads = torch.autograd.grad(total, list(model.parameters()))
    for grad in grads:
        dist.all_reduce(grad, group=group)
    torch.testing.assert_close(total, loss, **CLOSE)
    assert_all_close(grads, expected)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_what_cannot_be_served_is_refused(group: dist.ProcessGroup) -> None:
    W = group.size()
    torch.manual_seed(5)
    q, k, whole = torch.randn(8, HEADS, 4), torch.randn(8, KEY_HEADS, 4), cumulative([3, 8 * W - 3])
    own, given = cumulative([3, 5]), inputs(8 * W)  # a context would spread the draws
    balancer = symm_cp.HeadTail(8 * W, W)

    def refused(kind: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            varlen_attn(*args, 8, 8, **options)

    with symm_cp.context_parallel(group, load_balancer=balancer):
        refused(ValueError, r"cu_seq_q ends at 8, this rank has 8 tokens.*all", q, q, q, own, own)
        refused(ValueError, "must end at the number of all", q, q, q, whole[:-1], whole[:-1])
        refused(ValueError, "must ascend from 0", q, q, q, whole.flip(0), whole.flip(0))
        refused(ValueError, "cu_seq_q must be a 1-D tensor", q, q, q, whole[None], whole[None])
        refused(ValueError, "query has shape", *(q[None],) * 3, whole, whole)
        other = torch.tensor([0, 4, 8 * W], dtype=torch.int32)
        refused(NotImplementedError, "cu_seq_q is .* and cu_seq_k ", q, q, q, whole, other)
        refused(NotImplementedError, "cu_seq_k=None", q, q, q, whole, None)
        refused(NotImplementedError, "query has 8 tokens and key 4", q, q[:4], q[:4], whole, whole)
        for options in ({"seqused_k": own}, {"num_splits": 1}):
            if not options.keys() <= _TAKEN.keys():  # torch 2.11
                continue
            refused(NotImplementedError, next(iter(options)), q, q, q, whole, whole, **options)
        compiled = torch.compile(varlen_attn, backend="eager", fullgraph=True)
        with pytest.raises(ValueError, match="cu_seq_q ends at 8, this rank has 8 tokens"):
            compiled(q, q, q, own, own, 8, 8)
        if FEWER_KEY_HEADS:
            with pytest.raises(ValueError, match="same number of heads"):  # torch's own
                varlen_attn(q, k, k, whole, whole, 8, 8)
        if (varlen_attn_out := getattr(varlen, "varlen_attn_out", None)) is not None:  # 2.12
            with pytest.raises(NotImplementedError, match=r"varlen_attn_out .* call varlen_attn"):
                varlen_attn_out(torch.empty_like(q), q, q, q, whole, whole, 8, 8)
        check(given, balancer.positions(group.rank()), whole, (1, 0))
    with symm_cp.context_parallel(group):
        refused(ValueError, "has no load_balancer", q, q, q, whole, whole)
    two, twice = {8 * W: balancer, 16 * W: symm_cp.HeadTail(16 * W, W)}, torch.cat([q, q])
    with symm_cp.context_parallel(group, load_balancer=two):
        refused(ValueError, "may be sequences of any of", *(twice,) * 3, 2 * whole, 2 * whole)
    with pytest.raises((RuntimeError, NotImplementedError), match="_flash_attention_forward"):
        varlen_attn(q, q, q, own, own, 8, 8)  # outside of a context: torch's own


@pytest.mark.ranks(2)
def test_peers_hear_of_a_refusal_at_once(group: dist.ProcessGroup) -> None:
    q, whole = torch.randn(8, HEADS, 4), cumulative([3, 8 * group.size() - 3])
    given = cumulative([3, 5]) if group.rank() == 1 else whole
    with symm_cp.context_parallel(group, load_balancer=symm_cp.HeadTail(16, group.size())):
        with pytest.raises((ValueError, RuntimeError), match="cu_seq_q ends at 8"):
            varlen_attn(q, q, q, given, given, 8, 8)
        varlen_attn(q, q, q, whole, whole, 8, 8)


def on_one_rank(group: dist.ProcessGroup) -> None:
    """Unsupported options are left to torch, which has no such kernel on CPU."""
    q, whole = torch.randn(8, HEADS, 4), cumulative([3, 5])
    with (
        symm_cp.context_parallel(group, on_unfused="ignore"),
        pytest.raises((RuntimeError, NotImplementedError), match="_flash_attention_forward"),
    ):
        varlen_attn(q, q, q, whole, whole, 8, 8, num_splits=1)


if "num_splits" in _TAKEN:  # the context supports all options of torch 2.11's varlen_attn

    def test_one_rank_refuses_nothing(ranks: Ranks) -> None:
        ranks.run(1, on_one_rank)


# --- the README ---------------------------------------------------------------------------------


def as_documented(group: dist.ProcessGroup, example: str) -> None:
    torch.manual_seed(7)
    scope: dict[str, Any] = {"mesh": mesh_of(group)}
    exec(example, scope)
    rows = scope["balancer"].positions(group.rank())
    ids = scope["batch"]["input_ids"][0]
    assert torch.equal(scope["local"]["input_ids"][0], ids[rows])
    whole = scope["projection"](scope["embedding"](ids)).view(-1, 3, 4, 16).unbind(1)
    for begin, end in itertools.pairwise(scope["cu_seq"].tolist()):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in whole)
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        own = (begin <= rows) & (rows < end)
        torch.testing.assert_close(scope["out"][own], right[rows[own] - begin])


def test_the_example_of_the_readme_runs(ranks: Ranks) -> None:
    readme = Path(symm_cp.context_parallel.__file__).with_name("README.md").read_text()
    (example,) = re.findall(r"```python\n(import itertools\n.*?)```", readme, re.DOTALL)
    ranks.run(3, as_documented, example)
