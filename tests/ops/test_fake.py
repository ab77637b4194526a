"""Fake kernels: shapes, strides and dtypes of the real results; and torch's own op checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import symm_cp  # noqa: F401 - registers the kernels
from tests.exhaustive import some

OPS = torch.ops.symm_mem
FLOAT8 = torch.float8_e4m3fn


def layout(results: Any) -> list[tuple[Any, ...] | None]:
    """Shape, dtype and those strides that matter: of dimensions longer than 1."""
    layouts: list[tuple[Any, ...] | None] = []
    for x in tree_leaves(results):
        if x is None:
            layouts.append(None)
            continue
        strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel()]
        layouts.append((tuple(x.shape), strides, x.dtype))
    return layouts


def compare(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    real = op(*args, **kwargs)
    with FakeTensorMode() as mode:
        faked = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        fake = op(*faked[0], **faked[1])
    assert layout(real) == layout(fake), (op, layout(real), layout(fake))


@pytest.mark.parametrize("world_size", some(1, 3, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_all_dims(group: dist.ProcessGroup, world_size: int) -> None:
    W, name = group.size(), group.group_name
    for shape in ([4 * W, 16], [2 * W, 3 * W, 16], [W, 2 * W, 3 * W, 16]):
        for dim in range(-len(shape), len(shape)):
            K = 16 * (W if dim % len(shape) == len(shape) - 1 else 1)
            A, Bs = torch.randn(shape), [torch.randn(K, 16), torch.randn(K, 32)]
            for return_A in (True, False):
                compare(OPS.fused_all_gather_matmul, A, Bs, dim, name, return_A=return_A)
            B8 = torch.randn(16, K).to(FLOAT8).t()
            one = torch.tensor(1.0)
            for dtype in (torch.float32, torch.bfloat16, None):
                compare(
                    OPS.fused_all_gather_scaled_matmul, A.to(FLOAT8), [B8], one, [one], dim, name,
                    [None], [None], [dtype], [False],
                )  # fmt: skip
            B = torch.randn(16, 16 * W)
            compare(OPS.fused_matmul_reduce_scatter, A, B, "sum", dim, name)
            B8 = torch.randn(16 * W, 16).to(FLOAT8).t()
            compare(
                OPS.fused_scaled_matmul_reduce_scatter, A.to(FLOAT8), B8, one, one, "avg",
                dim, dim, name, [*shape[:-1], 16 * W], None, None, torch.bfloat16,
            )  # fmt: skip
