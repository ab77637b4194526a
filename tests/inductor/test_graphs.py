"""Graphs that are fused, and graphs that must stay as they are: the rewrite and the numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.inductor.options import Options
from tests.exhaustive import some
from tests.inductor import all_reduce_graphs, attention_graphs, matmul_graphs, scaled_graphs
from tests.inductor.all_reduce_graphs import InputOfColumns, InRows, reduce
from tests.inductor.attention_graphs import attend
from tests.inductor.graphs import (
    AG,
    AR,
    ATTENTION,
    RS,
    SUM,
    Case,
    compare,
    draw,
    draw_seed,
    gather,
    scatter,
)  # fmt: skip
from tests.inductor.matmul_graphs import block


def graphs(W: int) -> dict[str, Case]:
    """All graphs for W ranks, by name."""
    return {
        **matmul_graphs.graphs(W),
        **scaled_graphs.graphs(W),
        **all_reduce_graphs.graphs(W),
        **attention_graphs.graphs(W),
    }


def column_and_row(group: Any, x: Any, w: Any, u: Any, v: Any, b: Any) -> Any:
    full = InputOfColumns.apply(x, group)
    return InRows.apply(F.linear(F.silu(full @ w) * (full @ u), v.mT, b), group)


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_dynamic_sizes(group: dist.ProcessGroup) -> None:
    """The size of the batch, or of batch and sequence, is dynamic; gathered dimensions are not."""
    seed = draw_seed()
    cases: list[tuple[Any, int, list[Any], list[Any], list[str]]] = [
        (block, 1, [[(n, 4, 6)] for n in (2, 3, 5)], [(6, 5), (5, 6)], [AG, AG, RS, RS]),
        (attend, 1, [[(n, 3, 4, 8)] * 3 for n in (2, 3)], [], [ATTENTION]),
        (column_and_row, 2, [[(2, 4, 6)], [(3, 7, 6)]], [(6, 5), (6, 5), (5, 6), (6,)], [SUM] * 2),
    ]
    for fn, dims, batches, weights, fused in cases:
        for shapes in batches:
            inputs = draw(group, seed, *shapes, *weights)
            for t in inputs[: len(shapes)]:
                torch._dynamo.mark_dynamic(t, list(range(dims)))
            compiled = compare(partial(fn, group), inputs, Options(strict=True))
            found = sorted(str(d.fused_into) for d in compiled.report.decisions)
            assert found == fused, str(compiled.report)


@pytest.mark.ranks(4)
def test_groups_of_a_mesh_are_told_apart(group: dist.ProcessGroup) -> None:
    """Rows gathered over a dimension of a mesh, products scattered, or reduced, over the other."""
    seed = draw_seed()
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh.get_group("a"), mesh.get_group("b")

    def moved(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        return scatter(gather(x, 0, a) @ w, 0, b), gather(x, 0, b) @ u

    def reduced(x: torch.Tensor, w: torch.Tensor) -> Any:
        twice = reduce(reduce(x @ w, a).view(-1), b)
        return twice, reduce(x @ w * 2, a) + reduce(x @ w.exp(), b)

    report = compare(moved, draw(group, seed, (4, 6), (6, 5), (6, 5))).report
    assert {d.group for d in report.fused} == {a.group_name, b.group_name}, report
    inputs = draw(group, seed, (4, 6), (6, 5), requires_grad=False)
    report = compare(reduced, inputs).report
    fused = [(d.fused_into, d.group) for d in report.fused]
    assert fused == [(AR, a.group_name), (AR, b.group_name)], report


ON_TWO = [(2, name) for name in graphs(2)]
ON_FOUR = [(4, name) for name in graphs(4)]
#: The graphs of a short run: few all-reduces, since these keep shapes and layouts, and every sixth
#: of the rest, since neighbours in the list are similar.
PLAIN = [(2, name) for name in graphs(2) if name not in all_reduce_graphs.RARE][::6]


# Each on two ranks, every fourth one on four as well.
@pytest.mark.parametrize(("world_size", "name"), some(*PLAIN, of=[*ON_TWO, *ON_FOUR[::4]]))
@pytest.mark.ranks
def test_graph(group: dist.ProcessGroup, world_size: int, name: str) -> None:
    seed = draw_seed()
    graph = graphs(group.size())[name]
    inputs = draw(group, seed, *graph.shapes, dtype=graph.dtype, requires_grad=graph.grad)
    within = None
    if graph.dtype is torch.bfloat16 or "scaled" in name or "mixed" in name:
        # A 16-bit term of the sum, and each sum on the way, is rounded by up to 2**-9 of its size,
        # and both may be larger than the element that they end in.
        within = group.size() * 2.0**-7
    elif name in ("cast", "narrowed", "all-reduce: cast down"):
        within = 1e-5  # products of different shapes round differently
    compiled = compare(partial(graph.fn, group), inputs, graph.options, within=within)
    fused = [d.fused_into for d in compiled.report.fused]
    assert sorted(map(str, fused)) == sorted(graph.fused) or (
        graph.grad and set(graph.fused) <= set(map(str, fused))
    ), str(compiled.report)
    for reason in graph.reasons:
        assert any(reason in d.reason for d in compiled.report.left), str(compiled.report)
    left = [op for op in compiled.ops if "_c10d_functional" in op]
    if any(not decision.runs_as for decision in compiled.report.left):
        assert left, compiled.ops
    else:
        # No collective is left, and the graph has the ops that the report names.
        assert not left, (left, str(compiled.report))
        for op in graph.fused:
            assert any(op in ran or (op == RS and "reduce_scatter" in ran) for ran in compiled.ops)
