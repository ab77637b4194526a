"""Recurrent ops over parts of several fragments, as in the head-tail layout: one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp import causal_convolution
from symm_cp.ops.recurrent.fragments import runs_of
from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import pairs, some
from tests.ops.test_delta_rule import RULES, inputs, recurrence

pytestmark = device.devices("cpu", "simulated")

EDGES = {"whole": [], "packed": [0, 2, 9, 9, 10, 23]}
LENGTH = 23


def layout_of(kind: str, ranks: int) -> SequenceLayout:
    if kind == "head-tail":
        return head_tail(LENGTH, ranks)
    if kind == "documents":
        lengths = [b - a for a, b in itertools.pairwise(EDGES["packed"])]
        return symm_cp.PerDocumentHeadTail(lengths, ranks).layout
    if kind == "in order":
        return sequential(LENGTH, ranks)
    # Dealt in turns, like blocks of a mask; some are empty, and rank 0 has two in a row.
    order = [c for rank in range(ranks) for c in range(4 * ranks) if (c // 2) % ranks == rank]
    lengths = [3, 0, 1, 2] * ranks
    return SequenceLayout(ranks, tuple(order), (LENGTH - sum(lengths[1:]), *lengths[1:]))


def part(whole: torch.Tensor, layout: SequenceLayout, rank: int, dim: int = 1) -> torch.Tensor:
    return whole.index_select(dim, torch.tensor(list(layout.positions(rank)), dtype=torch.int64))


def recurs(
    group: dist.ProcessGroup, kind: str, edges: Sequence[int], compiled: bool = False, **how: bool
) -> None:
    rank, by_feature, erasing = group.rank(), how["by_feature"], how["erasing"]
    layout = layout_of(kind, group.size())
    whole = inputs(LENGTH, torch.float64, by_feature=by_feature, erasing=erasing)
    whole = [t.requires_grad_() for t in whole]
    q, k, v, g, *beta = whole
    want, states = recurrence(q, k, v, g, beta[0] if erasing else None, edges)
    weights = torch.randn_like(want)
    owner = next(r for r in range(group.size()) if LENGTH - 1 in layout.positions(r))
    loss = (want * weights).sum() + states[-1].sum()
    wanted = torch.autograd.grad(loss, whole)
    mine = [part(t.detach(), layout, rank).requires_grad_() for t in whole]

    def layer(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = {"cu_seqlens": torch.tensor(edges)} if edges else {}
        chunk_size = 2 if by_feature else 3
        return RULES[erasing](*args, group=group, chunk_size=chunk_size, layout=layout, **packed)

    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out, final = layer(*mine)
    torch.testing.assert_close(out, part(want, layout, rank))
    own = (out * part(weights, layout, rank)).sum()
    if rank == owner:
        torch.testing.assert_close(final, states[-1])
        own = own + final.sum()
    for got, needed in zip(torch.autograd.grad(own, mine), wanted, strict=True):
        torch.testing.assert_close(got, part(needed, layout, rank))


KINDS = ("head-tail", "documents", "in turns", "in order")
PLAIN: list[Any] = [
    (2, "head-tail", "whole", False, True),
    (3, "head-tail", "packed", True, True),
    (3, "in turns", "whole", False, False),
]
CASES = pairs((1, 2, 3, 4), KINDS, EDGES, (False, True), (False, True), also=PLAIN)


@pytest.mark.parametrize(
    ("world_size", "kind", "edges", "by_feature", "erasing"), some(*PLAIN, of=CASES)
)
def test_equals_the_recurrence(
    ranks: Ranks, world_size: int, kind: str, edges: str, by_feature: bool, erasing: bool
) -> None:
    ranks.run(world_size, recurs, kind, EDGES[edges], by_feature=by_feature, erasing=erasing)


def convolves(group: dist.ProcessGroup, kind: str, edges: Sequence[int]) -> None:
    """Convolutions with more taps than some fragments have positions; also second derivatives."""
    rank, layout = group.rank(), layout_of(kind, group.size())
    for taps in (1, 4, 9):
        x = torch.randn(2, 3, LENGTH, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(3).double()
        weights = torch.randn_like(x)
        bounds = list(edges) or [0, LENGTH]
        documents = [x[..., a:b] for a, b in itertools.pairwise(bounds) if a < b]
        want = torch.cat(
            [
                F.conv1d(F.pad(d, (taps - 1, 0)), weight.unsqueeze(1), bias, groups=3)
                for d in documents
            ],
            -1,
        )
        needed, of_weight = torch.autograd.grad((want * weights).sum(), [x, weight])
        mine = part(x.detach(), layout, rank, -1).requires_grad_()
        how: Any = {"layout": layout, **({"cu_seqlens": edges} if edges else {})}
        out = causal_convolution(mine, weight, bias, group=group, **how)
        torch.testing.assert_close(out, part(want, layout, rank, -1))
        grad_out = part(weights, layout, rank, -1).requires_grad_()
        got, own = torch.autograd.grad(out, [mine, weight], grad_out, create_graph=True)
        summed = own.detach().clone()
        dist.all_reduce(summed, group=group)
        torch.testing.assert_close(summed, of_weight)
        torch.testing.assert_close(got, part(needed, layout, rank, -1))
        # The gradient is linear in the output's gradient: its derivative is the convolution.
        (again,) = torch.autograd.grad(got, grad_out, mine.detach())
        torch.testing.assert_close(again + bias[:, None], out.detach())


@pytest.mark.parametrize(
    ("world_size", "kind", "edges"),
    some(
        (2, "head-tail", "whole"),
        (3, "head-tail", "packed"),
        of=pairs(
            (1, 2, 3, 4),
            KINDS,
            EDGES,
            also=[(2, "head-tail", "whole"), (3, "head-tail", "packed")],
        ),
    ),
)
def test_convolutions(ranks: Ranks, world_size: int, kind: str, edges: str) -> None:
    ranks.run(world_size, convolves, kind, EDGES[edges])


def refuses(group: dist.ProcessGroup) -> None:
    """All ranks refuse layouts that do not fit, and then make a good call."""
    args, layout = inputs(8, torch.float32), head_tail(16, 2)

    def call(**how: Any) -> Any:
        return symm_cp.gated_delta_rule(*args, group=group, chunk_size=4, **how)

    for wrong, error, message in (
        ({"layout": head_tail(16, 4)}, ValueError, "layout is of 4 ranks, the group has 2"),
        ({"layout": head_tail(12, 2)}, ValueError, r"layout gives rank \d 6 positions, its part"),
        ({"layout": layout, "sizes": [8, 8]}, ValueError, "got sizes and layout"),
        (
            {"layout": SequenceLayout(2, (3, 0, 1, 2), (4,) * 4)},
            NotImplementedError,
            "must hold their chunks in ascending order",
        ),
    ):
        with pytest.raises(error, match=message):
            call(**wrong)
    call(layout=layout)


def test_refuses_layouts_that_do_not_fit(ranks: Ranks) -> None:
    ranks.run(2, refuses)


def disagree(group: dist.ProcessGroup) -> None:
    """One rank forgot the layout, or has another one with as many sweeps."""
    args, rank = inputs(8, torch.float32), group.rank()
    other = SequenceLayout(2, (0, 3, 1, 2), (4, 3, 5, 4))
    for layout in (None, other):
        mine = layout if rank == 1 else head_tail(16, 2)
        with pytest.raises(RuntimeError, match="ranks disagree"):
            symm_cp.gated_delta_rule(*args, group=group, chunk_size=4, layout=mine)


@device.devices("cpu")
def test_ranks_that_disagree(ranks: Ranks) -> None:
    ranks.run(2, disagree)


def test_sweeps() -> None:
    """Head-tail takes two sweeps, documents two each, parts in rank order one."""
    for ranks in range(1, 9):
        for layout, sweeps in (
            (head_tail(64, ranks), 2),
            (sequential(64, ranks), 1),
            (symm_cp.PerDocumentHeadTail([64, 32, 16], ranks).layout, 6),
        ):
            runs = runs_of(list(layout.chunk_order), list(layout.chunk_lengths), ranks)
            assert runs[-1].sweep + 1 == sweeps
            ends = [run.start + run.length for run in runs]
            assert [run.start for run in runs] == [0, *ends[:-1]]
