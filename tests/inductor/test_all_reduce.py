"""All-reduces of compiled graphs: Inductor's code, reports, groups over hosts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import symm_cp
from symm_cp import inductor
from symm_cp.inductor.options import Options
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.hosts.apart import spread_out
from tests.inductor.all_reduce_graphs import InputOfColumns, InRows, reduce
from tests.inductor.graphs import AR, SUM, compare, compare_code, draw, draw_seed, through_passes
from tests.inductor.test_compile import compiling

C10D = "_c10d_functional"


def layers(group: Any, x: Any, w: Any, u: Any, v: Any, b: Any) -> Any:
    full = InputOfColumns.apply(x, group)
    mixed = InRows.apply(F.linear(F.silu(full @ w) * (full @ u), v.mT, b), group)
    dist.all_reduce(own := (mixed.detach() @ w[:, :12]), group=group)
    other = x.detach().sin() @ u[:, :12]  # not a product of the block, however wide that is
    first, second = funcol.all_reduce_coalesced([other, b.detach()], "sum", group)
    return mixed, own, first, second, reduce(x.detach().sum(), group)


def generates_code(group: dist.ProcessGroup, dtype: torch.dtype, seed: int) -> None:
    hidden = 12 + group.rank()  # differs from rank to rank
    shapes = ((2, 5, 16), (16, hidden), (16, hidden), (hidden, 16), (16,))
    # Sums of up to 16 products and their gradients, rounded at different points.
    within = 64 * torch.finfo(dtype).eps
    inputs, fn = draw(group, seed, *shapes, dtype=dtype), partial(layers, group)
    # Only compiled all-reduces of torch.distributed have gradients.
    code = compare_code(fn, inputs, within=within, reference=torch.compile(fn))
    assert C10D not in code
    for op in (AR, SUM, "_all_reduce"):
        assert f"symm_mem.{op}" in code, op


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (3, torch.float64)],
)
def test_inductor(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    ranks.run(world_size, generates_code, dtype, draw_seed(), timeout=300)


@pytest.mark.ranks(2)
def test_groups_over_hosts(group: dist.ProcessGroup) -> None:
    """A graph that was compiled, or cached, for one host runs where the ranks are on two."""
    seed = draw_seed()
    with spread_out(group, "01") as wide:
        inputs = draw(group, seed, (4, 6), (6, 5), requires_grad=False)
        compiled = compare(lambda x, w: (reduce(x @ w, wide), reduce(x, wide)), inputs)
        assert not [op for op in compiled.ops if C10D in op]


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


@pytest.mark.ranks(2)
def test_options_and_passes_of_torch(group: dist.ProcessGroup) -> None:
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
