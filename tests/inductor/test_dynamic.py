"""Sequences of dynamic length; collectives that torch puts into buckets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor_autograd as gather
from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd as scatter

from symm_cp import inductor
from symm_cp.inductor.decisions import recording
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.inductor.graphs import AG, RS, close, run, without_kernels


def lengths(group: dist.ProcessGroup) -> None:
    weight = (torch.randn(16, 96) * 0.1).requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, gather(k, 2, group), gather(v, 2, group))

    def project(x: torch.Tensor) -> torch.Tensor:
        return attend(*((x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)))

    x = torch.randn(1, 12, 16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 1)
    report = inductor.explain(project, x)
    assert len(report.fused) == 1, str(report)
    assert not report.left, str(report)

    parts = [torch.randn(1, 2, 12, 16, requires_grad=True) for _ in range(3)]
    for part in parts:
        torch._dynamo.mark_dynamic(part, 2)
    report = inductor.explain(attend, *parts)
    assert not report.fused, str(report)
    # Nothing in the graph says that keys and values have the same length.
    assert "may have sizes that do not match" in report.text()


def compiled_once(group: dist.ProcessGroup) -> None:
    up, down = ((torch.randn(shape) * 0.1).requires_grad_() for shape in ((16, 24), (24, 16)))

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return scatter(gather(x, 0, group).matmul(up).relu() @ down, "sum", 0, group)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    with without_kernels(), inductor.enable(strict=True), recording() as report:
        for number, rows in enumerate((3, 5, 8)):
            x = torch.randn(rows, 16, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 0)
            inputs = (x, up, down)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                found, grads = run(compiled, inputs)
            expected = run(block, inputs)
            close([*found, *grads], [*expected[0], *expected[1]])
    names = sorted(str(decision.fused_into) for decision in report.decisions)
    assert names == [AG, AG, RS, RS], report  # one graph for each pass


@exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_compilation_serves_all_lengths(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, compiled_once, timeout=300)


def in_buckets(group: dist.ProcessGroup) -> None:
    """torch buckets the gathers of sharded weights, which the passes leave alone."""
    shards = [torch.randn(4, 4 * group.size(), requires_grad=True) for _ in range(3)]

    def layers(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            x = (x @ gather(shard, 0, group)).relu()
        return x

    inputs = torch.randn(5, 4 * group.size(), requires_grad=True), *shards
    results, grads = run(layers, inputs)
    torch._dynamo.reset()
    buckets = {f"bucket_{kind}_fx": "all" for kind in ("all_gathers", "reduce_scatters")}
    with without_kernels(**buckets), inductor.enable(), recording() as report:
        found, found_grads = run(torch.compile(layers, fullgraph=True), inputs)
    close([*found, *found_grads], [*results, *grads])
    assert len(report.left) == 3, report
    assert all("sums over the gathered rows" in left.reason for left in report.left), report
    assert [decision.fused_into for decision in report.fused] == [RS] * 3, report  # of gradients


@exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_in_buckets(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, in_buckets, timeout=300)


@exhaustive
def test_lengths_that_are_not_known(ranks: Ranks) -> None:
    ranks.run(2, lengths, timeout=300)
