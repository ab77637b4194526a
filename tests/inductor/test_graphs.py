"""Graphs that are fused, and graphs that must stay as they are: the rewrite and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.inductor.options import Options
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.inductor import all_reduce_graphs, attention_graphs, matmul_graphs, scaled_graphs
from tests.inductor.graphs import AG, ATTENTION, RS, Case, gather, run, scatter, through_passes
from tests.inductor.matmul_graphs import block


def graphs(W: int) -> dict[str, Case]:
    """All graphs for W ranks, by name."""
    return {
        **matmul_graphs.graphs(W),
        **scaled_graphs.graphs(W),
        **all_reduce_graphs.graphs(W),
        **attention_graphs.graphs(W),
    }


def check(group: dist.ProcessGroup, name: str, seed: int) -> None:
    graph = graphs(group.size())[name]
    generator = torch.Generator().manual_seed(seed + group.rank())
    inputs = [torch.randn(s, dtype=graph.dtype, generator=generator) for s in graph.shapes]
    for t in inputs:
        t.requires_grad_(graph.grad)

    def fn(*tensors: torch.Tensor) -> Any:
        return graph.fn(group, *tensors)

    results, grads = run(fn, inputs)
    compiled = through_passes(fn, inputs, graph.options)
    for got, want in zip([*compiled.results, *compiled.grads], [*results, *grads], strict=True):
        # Products of different shapes round differently; 16-bit sums do not accumulate in float32.
        casts = name in ("cast", "narrowed", "all-reduce: cast down")
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if casts else {}
        if graph.dtype is torch.bfloat16 or "scaled" in name or "mixed" in name:
            # A 16-bit term of the sum, and each sum on the way, is rounded by up to 2**-9 of
            # its size, and both may be larger than the element that they end in.
            size = float(want.abs().max()) if want.numel() else 0.0
            tolerance = {"rtol": 0.0, "atol": group.size() * 2.0**-7 * size}
        torch.testing.assert_close(got, want, **tolerance)
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


def with_dynamic_batch(group: dist.ProcessGroup, seed: int) -> None:
    """The batch size is dynamic; the size of the gathered dimension is static."""
    generator = torch.Generator().manual_seed(seed + group.rank())

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention_graphs.attend(group, q, k, v)

    def feed_forward(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        return block(group, x, w, u)

    weights = draw(6, 5), draw(5, 6)
    cases = [
        (feed_forward, [(draw(n, 4, 6), *weights) for n in (2, 3, 5)], [AG, AG, RS, RS]),
        (attention, [tuple(draw(n, 3, 4, 8) for _ in range(3)) for n in (2, 3)], [ATTENTION]),
    ]
    for fn, batches, fused in cases:
        for inputs in batches:
            results, grads = run(fn, inputs)
            for t in inputs[: 1 if fn is feed_forward else 3]:
                torch._dynamo.mark_dynamic(t, 0)
            compiled = through_passes(fn, inputs, Options())
            for got, want in zip(
                [*compiled.results, *compiled.grads], [*results, *grads], strict=True
            ):
                torch.testing.assert_close(got, want)
            fused_into = sorted(str(d.fused_into) for d in compiled.report.fused)
            assert fused_into == fused, str(compiled.report)
            assert not compiled.report.left, str(compiled.report)


@pytest.mark.exhaustive
def test_dynamic_batch(ranks: Ranks) -> None:
    ranks.run(2, with_dynamic_batch, int(torch.randint(1 << 30, ())))


def two_groups(group: dist.ProcessGroup, seed: int) -> None:
    """Rows gathered over one dimension of a mesh, products scattered over the other."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh.get_group("a"), mesh.get_group("b")
    generator = torch.Generator().manual_seed(seed + group.rank())
    shapes = ((4, 6), (6, 5), (6, 5))
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    for t in inputs:
        t.requires_grad_()

    def fn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        return scatter(gather(x, 0, a) @ w, 0, b), gather(x, 0, b) @ u

    results, grads = run(fn, inputs)
    compiled = through_passes(fn, inputs, Options())
    for got, want in zip([*compiled.results, *compiled.grads], [*results, *grads], strict=True):
        torch.testing.assert_close(got, want)
    names = {a.group_name, b.group_name}
    assert {d.group for d in compiled.report.fused} == names, str(compiled.report)


def test_groups_of_a_mesh_are_told_apart(ranks: Ranks) -> None:
    ranks.run(4, two_groups, int(torch.randint(1 << 30, ())))


ON_TWO = [(2, name) for name in graphs(2)]
ON_FOUR = [(4, name) for name in graphs(4)]
#: The graphs of a short run: few all-reduces, since these keep shapes and layouts, and every sixth
#: of the rest, since neighbours in the list are similar.
PLAIN = [(2, name) for name in graphs(2) if name not in all_reduce_graphs.RARE][::6]


# Each on two ranks, every fourth one on four as well.
@pytest.mark.parametrize(("world_size", "name"), some(*PLAIN, of=[*ON_TWO, *ON_FOUR[::4]]))
def test_graph(ranks: Ranks, world_size: int, name: str) -> None:
    ranks.run(world_size, check, name, int(torch.randint(1 << 30, ())))
