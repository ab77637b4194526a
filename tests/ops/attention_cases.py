"""Calls of attention with any options, each checked in both passes against dense attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from symm_cp import set_rotate_method, tuning
from symm_cp.cuda import has_streams
from symm_cp.ops.attention import masks, philox
from symm_cp.schedule import SequenceLayout
from tests import device
from tests.attention_reference import Problem, check

OP = torch.ops.symm_mem.fused_all_gather_attention


@dataclass(frozen=True)
class Case:
    layout: SequenceLayout
    #: Queries of another sequence or spread differently; a number of each rank needs no layout.
    queries: SequenceLayout | int | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    features: int = 16
    value_features: int | None = None  # those of keys, if None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None
    document_ids: torch.Tensor | None = None  # (B or 1, S)
    key_mask: torch.Tensor | None = None  # (B or 1, S)
    prefixes: torch.Tensor | None = None  # (B or 1,)
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    with_lse: bool = False
    rotate: str = "allgather"
    strided: str = ""
    #: Gaps of keys from this length on split tiles.
    gap: int = masks.SHORT_GAP
    #: The options of a method.
    options: dict[str, Any] = field(default_factory=dict)

    def of_queries(self, ranks: int) -> SequenceLayout:
        if isinstance(self.queries, int):
            return SequenceLayout(ranks, tuple(range(ranks)), (self.queries,) * ranks)
        return self.layout if self.queries is None else self.queries

    def visible(self, queries: int) -> torch.Tensor:
        """(B, 1, S, S_k)."""
        position = torch.arange(self.layout.length)
        offset = position - torch.arange(queries).unsqueeze(1)
        mask = torch.ones(self.batch, 1, *offset.shape, dtype=torch.bool)
        if self.causal:
            mask &= offset <= 0
        if self.left is not None:
            mask &= offset >= -self.left
        if self.right is not None:
            mask &= offset <= self.right
        if self.prefixes is not None:
            mask |= position < self.prefixes.view(-1, 1, 1, 1)
        if self.documents is not None:
            number = torch.bucketize(position, torch.tensor(self.documents), right=True)
            mask &= number.unsqueeze(1) == number
        if self.document_ids is not None:
            ids = self.document_ids
            mask &= (ids.unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1)
        if self.key_mask is not None:
            mask &= self.key_mask[:, None, None]
        return mask

    def arguments(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.documents is not None:
            as_ints = len(self.documents) % 2 == 0
            told = {"document_edges": list(self.documents)}
            told = told if as_ints else {"cu_seqlens": torch.tensor(self.documents)}
        if isinstance(self.queries, SequenceLayout):
            told["query_chunk_order"] = list(self.queries.chunk_order)
            told["query_chunk_lengths"] = list(self.queries.chunk_lengths)
        return told | {
            "is_causal": self.causal,
            "scale": self.scale,
            "enable_gqa": self.heads != self.kv_heads,
            "chunk_order": list(self.layout.chunk_order),
            "chunk_lengths": list(self.layout.chunk_lengths),
            "window_left": self.left,
            "window_right": self.right,
            "document_ids": self.document_ids,
            "key_mask": self.key_mask,
            "prefix_lengths": self.prefixes,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            **self.options,
        }


def positions(layout: SequenceLayout, rank: int) -> torch.Tensor:
    return torch.tensor(list(layout.positions(rank)), dtype=torch.int64)


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another memory layout."""
    if how == "rows first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "features apart":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    return tensor.clone()


def problem_of(case: Case, ranks: int, seed: int) -> Problem:
    """The whole sequence, rounded to the dtype, the same on all ranks."""
    generator = torch.Generator(device.name()).manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).double()

    S, keys = case.of_queries(ranks).length, case.layout.length
    width = case.features if case.value_features is None else case.value_features
    q = draw(case.batch, case.heads, S, case.features)
    k = draw(case.batch, case.kv_heads, keys, case.features)
    v = draw(case.batch, case.kv_heads, keys, width)
    grad_out = draw(case.batch, case.heads, S, width)
    grad_lse = draw(*q.shape[:3]) if case.with_lse else None
    sinks = bias = kept = None
    wide = wide_of(case, seed)
    if case.sinks:
        sinks = draw(case.heads, dtype=wide)
        sinks[0] = -torch.inf if seed % 4 == 0 else 3.0
    if case.bias:
        bias = draw(case.heads, max(0, S + keys - 1), dtype=wide)
    if case.dropout_p:
        sizes = map(torch.arange, (case.batch, case.heads, S, keys))
        kept = philox.kept(*sizes, p=case.dropout_p, seed=seed)  # type: ignore[misc]
    return Problem(
        q, k, v, case.visible(S), grad_out, grad_lse, case.scale, case.softcap, sinks, bias, kept,
        case.dropout_p,
    )  # fmt: skip


def wide_of(case: Case, seed: int) -> torch.dtype:
    """The dtype of sinks and bias: those of 16-bit models are often kept in float32."""
    return random.Random(seed).choice([case.dtype, torch.promote_types(case.dtype, torch.float32)])


def results_of(
    call: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: dict[str, torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The results of a call, and the gradients of its inputs."""
    q, k, v, *_ = inputs.values()
    out, lse = call(q, k, v, **{n: t for n, t in inputs.items() if n in ("sinks", "bias")})
    outputs, grads = [out], [grad_out]
    if grad_lse is not None:
        outputs.append(lse)
        grads.append(grad_lse.to(lse.dtype))
    found = torch.autograd.grad(outputs, list(inputs.values()), grads)
    return {"out": out, "lse": lse, **dict(zip(inputs, found, strict=True))}


def run(group: dist.ProcessGroup, case: Case, seed: int) -> None:
    rank, problem = group.rank(), problem_of(case, group.size(), seed)
    at = dict.fromkeys("kv", positions(case.layout, rank))
    at |= dict.fromkeys(("q", "out", "lse"), positions(case.of_queries(group.size()), rank))
    inputs = {
        name: strided(t[:, :, at[name]].to(case.dtype), case.strided).requires_grad_()
        for name, t in (("q", problem.q), ("k", problem.k), ("v", problem.v))
    }
    for name, tensor in (("sinks", problem.sinks), ("bias", problem.bias)):
        if tensor is not None:
            inputs[name] = tensor.to(wide_of(case, seed)).requires_grad_()
    sent = problem.grad_out[:, :, at["q"]].to(case.dtype)
    sent_lse = None if problem.grad_lse is None else problem.grad_lse[:, :, at["q"]]
    given = {"dropout_seed": torch.tensor([seed], device="cpu"), **case.arguments()}

    def call(*tensors: torch.Tensor, **added: torch.Tensor) -> Any:
        return OP(*tensors, group.group_name, **given, **added)

    before, masks.SHORT_GAP = masks.SHORT_GAP, case.gap
    set_rotate_method(case.rotate)
    try:
        results = results_of(call, inputs, sent, sent_lse)
        # Few tokens are gathered at once on CPU.
        for algorithm in ("pipeline", "together")[: 2 if has_streams(inputs["q"].device) else 1]:
            with tuning.forced(algorithm):
                forced = results_of(call, inputs, sent, sent_lse)
            results |= {f"{algorithm} {name}": result for name, result in forced.items()}
    finally:
        set_rotate_method("allgather")
        masks.SHORT_GAP = before
    compare(group, case, seed, problem, at, results)


def compare(
    group: dist.ProcessGroup,
    case: Case,
    seed: int,
    problem: Problem,
    at: dict[str, torch.Tensor],
    results: dict[str, torch.Tensor],
) -> None:
    assert results["lse"].dtype == torch.promote_types(case.dtype, torch.float32)
    exact, dense = problem.solve(torch.float64), problem.solve(case.dtype)
    sizes = problem.terms()
    checked = partial(check, dropped=case.dropout_p)
    for which, result in results.items():
        name, text = which.rpartition(" ")[2], f"{which} of {case}, seed {seed}"
        if name not in ("sinks", "bias"):
            # The log-sum-exp is computed from float32 products even if inputs have 16 bits.
            size = sizes.get(name, 1.0)
            checked(text, result, exact[name], dense[name], at[name], result.dtype, size=size)
            continue
        assert result.dtype == wide_of(case, seed), text
        dist.all_reduce(result, group=group)  # each rank has its part
        given = [t.reshape(1, 1, -1) for t in (result, exact[name], dense[name])]
        terms = problem.q.shape[0] * problem.q.shape[2] * (case.features + problem.v.shape[3])
        entries = torch.arange(given[0].shape[2])
        checked(text, *given, entries, case.dtype, terms, size=max(sizes.values(), default=1.0))


def run_all(group: dist.ProcessGroup, cases: list[Case], seed: int) -> None:
    for number, case in enumerate(cases):
        run(group, case, seed + number)


def layouts(world_size: int) -> list[SequenceLayout]:
    """Uneven layouts in random order, and one with ranks without queries and keys."""
    order = random.sample(range(3 * world_size), 3 * world_size)
    lengths = [(5, 0, 9)[i % 3] for i in order]
    lonely = SequenceLayout(world_size, tuple(range(world_size)), (0,) * (world_size - 1) + (17,))
    return [SequenceLayout(world_size, tuple(order), tuple(lengths)), lonely]
