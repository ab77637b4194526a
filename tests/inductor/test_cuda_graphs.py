"""The passes on graphs of fake CUDA tensors, which need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from symm_cp.inductor.decisions import recording
from symm_cp.inductor.hide_collectives import sink_collectives
from symm_cp.inductor.options import Options
from symm_cp.inductor.passes import fuse_post_grad
from symm_cp.testing import Ranks
from tests.inductor.graphs import AG, AG8, RS, RS8
from tests.inductor.scaled_graphs import FLOAT8

_M, _K, _N, _W = 64, 128, 256, 2


def _scaled(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    rows, columns = torch.ones(a.shape[0], 1).float(), torch.ones(1, b.shape[0]).float()
    options = {"out_dtype": torch.bfloat16, **options}
    return torch._scaled_mm(a.to(FLOAT8), b.to(FLOAT8).t(), rows, columns, **options)


def gathered_columns(group: Any) -> Any:
    """torch's kernel would round the product of each rank's columns to bfloat16."""
    return funcol.all_gather_tensor(torch.empty(_M, _K // _W), 1, group) @ torch.empty(_K, _N)


def gathered_rows(group: Any) -> Any:
    return funcol.all_gather_tensor(torch.empty(_M, _K), 0, group) @ torch.empty(_K, _N)


def gathered_columns_scaled(group: Any) -> Any:
    """torch's kernel would pass the scales to `mm.out`, which has no such arguments."""
    return _scaled(
        funcol.all_gather_tensor(torch.empty(_M, _K // _W), 1, group), torch.empty(_N, _K)
    )


def gathered_in_eight_bits(group: Any) -> Any:
    """torch's kernel knows no number of a float8 dtype."""
    a = funcol.all_gather_tensor(torch.empty(6, _K), 0, group).to(FLOAT8)
    one, b = torch.ones(()).float(), torch.empty(_N, _K).to(FLOAT8).t()
    return torch._scaled_mm(a, b, one, one, out_dtype=FLOAT8)


def scattered_rows(group: Any) -> Any:
    product = torch.empty(_M, _K) @ torch.empty(_K, _N)
    return funcol.reduce_scatter_tensor(product, "sum", 0, group)


def scattered_columns_scaled(group: Any) -> Any:
    """torch's kernel would scatter rows of A, and give another shape."""
    product = _scaled(torch.empty(_M, _K), torch.empty(_N, _K), use_fast_accum=True)
    return funcol.reduce_scatter_tensor(product, "sum", 1, group)


def scattered_in_odd_columns(group: Any) -> Any:
    """GPUs can multiply 48 columns, but not the 24 columns of each rank."""
    product = _scaled(torch.empty(_M, _K), torch.empty(48, _K))
    return funcol.reduce_scatter_tensor(product, "sum", 1, group)


def gathered_with_scales_of_blocks(group: Any) -> Any:
    """With 128 features, each row is one block, so the scales of blocks look like those of rows."""
    a = funcol.all_gather_tensor(torch.empty(_M, 128), 0, group).to(FLOAT8)
    rows, blocks = torch.ones(a.shape[0], 1).float(), torch.ones(1, _N // 128).float()
    b = torch.empty(_N, 128).to(FLOAT8).t()
    return torch._scaled_mm(a, b, rows, blocks, out_dtype=torch.bfloat16)


_CASES: tuple[tuple[Callable[[Any], Any], str, str], ...] = (
    (gathered_columns, AG, "_all_gather_matmul_split"),
    (gathered_rows, AG, "_all_gather_matmul_split"),
    (gathered_columns_scaled, AG8, "_all_gather_scaled_matmul_split"),
    (gathered_in_eight_bits, AG8, "_all_gather_scaled_matmul_split"),
    (scattered_rows, RS, "_matmul_reduce_scatter_split"),
    (scattered_columns_scaled, RS8, "_scaled_matmul_reduce_scatter_split"),
)


def on_cuda(function: Callable[[], Any]) -> torch.fx.GraphModule:
    """Returns the graph of a function that makes bfloat16 tensors on a GPU."""
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            return make_fx(function)()
        finally:
            torch.set_default_dtype(torch.float32)


def runs_our_kernels(group: dist.ProcessGroup) -> None:
    for function, into, op in _CASES:
        traced = on_cuda(lambda: function(group))  # noqa: B023
        shape = next(iter(traced.graph.find_nodes(op="output"))).args[0].meta["val"].shape
        with recording() as report:
            fuse_post_grad(traced.graph, Options(min_flops=0.0))
        assert [d.fused_into for d in report.decisions] == [into], (function, report)
        calls = {str(n.target): n for n in traced.graph.nodes if n.op == "call_function"}
        # Torch's op of that name would run torch's kernel.
        assert f"symm_mem.{op}.default" in calls, (function, list(calls))
        output = next(iter(traced.graph.find_nodes(op="output"))).args[0]
        assert output.meta["val"].shape == shape
        if function is scattered_columns_scaled:
            assert calls[f"symm_mem.{op}.default"].args[-1] is True  # use_fast_accum


def leaves_alone(group: dist.ProcessGroup) -> None:
    for function, reason in (
        (scattered_in_odd_columns, "the columns for each rank are not divisible by 16"),
        (gathered_with_scales_of_blocks, "its scales are neither tensor-wise nor row-wise"),
    ):
        traced = on_cuda(lambda: function(group))  # noqa: B023
        with recording() as report:
            fuse_post_grad(traced.graph, Options(min_flops=0.0))
        (decision,) = report.left
        assert reason in decision.reason


def test_graphs_on_cuda_run_our_kernels(ranks: Ranks) -> None:
    ranks.run(_W, runs_our_kernels)


def test_what_gpus_cannot_fuse_is_left_alone(ranks: Ranks) -> None:
    ranks.run(_W, leaves_alone)


def hides(group: dist.ProcessGroup) -> None:
    """A collective is hidden behind independent work, if there is enough."""

    def program(size: int) -> Any:
        x, a = torch.empty(1024, 1024), torch.empty(size, size)
        return funcol.all_gather_tensor(x, 0, group), a @ a

    for size, enough in ((8192, True), (512, False)):
        graph = on_cuda(lambda: program(size)).graph  # noqa: B023
        with recording() as report:
            sink_collectives(graph, Options(low_contention=True, min_bytes=1024))
        (decision,) = report.decisions
        order = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        # torch's op would run torch's kernel, which moves the bytes with multiprocessors.
        assert ("symm_mem._low_contention_all_gather_split.default" in order) == enough
        assert ("too little independent work" in decision.reason) != enough
        waited = next(place for place, op in enumerate(order) if "wait_tensor" in op)
        assert (order.index("aten.mm.default") < waited) == enough


def test_low_contention(ranks: Ranks) -> None:
    ranks.run(_W, hides)
