"""Fake kernels: shapes, strides and dtypes of the real results; and torch's own op checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import symm_cp  # noqa: F401 - registers the kernels
from symm_cp.testing import Ranks
from tests.exhaustive import some

OPS = torch.ops.symm_mem
FLOAT8 = torch.float8_e4m3fn
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


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


def all_dims(group: dist.ProcessGroup) -> None:
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


@pytest.mark.parametrize("world_size", some(1, 3, of=[1, 2, 3, 4]))
def test_all_dims(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, all_dims)


def passes_opcheck(group: dist.ProcessGroup) -> None:
    W, name = group.size(), group.group_name
    A, B = torch.randn(4 * W, 8), torch.randn(8, 6)
    A8, B8 = torch.randn(4 * W, 16).to(FLOAT8), torch.randn(16, 16).to(FLOAT8).t()
    one = torch.tensor(1.0)
    shared = symm_mem.empty(4 * W, 8, device="cpu").copy_(A)
    symm_mem.rendezvous(shared, group)
    for grad in (False, True):
        a, b = A.clone().requires_grad_(grad), B.clone().requires_grad_(grad)
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (OPS.fused_all_gather_matmul, (a, [b, b], 0, name), {"return_A": True}),
            (OPS.fused_all_gather_matmul, (a, [b], 0, name), {"return_A": False}),
            (OPS.fused_matmul_reduce_scatter, (a, b, "sum", 0, name), {}),
            (OPS.fused_matmul_all_reduce, (a, b, None, "sum", name), {}),
            (OPS.fused_matmul_all_reduce, (a, b, b[0].clone(), "sum", name), {}),
            (OPS._fused_matmuls_all_reduce, ([a, a], [b, b], None, b[0].clone(), "sum", name), {}),
            (OPS.one_shot_all_reduce, (a, "sum", name), {}),
            (OPS.one_shot_all_reduce_copy, (A.clone(), a, "sum", name), {}),
        ]
        for op, args, kwargs in calls:
            torch.library.opcheck(op.default, args, kwargs, test_utils=CHECKS)
    plain: list[tuple[Any, tuple[Any, ...]]] = [
        (
            OPS.fused_all_gather_scaled_matmul,
            (A8, [B8], one, [one], 0, name, [None], [None], [torch.float32], [False]),
        ),
        (
            OPS.fused_scaled_matmul_reduce_scatter,
            (A8, B8, one, one, "sum", 0, 0, name, [4 * W, 16], None, None, torch.float32),
        ),
        (OPS.fused_scaled_matmul_all_reduce, (A8, B8, one, one, "sum", name)),
        (OPS._fused_matmuls_all_reduce, ([], [], A, B[:, 0].clone(), "avg", name)),
        (OPS._fused_matmuls_reduce_scatter, ([A], [B], None, "sum", 0, name)),
        (OPS._fused_all_gather_weight_grad, (A, [torch.randn(4 * W * W, 3)], 0, name)),
        (
            OPS._fused_all_gather_weight_grad,
            (A, [torch.randn(4 * W * W, 3)], 0, name, None, None, True),
        ),
        (
            OPS._fused_matmul_reduce_scatter_backward,
            (torch.randn(4, 6), A, B, "sum", 0, name, True, True),
        ),
        (
            OPS._fused_matmul_reduce_scatter_backward,
            (torch.randn(4, 6), A, B.mT.contiguous().mT, "sum", 0, name, True, True),
        ),
        (OPS.two_shot_all_reduce_, (A.clone(), "sum", name)),
        (OPS.one_shot_all_reduce_out, (A, "sum", name, torch.empty_like(A))),
        (OPS.one_shot_all_reduce_copy_out, (A, A, "sum", name, torch.empty_like(A))),
        (OPS.two_shot_all_reduce_out, (A, "sum", name, torch.empty_like(A))),
        (OPS.reduce_scatter_out, (A, name, False, torch.empty(4, 8))),
    ]
    for op, args in plain:
        # The schema check multiplies its inputs, which torch cannot do in float8.
        checks = CHECKS[1:] if args[0] is A8 else CHECKS
        torch.library.opcheck(op.default, args, test_utils=checks)


@pytest.mark.parametrize("world_size", [1, 2])
def test_opcheck(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, passes_opcheck)


def compiles(group: dist.ProcessGroup) -> None:
    """Forward and backward through AOT autograd, without graph breaks."""
    W, name = group.size(), group.group_name

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        _, (hidden,) = OPS.fused_all_gather_matmul(x, [up], 0, name, return_A=False)
        out = OPS.fused_matmul_reduce_scatter(hidden.relu(), down, "sum", 0, name)
        gathered = OPS._low_contention_all_gather(out, name)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    given = [torch.randn(4, 8), torch.randn(8, 6), torch.randn(6, 8)]
    grads = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in given]
        run(*leaves).square().sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(x is not None for x in itertools.chain(*grads))
    torch.testing.assert_close(*grads)
    assert W >= 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiles(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, compiles)
