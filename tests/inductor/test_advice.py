"""Advice of `explain` keeps the result, names lines of the program, and is printed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

from symm_cp import inductor
from symm_cp.inductor.eager import Watch
from symm_cp.testing import Ranks

INSTEAD = "apply it to the product of the matmul instead"
ON_SHARD = "apply it to the shard, before the collective"


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def explained(fn: Any, *inputs: torch.Tensor) -> inductor.Report:
    torch._dynamo.reset()
    return inductor.explain(fn, *inputs)


def advises(group: dist.ProcessGroup) -> None:
    x, w, scale = torch.randn(8, 16), torch.randn(16, 4), torch.rand(16)

    def gather(x: torch.Tensor) -> torch.Tensor:
        return all_gather_tensor(x, 0, group)

    cases: list[tuple[Any, str]] = [
        (lambda x, w: gather(x)[3:7] @ w, INSTEAD),
        (lambda x, w: gather(x).flip(0) @ w, INSTEAD),
        (lambda x, w: gather(x).flip(1) @ w, "move it before the collective"),
        (lambda x, w: F.layer_norm(gather(x), (16,), scale) @ w, f"native_layer_norm, {ON_SHARD}"),
        (lambda x, w: rms(gather(x)) @ w, ON_SHARD),
        (lambda x, w: gather(x).relu() @ w, ON_SHARD),
        (lambda x, w: (gather(x) @ w)[3:7], ""),  # what is advised is fused
        (lambda x, w: gather(F.layer_norm(x, (16,), scale)) @ w, ""),
    ]  # fmt: skip
    for number, (fn, advice) in enumerate(cases):
        report = explained(fn, x, w)
        text = report.text().replace("which works on each row by itself: ", "")
        assert bool(report.fused) == (not advice), text
        assert advice in text, (number, text)
    # What differs between the rows of the ranks, or sums over them, cannot run on the shard.
    rows = torch.rand(8 * group.size(), 16)
    for fn in (
        lambda x, w: (gather(x) * rows) @ w,
        lambda x, w: gather(x).softmax(0) @ w,
        lambda x, w: (lambda full: full - full.mean(0))(gather(x)) @ w,
        lambda x, w: rms(all_gather_tensor(x, 1, group)) @ torch.cat([w] * group.size()),
        lambda x, w: gather(x).t()[2:9].t() @ w[2:9],  # slices columns
    ):
        text = explained(fn, x, w).text()
        assert "on each row" not in text, text
        assert INSTEAD not in text, text
    scattered = explained(
        lambda x, w: reduce_scatter_tensor((x @ w).flip(0), "sum", 0, group), x, w
    )
    assert "rearrange its operands instead" in scattered.text()


def test_advice_keeps_the_result(ranks: Ranks) -> None:
    ranks.run(2, advises, timeout=200)


def names_lines(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = all_gather_tensor(x, 0, group)
        return full @ w

    line = program.__code__.co_firstlineno + 1
    report = explained(program, x.detach(), w.detach())
    assert [decision.where for decision in report.decisions] == [f"{__file__}:{line}"]
    assert f", at {__file__}:{line})" in report.text()
    first = dist.get_rank() == 0
    assert (str(report) == report.text()) == first
    if not first:
        (one_line,) = str(report).splitlines()
        assert one_line.startswith("rank 1: 1 of 1 collectives fused; rank 0 prints the report")


def test_lines_and_one_report(ranks: Ranks) -> None:
    ranks.run(2, names_lines, timeout=100)


@pytest.mark.ranks(2)
def test_eager_advice(group: dist.ProcessGroup) -> None:
    x, w, scale = torch.randn(8, 16), torch.randn(16, 4), torch.rand(16)

    def found(fn: Any) -> dict[str, Any]:
        with Watch() as watch:
            fn()
        (described,) = watch.described()
        return described

    def gather() -> torch.Tensor:
        return all_gather_tensor(x, 0, group)

    for norm in (lambda x: F.layer_norm(x, (16,), scale), rms, torch.relu):
        seen = found(lambda norm=norm: norm(gather()) @ w)
        assert seen["could_be"] == "all_gather_matmul"
        assert ON_SHARD in seen["reason"]
        assert seen["where"].startswith(f"{__file__}:")
    rows = torch.rand(8 * group.size(), 16)
    assert found(lambda: (gather() * rows) @ w)["could_be"] is None
    for fn in (lambda x: x.softmax(0), lambda x: x - x.mean(0), lambda x: x / x.max()):
        assert found(lambda fn=fn: fn(gather()) @ w)["could_be"] is None
    assert found(lambda: gather() @ w)["reason"].startswith("it is next to mm")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_scatter_of_first_columns(ranks: Ranks, dim: int) -> None:
    ranks.run(2, scatters_first_columns, dim, timeout=200)


def scatters_first_columns(group: dist.ProcessGroup, unbacked: int) -> None:
    """Columns are cut in halves that leave out the last one if their number is odd."""

    def halves(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, half = torch.addmm(b, x, w), w.shape[1] // 2
        parts = torch.cat([y.narrow(1, 0, half), y.narrow(1, half, half)])
        return reduce_scatter_tensor(parts, "sum", 0, group)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, half = x @ w, w.shape[1] // 2
        parts = torch.cat([y.narrow(1, 0, half), y.narrow(1, half, half)])
        return reduce_scatter_tensor(parts, "sum", 0, group)

    def chunks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_tensor(x @ w, "sum", 1, group)

    def viewed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = (x @ w).unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1)
        return reduce_scatter_tensor(parts, "sum", 0, group)

    mark = torch._dynamo.decorators.mark_unbacked if unbacked else torch._dynamo.mark_dynamic
    for fn in (plain, viewed) if unbacked else (plain, viewed, chunks):
        torch._dynamo.reset()
        compiled = torch.compile(fn, options=inductor.compile_options(strict=True), fullgraph=True)
        for columns in (16, 17) if fn is plain else (16, 24):
            x, w = torch.randn(6, 8), torch.randn(8, columns)
            mark(w, 1)
            torch.testing.assert_close(compiled(x, w), fn(x, w))
    torch._dynamo.reset()
    compiled = torch.compile(halves, options=inductor.compile_options(strict=True), fullgraph=True)
    x, w, b = torch.randn(6, 8), torch.randn(8, 17), torch.randn(17)
    torch.testing.assert_close(compiled(x, w, b), halves(x, w, b))
