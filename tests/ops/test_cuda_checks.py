"""Arguments that matmuls refuse on CUDA before they communicate, tested without a GPU."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from symm_cp import tuning
from symm_cp.ops import common
from symm_cp.ops.common import WITH_SIZES
from symm_cp.ops.matmul import operands

OPS = torch.ops.symm_mem
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def float8(*shape: int, dtype: torch.dtype = E4) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def by_columns(*shape: int, dtype: torch.dtype = E4) -> torch.Tensor:
    return float8(*reversed(shape), dtype=dtype).t()


def gather_scaled(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    a_scale = torch.ones(()) if a_scale is None else a_scale
    return OPS._all_gather_scaled_matmul_split(
        a, [b], a_scale, [torch.ones(())], 0, name, [bias], [None], [out_dtype], [False]
    )


def scatter_scaled(name: str, a: torch.Tensor, b: torch.Tensor, dim: int) -> Any:
    shape, one = [a.shape[0], b.shape[1]], torch.ones(())
    return OPS._scaled_matmul_reduce_scatter_split(
        a, b, one, one, "sum", dim, dim, name, shape, None, None, torch.bfloat16, False
    )


_REFUSED: dict[str, tuple[type[Exception], str, Callable[[str], Any]]] = {
    "integers": (
        TypeError,
        "fused_all_gather_matmul: A is torch.int32, which has no matmuls on cuda",
        lambda name: OPS._all_gather_matmul_split(
            torch.ones(4, 4).int(), [torch.ones(4, 4).int()], 0, name
        ),
    ),
    "integers that are scattered": (
        TypeError,
        "fused_matmul_reduce_scatter: A is torch.int64, which has no matmuls on cuda",
        lambda name: OPS.fused_matmul_reduce_scatter(
            torch.ones(4, 4).long(), torch.ones(4, 4).long(), "sum", 0, name
        ),
    ),
    "rows by 16": (
        ValueError,
        r"B\[0\] of shape \[24, 16\].*on cuda:0 rows and columns must be divisible by 16",
        lambda name: gather_scaled(name, float8(4, 24), by_columns(24, 16)),
    ),
    "columns of each rank by 16": (
        ValueError,
        r"B of shape \[16, 48\], multiplied \[24, 24\] columns at a time",
        lambda name: scatter_scaled(name, float8(4, 16), by_columns(16, 48), 1),
    ),
    "row-major": (
        ValueError,
        r"B\[0\] has strides \[32, 1\]: must be column-major on cuda:0",
        lambda name: gather_scaled(name, float8(4, 16), float8(16, 32)),
    ),
    "two of five bits": (
        TypeError,
        r"A and B\[0\] are both float8_e5m2",
        lambda name: gather_scaled(name, float8(4, 16, dtype=E5), by_columns(16, 16, dtype=E5)),
    ),
    "scales": (
        TypeError,
        "A_scale is torch.float64: must be float32",
        lambda name: gather_scaled(
            name, float8(4, 16), by_columns(16, 16), torch.ones((), dtype=torch.float64)
        ),
    ),
    "rows of float8": (
        TypeError,
        "A_scale has 4 scales and the product is torch.float8_e4m3fn",
        lambda name: gather_scaled(
            name, float8(4, 16), by_columns(16, 16), torch.ones(4, 1), out_dtype=E4
        ),
    ),
    "bias": (
        TypeError,
        r"biases\[0\] is torch.float32 for products in torch.bfloat16",
        lambda name: gather_scaled(name, float8(4, 16), by_columns(16, 16), bias=torch.ones(16)),
    ),
}


@pytest.mark.ranks(2)
def test_what_gpus_do_not_multiply_is_refused_first(group: dist.ProcessGroup) -> None:
    name = group.group_name
    for error, match, call in _REFUSED.values():
        with FakeTensorMode(), torch.device("cuda"), pytest.raises(error, match=match):
            call(name)
    # The kernels in Python make the same checks; here they treat their tensors as GPU tensors.
    gpu = torch.device("cuda", 0)
    with (
        tuning.forced("shards"),
        unittest.mock.patch.object(operands, "device_behind", return_value=gpu),
    ):
        for error, match, call in _REFUSED.values():
            with pytest.raises(error, match=match):
                call(name)
    for case in ("integers", "rows by 16", "columns of each rank by 16", "row-major"):
        _REFUSED[case][2](name)  # CPUs multiply them


@pytest.mark.ranks(2)
def test_scaled_matmuls_refuse_what_has_no_kernel(group: dist.ProcessGroup) -> None:
    """Arguments that `_scaled_mm` accepts on no device."""
    name, a, b = group.group_name, float8(4, 16), by_columns(16, 16)
    for error, match, call in (
        (TypeError, "A is torch.bfloat16: must be float8",
         lambda: gather_scaled(name, a.bfloat16(), b)),
        (TypeError, r"B\[0\] is torch.int8: must be float8",
         lambda: gather_scaled(name, a, b.to(torch.int8))),
        (TypeError, "out_dtype=torch.float64 must be float32, bfloat16, float16 or float8",
         lambda: gather_scaled(name, a, b, out_dtype=torch.float64)),
        (ValueError, r"biases\[0\] of shape \[8\] must have 16 elements",
         lambda: gather_scaled(name, a, b, bias=torch.ones(8))),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()


@pytest.mark.ranks(2)
def test_ops_with_sizes_may_be_called_without(group: dist.ProcessGroup) -> None:
    """On CUDA, functions and passes call these ops, as torch's ops run torch's kernels there."""
    name, wait = group.group_name, torch.ops._c10d_functional.wait_tensor
    torch.manual_seed(0)
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    one, a, b = torch.tensor(0.5), float8(4, 16), by_columns(16, 32)
    scaled = ([one], 0, name, [None], [None], [torch.float32], [False])
    options = (name, [4, 32], None, None, torch.float32, False)
    calls: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
        "fused_all_gather_matmul": lambda op, t: op(t, [w], 0, name)[1][0],
        "fused_matmul_reduce_scatter": lambda op, t: op(t, w, "avg", 0, name),
        "fused_all_gather_scaled_matmul": lambda op, t: op(a, [b], one, *scaled)[1][0],
        "fused_scaled_matmul_reduce_scatter": lambda op, t: op(
            a, b, one, one, "sum", 1, 1, *options
        ),
        "_low_contention_all_gather": lambda op, t: wait(op(t, name)),
        "_low_contention_reduce_scatter": lambda op, t: wait(op(t, "avg", name)),
    }
    assert set(calls) == set(WITH_SIZES)
    for torchs, call in calls.items():
        found = []
        for op in (torchs, WITH_SIZES[torchs]):
            leaf = x.clone().requires_grad_()
            result = call(getattr(OPS, op), leaf)
            found.append(result)
            if "scaled" not in op:
                found += torch.autograd.grad(result.sum(), leaf)
        for got, want in zip(found[len(found) // 2 :], found[: len(found) // 2], strict=True):
            assert torch.equal(got, want), torchs


def test_functions_run_our_kernels_where_torch_has_its_own() -> None:
    for device, name in (("cpu", "fused_all_gather_matmul"), ("cuda", "_all_gather_matmul_split")):
        op = common.op_for("fused_all_gather_matmul", torch.device(device))
        assert op is getattr(OPS, name).default
