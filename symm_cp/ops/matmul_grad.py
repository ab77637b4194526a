"""Gradient ops of the fused matmuls: pipelines that gather shards again while they multiply."""

from __future__ import annotations

import torch

from symm_cp import runtime
from symm_cp.alignment import aligned
from symm_cp.ops.common import (
    Op,
    Sum,
    at_last,
    front_shape,
    group_of,
    lib,
    nbytes_of,
    new_result,
    register_kernel,
    rows_of,
    what_is,
    world_size_of,
)
from symm_cp.tuning import Question, choose

lib.define(
    "_fused_all_gather_weight_grad(Tensor A_shard, Tensor[] grads, int gather_dim, str group_name)"
    " -> Tensor[]"
)
lib.define(
    "_fused_matmul_reduce_scatter_backward(Tensor grad, Tensor A, Tensor B, str reduce_op, "
    "int scatter_dim, str group_name, bool need_a, bool need_b) -> (Tensor, Tensor)"
)


def _weight_grad_kernel(
    A_shard: torch.Tensor, grads: list[torch.Tensor], gather_dim: int, group_name: str
) -> list[torch.Tensor]:
    """For each grad g: gathered(A_shard)^T @ g."""
    group = group_of(group_name)
    W, k = group.world_size, A_shard.shape[-1]
    columns = gather_dim == A_shard.dim() - 1
    outs = [new_result(A_shard, (k * (W if columns else 1), g.shape[-1])) for g in grads]
    shard = A_shard.flatten(0, -2) if columns else A_shard.movedim(gather_dim, 0)
    question = Question(
        "weight_grad",
        A_shard.dtype,
        tuple((k, shard.shape[:-1].numel(), g.shape[-1]) for g in grads),
        shard=nbytes_of(A_shard),
        accumulated=sum(nbytes_of(out) for out in outs),
    )
    whole = not columns and choose(group, A_shard.device, question) == "whole"
    sums = [] if columns or whole else [Sum(out, W) for out in outs]
    A_full = new_result(A_shard, front_shape(A_shard, gather_dim, W)) if whole else None

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        left = aligned(shards[0]).flatten(0, -2).mH
        for index, g in enumerate(grads):
            if columns:
                torch.mm(left, g.flatten(0, -2), out=outs[index].narrow(0, rank * k, k))
            else:
                sums[index].add_product(left, rows_of(g, gather_dim, rank, W))

    def multiply() -> None:
        assert A_full is not None
        for out, g in zip(outs, grads, strict=True):
            torch.mm(A_full.flatten(0, -2).mH, rows_of(g, gather_dim, 0, 1), out=out)

    detail = f"gather_dim={gather_dim}" + " whole" * whole
    what = what_is("_fused_all_gather_weight_grad", A_shard, detail=detail)
    runtime.of(shard, group).all_gather_and_consume(
        group, [shard], at_last(multiply, group) if whole else consume, what, gathered=A_full
    )
    for total in sums:
        total.finish()
    return outs


def _weight_grad_fake(
    A_shard: torch.Tensor, grads: list[torch.Tensor], gather_dim: int, group_name: str
) -> list[torch.Tensor]:
    columns = gather_dim == A_shard.dim() - 1
    k = A_shard.shape[-1] * (world_size_of(group_name) if columns else 1)
    return [A_shard.new_empty(k, g.shape[-1]) for g in grads]


def _matmul_reduce_scatter_backward_kernel(
    grad: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    need_a: bool,
    need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gathered(grad) @ B^T and A^T @ gathered(grad), in one pass over the shards of grad."""
    group = group_of(group_name)
    W = group.world_size
    columns = scatter_dim == A.dim() - 1
    A_rows = A.flatten(0, -2) if columns else None
    A_grad = new_result(A, (A.shape[:-1].numel() if need_a else 0, A.shape[-1]))
    B_grad = new_result(B, B.shape if need_b else (0, 0))
    rows = A.shape[:-1].numel() // W
    n = B.shape[1] // W
    shard = grad if columns else grad.movedim(scatter_dim, 0)
    question = Question(
        "matmul_reduce_scatter_backward",
        grad.dtype,
        ((rows, B.shape[1], B.shape[0]),) * need_a + ((B.shape[0], rows, B.shape[1]),) * need_b,
        shard=nbytes_of(grad),
        accumulated=nbytes_of(B_grad),
    )
    whole = not columns and choose(group, grad.device, question) == "whole"
    full = new_result(grad, front_shape(grad, scatter_dim, W)) if whole else None
    A_sum = Sum(A_grad, W) if columns and need_a else None
    B_sum = Sum(B_grad, W) if not columns and not whole and need_b else None

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        g = aligned(shards[0]).flatten(0, -2)
        if A_rows is not None:  # the columns of C were scattered
            if A_sum is not None:
                A_sum.add_product(g, B.narrow(1, rank * n, n).mH)
            if need_b:
                B_grad.narrow(1, rank * n, n).copy_(torch.mm(A_rows.mH, g))
            return
        if need_a:
            torch.mm(g, B.mH, out=A_grad.narrow(0, rank * rows, rows))
        if B_sum is not None:
            B_sum.add_product(rows_of(A, scatter_dim, rank, W).mH, g)

    def multiply() -> None:
        assert full is not None
        if need_a:
            torch.mm(full.flatten(0, -2), B.mH, out=A_grad)
        if need_b:
            torch.mm(rows_of(A, scatter_dim, 0, 1).mH, full.flatten(0, -2), out=B_grad)

    detail = f"dim={scatter_dim}" + " whole" * whole
    what = what_is("_fused_matmul_reduce_scatter_backward", grad, detail=detail)
    runtime.of(shard, group).all_gather_and_consume(
        group, [shard], at_last(multiply, group) if whole else consume, what, gathered=full
    )
    for total in (A_sum, B_sum):
        if total is not None:
            total.finish()
    if reduce_op == "avg":
        A_grad.div_(W)
        B_grad.div_(W)
    if need_a and not columns:
        A_grad = A_grad.view(front_shape(A, scatter_dim)).movedim(0, scatter_dim)
    return A_grad.reshape(A.shape if need_a else (0, 0)).contiguous(), B_grad


def _matmul_reduce_scatter_backward_fake(
    grad: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    need_a: bool,
    need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return A.new_empty(A.shape if need_a else (0, 0)), B.new_empty(B.shape if need_b else (0, 0))


_KERNELS: dict[str, tuple[Op, Op]] = {
    "_fused_all_gather_weight_grad": (_weight_grad_kernel, _weight_grad_fake),
    "_fused_matmul_reduce_scatter_backward": (
        _matmul_reduce_scatter_backward_kernel,
        _matmul_reduce_scatter_backward_fake,
    ),
}


def register() -> None:
    """Adds the kernels and the fake kernels."""
    for name, (kernel, fake) in _KERNELS.items():
        register_kernel(name, kernel)
        lib.impl(name, fake, "Meta")
