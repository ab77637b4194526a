"""All-reduces of compiled graphs: whole models, Inductor's code, reports, groups over hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

import symm_cp
from symm_cp import inductor
from symm_cp.inductor.options import Options
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some
from tests.hosts.apart import spread_out
from tests.inductor.all_reduce_graphs import InputOfColumns, InRows, reduce
from tests.inductor.graphs import AR, SUM, run, through_passes
from tests.inductor.test_compile import Block, compiling, gradients, mesh_of

C10D = "_c10d_functional"


def draw_seed() -> int:
    return int(torch.randint(1 << 30, ()))


def two_layers(group: dist.ProcessGroup) -> nn.Module:
    """torch's styles without sequence parallelism; column-parallel layers all-reduce separately."""
    torch.manual_seed(0)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Block(), mesh_of(group), plan)


def shared_input(group: dist.ProcessGroup) -> nn.Module:
    """The same, with one all-reduce of the sum of the gradients."""
    torch.manual_seed(0)
    whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
    plan = {
        "norm": PrepareModuleOutput(**whole, use_local_output=False),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    return parallelize_module(Block(), mesh_of(group), plan)


def trains(group: dist.ProcessGroup, make: Callable[..., nn.Module], seed: int) -> None:
    model = make(group)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out = model(x)
    expected = [out.detach(), *gradients(model, out, x)]
    compiled = through_passes(model, [x], Options(strict=True), model)
    for got, want in zip([*compiled.results, *compiled.grads], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    fused = [decision.fused_into for decision in compiled.report.decisions]
    assert fused == [SUM, SUM], str(compiled.report)  # with `down`'s bias; sum of two gradients
    assert not [op for op in compiled.ops if C10D in op]


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.parametrize("make", some(two_layers, of=[two_layers, shared_input]))
def test_layers_of_dtensors(ranks: Ranks, world_size: int, make: Callable[..., nn.Module]) -> None:
    ranks.run(world_size, trains, make, draw_seed())


def layers(group: Any, x: Any, w: Any, u: Any, v: Any, b: Any) -> Any:
    full = InputOfColumns.apply(x, group)
    mixed = InRows.apply(F.linear(F.silu(full @ w) * (full @ u), v.mT, b), group)
    dist.all_reduce(own := (mixed.detach() @ w[:, :12]), group=group)
    other = x.detach().sin() @ u[:, :12]  # not a product of the block, however wide that is
    first, second = funcol.all_reduce_coalesced([other, b.detach()], "sum", group)
    return mixed, own, first, second, reduce(x.detach().sum(), group)


def generates_code(group: dist.ProcessGroup, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + group.rank())
    hidden = 12 + group.rank()  # differs from rank to rank
    shapes = ((2, 5, 16), (16, hidden), (16, hidden), (hidden, 16), (16,))
    draw = [torch.randn(s, generator=generator) for s in shapes]
    inputs = [t.to(dtype).requires_grad_() for t in draw]
    reports: dict[bool, str] = {}

    def results(passes: bool) -> list[torch.Tensor]:
        def train() -> Any:
            options = inductor.compile_options() if passes else None
            return run(torch.compile(lambda *a: layers(group, *a), options=options), inputs)

        torch._dynamo.reset()
        (outputs, grads), code = run_and_get_code(train)
        reports[passes] = "\n".join(code)
        return [*outputs, *grads]

    with compiling(), inductor_config.patch(fallback_by_default=True):
        for got, want in zip(results(True), results(False), strict=True):
            # Sums of up to 16 products and their gradients, rounded at different points.
            tolerance = 64 * torch.finfo(dtype).eps * float(want.abs().max().clamp(min=1))
            torch.testing.assert_close(got, want, rtol=0.0, atol=tolerance)
    assert f"{C10D}.all_reduce" in reports[False]
    assert "symm_mem" not in reports[False]
    assert C10D not in reports[True]
    for op in (AR, SUM, "_all_reduce"):
        assert f"symm_mem.{op}" in reports[True], op


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (3, torch.float64)],
)
def test_inductor(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    ranks.run(world_size, generates_code, dtype, draw_seed(), timeout=300)


def sizes_that_are_not_known(group: dist.ProcessGroup, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + group.rank())

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def fn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor, b: Any) -> Any:
        full = InputOfColumns.apply(x, group)
        return InRows.apply(F.linear(F.silu(full @ w) * (full @ u), v.mT, b), group)

    weights = draw(6, 5), draw(6, 5), draw(5, 6), draw(6)
    for shape in ((2, 4), (3, 7)):
        inputs = [draw(*shape, 6), *weights]
        results, grads = run(fn, inputs)
        for dim in range(2):
            torch._dynamo.mark_dynamic(inputs[0], dim)
        compiled = through_passes(fn, inputs, Options(strict=True))
        for got, want in zip([*compiled.results, *compiled.grads], [*results, *grads], strict=True):
            torch.testing.assert_close(got, want)
        assert [d.fused_into for d in compiled.report.decisions] == [SUM, SUM], compiled.report


@pytest.mark.exhaustive
def test_batch_and_length_that_are_not_known(ranks: Ranks) -> None:
    ranks.run(2, sizes_that_are_not_known, draw_seed())


def one_after_the_other(group: dist.ProcessGroup, seed: int) -> None:
    """A product that is reduced over one dimension of a mesh, then over the other."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh.get_group("a"), mesh.get_group("b")
    generator = torch.Generator().manual_seed(seed + group.rank())
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in ((4, 6), (6, 5))]

    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        once = reduce(x @ w, a)
        twice = reduce(once.view(-1), b)
        return twice, reduce(x @ w * 2, a) + reduce(x @ w.exp(), b)

    results, _ = run(fn, inputs)
    compiled = through_passes(fn, inputs, Options())
    for got, want in zip(compiled.results, results, strict=True):
        torch.testing.assert_close(got, want)
    assert [(d.fused_into, d.group) for d in compiled.report.fused] == [
        (AR, a.group_name),
        (AR, b.group_name),
    ], compiled.report


@exhaustive
def test_two_groups(ranks: Ranks) -> None:
    ranks.run(4, one_after_the_other, draw_seed())


def over_hosts(group: dist.ProcessGroup, seed: int) -> None:
    """A graph that was compiled, or cached, for one host runs where the ranks are on two."""
    generator = torch.Generator().manual_seed(seed + group.rank())
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in ((4, 6), (6, 5))]
    with spread_out(group, "01") as wide:

        def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
            return reduce(x @ w, wide), reduce(x, wide)

        results, _ = run(fn, inputs)
        compiled = through_passes(fn, inputs, Options())
        for got, want in zip(compiled.results, results, strict=True):
            torch.testing.assert_close(got, want)
        assert not [op for op in compiled.ops if C10D in op]


def test_groups_over_hosts(ranks: Ranks) -> None:
    ranks.run(2, over_hosts, draw_seed())


def lists_all(group: dist.ProcessGroup) -> None:
    x, w, b = torch.randn(64, 8), torch.randn(8, 8), torch.randn(8)
    ops, name = torch.ops._c10d_functional, group.group_name

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        results = [
            funcol.all_gather_tensor(x, 0, group) @ w,
            funcol.reduce_scatter_tensor(x @ w, "sum", 0, group),
            reduce(x @ w.exp(), group),
            reduce(F.linear(x, w, b), group),
            reduce((y := x @ w.sin()), group) + y,
            reduce(x, group, "max"),
            funcol.broadcast(x, 0, group),
            funcol.all_to_all_single(x, None, None, group) @ w,
            *funcol.all_gather_into_tensor_coalesced([x, w], group),
            *funcol.reduce_scatter_tensor_coalesced([x, w], "sum", [0, 0], group),
            symm_cp.matmul_all_reduce(x, w, group=name),
            torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name),
        ]
        results += [ops.wait_tensor(t) for t in ops.all_reduce_coalesced([x, b], "sum", name)]
        return [t * 2 for t in results]

    with compiling():
        report = inductor.explain(fn, x, w, b)
    kinds = {d.collective.rstrip("_0123456789"): d for d in report.decisions}
    assert set(kinds) == {
        "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast",
        "all_to_all_single", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
        "all_reduce_coalesced[0]", "all_reduce_coalesced[1]",
        "fused_matmul_all_reduce", "one_shot_all_reduce",
    }, report  # fmt: skip
    assert len(report.decisions) == 14, report
    assert len(report.fused) == 5, report
    called = [d for d in report.decisions if d.reason == "called by the program"]
    assert [(d.fused_into, d.runs_as) for d in called] == [
        (AR, None), (None, "one_shot_all_reduce"),
    ]  # fmt: skip
    replaced = [d.runs_as for d in report.left if d.runs_as and d not in called]
    assert replaced == ["_all_reduce"] * 3
    critical = {d.collective.rstrip("_0123456789") for d in report.left if d.critical}
    assert critical == {"all_reduce", "all_to_all_single"}, report
    text = report.text()
    assert "5 of 14 collectives fused" in text
    assert "no fused op exists for broadcast" in text
    for advice, collective in (
        ("with sequence parallelism", "all_reduce"),
        ("add it after the all-reduce", "all_reduce"),
    ):
        (names,) = [names for hint, names in report.advice.items() if advice in hint]
        assert collective in [name.rstrip("_0123456789") for name in names], advice
        assert advice in text
    for advice, collective in (
        ("use the reduced tensor there", "all_reduce"),
        ("call it once for each tensor", "all_gather_into_tensor_coalesced"),
        ("outside of the graph", "broadcast"),
        ("symm_cp.moe.dispatch", "all_to_all_single"),
    ):
        named = [d.collective for d in report.left if advice in d.reason]
        assert collective in [name.rstrip("_0123456789") for name in named], advice
    own = group._get_backend(torch.device("cpu")).name()
    assert ("would run in shared memory" in text) == (own != "symm_cp")


@pytest.mark.exhaustive
def test_explain_lists_every_collective(ranks: Ranks) -> None:
    ranks.run(2, lists_all, timeout=300)


def left_to_torch(group: dist.ProcessGroup) -> None:
    """torch's own passes combine small all-reduces; all-reduces of products are fused."""
    inputs = torch.randn(4, 6), torch.randn(6, 5)

    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return reduce(x @ w, group), reduce(x, group)

    for name, value in (("_fuse_ddp_communication", True), ("bucket_all_reduces_fx", "all")):
        if not hasattr(inductor_config, name):
            continue
        with inductor_config.patch({name: value}):
            compiled = through_passes(fn, inputs, Options())
        assert [d.fused_into for d in compiled.report.decisions] == [AR, None]
        assert "left to torch's passes" in str(compiled.report)
    options = [Options(), Options(all_reduce=False), Options(async_tp=False)]
    assert len({repr(inductor.passes.Pass("x", lambda *_: None, o, None).uuid())
                for o in options}) == 3  # fmt: skip
    compiled = through_passes(fn, inputs, options[2])
    assert [d.runs_as for d in compiled.report.decisions] == ["_all_reduce"] * 2


def test_options_and_passes_of_torch(ranks: Ranks) -> None:
    ranks.run(2, left_to_torch)
