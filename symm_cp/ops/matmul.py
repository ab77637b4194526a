"""Fused all-gather-matmul and matmul-reduce-scatter, with gradients.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N); a trailing
`_shard` names a tensor of which each rank holds its part. W is the world size.

Gradients communicate through the same pipelines: that of an all-gather-matmul is a
matmul-reduce-scatter and a weight gradient that gathers the shards again (rather than keep the
gathered input alive); that of a matmul-reduce-scatter gathers the gradient once for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symm_cp.memory import GroupLike, group_name
from symm_cp.ops.common import (
    Sum,
    check_dim,
    check_divisible,
    check_matrices,
    check_reduce_op,
    group_of,
    in_test_mode,
    lib,
    unfused_all_gather,
    unfused_reduce_scatter,
    what_is,
    world_size_of,
)
from symm_cp.runtime import cpu

lib.define(
    "_fused_matmuls_reduce_scatter(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, "
    "int scatter_dim, str group_name) -> Tensor"
)
lib.define(
    "_fused_all_gather_weight_grad(Tensor A_shard, Tensor[] grads, int gather_dim, str group_name)"
    " -> Tensor[]"
)
lib.define(
    "_fused_matmul_reduce_scatter_backward(Tensor grad, Tensor A, Tensor B, str reduce_op, "
    "int scatter_dim, str group_name, bool need_a, bool need_b) -> (Tensor, Tensor)"
)


def rows_of(x: torch.Tensor, dim: int, index: int, parts: int) -> torch.Tensor:
    """Returns part `index` of `parts` along `dim` as a matrix with x's last dimension."""
    size = x.shape[dim] // parts
    return x.narrow(dim, index * size, size).movedim(dim, 0).flatten(0, -2)


def _front_shape(x: torch.Tensor, dim: int, times: int = 1) -> list[int]:
    shape = list(x.movedim(dim, 0).shape)
    shape[0] *= times
    return shape


# --- fused_all_gather_matmul -----------------------------------------------------------------


def _check_all_gather_matmul(
    A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, world_size: int
) -> int:
    op = "fused_all_gather_matmul"
    if A.dim() < 2:
        raise ValueError(f"{op}: A must have at least 2 dimensions, has shape {list(A.shape)}")
    dim = check_dim(op, "gather_dim", gather_dim, A.dim())
    inner = A.shape[-1] * (world_size if dim == A.dim() - 1 else 1)
    check_matrices(op, A, Bs, inner)
    return dim


def _all_gather_matmul_cpu(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    group = group_of(group_name)
    dim = _check_all_gather_matmul(A, Bs, gather_dim, group.world_size)
    if in_test_mode():
        gathered = unfused_all_gather(A, dim, group_name)
        return (gathered if return_A else None), [torch.matmul(gathered, B) for B in Bs]
    what = what_is("fused_all_gather_matmul", A, detail=f"gather_dim={dim}")
    if dim == A.dim() - 1:
        return _all_gather_matmul_columns(A, Bs, group_name, what, return_A)
    shard = A.movedim(dim, 0)
    rows = shard.shape[:-1].numel()
    outs = [A.new_empty(rows * group.world_size, B.shape[1]) for B in Bs]
    A_full = A.new_empty(_front_shape(A, dim, group.world_size)) if return_A else None

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        A_rows = shards[0].view(rows, A.shape[-1])
        for out, B in zip(outs, Bs, strict=True):
            torch.mm(A_rows, B, out=out.narrow(0, rank * rows, rows))

    cpu.all_gather_and_consume(group, [shard], consume, what, gathered=A_full)
    lead = _front_shape(A, dim, group.world_size)[:-1]
    results = [out.view(*lead, out.shape[1]).movedim(0, dim) for out in outs]
    return (A_full.movedim(0, dim) if A_full is not None else None), results


def _all_gather_matmul_columns(
    A: torch.Tensor, Bs: list[torch.Tensor], group_name: str, what: bytes, return_A: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers the last dimension, which the matmul sums over: a sum of one product a shard."""
    group = group_of(group_name)
    k = A.shape[-1]
    A_rows = A.flatten(0, -2)
    outs = [A.new_empty(A_rows.shape[0], B.shape[1]) for B in Bs]
    sums = [Sum(out) for out in outs]
    A_full = A.new_empty(A_rows.shape[0], k * group.world_size) if return_A else None

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        for total, B in zip(sums, Bs, strict=True):
            total.add_product(shards[0], B.narrow(0, rank * k, k))

    cpu.all_gather_and_consume(group, [A_rows], consume, what, gathered=A_full, columns=True)
    for total in sums:
        total.finish()
    lead = A.shape[:-1]
    results = [out.view(*lead, out.shape[1]) for out in outs]
    return (A_full.view(*lead, -1) if A_full is not None else None), results


def _all_gather_matmul_fake(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    world_size = world_size_of(group_name)
    dim = _check_all_gather_matmul(A, Bs, gather_dim, world_size)
    shape = _front_shape(A, dim, world_size)
    if dim == A.dim() - 1:
        shape = [*A.shape[:-1], A.shape[-1] * world_size]
        dim = 0
    A_full = A.new_empty(shape).movedim(0, dim) if return_A else None
    return A_full, [A.new_empty([*shape[:-1], B.shape[1]]).movedim(0, dim) for B in Bs]


def _all_gather_matmul_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    A, Bs, gather_dim, ctx.group_name = inputs
    ctx.dim = gather_dim % A.dim()
    ctx.save_for_backward(A, *Bs)


def _all_gather_matmul_backward(
    ctx: Any, grad_A: torch.Tensor | None, grads: list[torch.Tensor | None]
) -> tuple[Any, ...]:
    A, *Bs = ctx.saved_tensors
    pairs = [(g, B) for g, B in zip(grads, Bs, strict=True) if g is not None]
    used = [g for g, _ in pairs]
    A_grad, B_grads = None, [None] * len(Bs)
    if ctx.needs_input_grad[0]:
        weights = [B.t() for _, B in pairs]
        A_grad = torch.ops.symm_mem._fused_matmuls_reduce_scatter(
            used, weights, grad_A, "sum", ctx.dim, ctx.group_name
        )
    if used and any(ctx.needs_input_grad[1]):
        found = torch.ops.symm_mem._fused_all_gather_weight_grad(
            A, used, ctx.dim, ctx.group_name
        )
        found = iter(found)
        B_grads = [next(found) if g is not None else None for g in grads]
    return A_grad, B_grads, None, None


# --- fused_matmul_reduce_scatter -------------------------------------------------------------


def _check_matmul_reduce_scatter(
    op: str,
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    reduce_op: str,
    scatter_dim: int,
    world_size: int,
) -> tuple[int, bool]:
    A, B = As[0], Bs[0]
    for left, right in zip(As, Bs, strict=True):
        check_matrices(op, left, [right], left.shape[-1] if left.dim() else 0)
    dim = check_dim(op, "scatter_dim", scatter_dim, A.dim())
    mean = check_reduce_op(op, reduce_op, A.dtype)
    size = B.shape[1] if dim == A.dim() - 1 else A.shape[dim]
    check_divisible(op, "scatter_dim", dim, size, world_size)
    return dim, mean


def _scattered_shape(A: torch.Tensor, B: torch.Tensor, dim: int, world_size: int) -> list[int]:
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] //= world_size
    return shape


def _multiply_and_reduce_scatter(
    op: str,
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
) -> torch.Tensor:
    """reduce_scatter(sum of As[i] @ Bs[i], plus addend) along `scatter_dim`."""
    group = group_of(group_name)
    W = group.world_size
    dim, mean = _check_matmul_reduce_scatter(op, As, Bs, reduce_op, scatter_dim, W)
    columns = dim == As[0].dim() - 1
    shape = _scattered_shape(As[0], Bs[0], dim, W)
    front = shape if columns else [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    out = As[0].new_empty(front)

    def produce(rank: int, partial: torch.Tensor) -> None:
        into = partial.flatten(0, -2)
        if len(As) == 1 and addend is None:
            total = None
        else:
            total = Sum(into)
        for A, B in zip(As, Bs, strict=True):
            left = A.flatten(0, -2) if columns else rows_of(A, dim, rank, W)
            right = B.chunk(W, 1)[rank] if columns else B
            if total is None:
                torch.mm(left, right, out=into)
            else:
                total.add_product(left, right)
        if total is not None:
            if addend is not None:
                size = shape[dim]
                part = addend.narrow(dim, rank * size, size)
                total.add((part if columns else part.movedim(dim, 0)).reshape(into.shape))
            total.finish()

    what = what_is(op, As[0], detail=f"N={Bs[0].shape[1]} scatter_dim={dim} {reduce_op}")
    cpu.produce_and_reduce_scatter(group, produce, out, what, mean=mean)
    return out if columns else out.movedim(0, dim).contiguous()


def _matmul_reduce_scatter_cpu(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    op = "fused_matmul_reduce_scatter"
    if in_test_mode():
        W = group_of(group_name).world_size
        dim, _ = _check_matmul_reduce_scatter(op, [A], [B], reduce_op, scatter_dim, W)
        return unfused_reduce_scatter(A @ B, reduce_op, dim, group_name)
    return _multiply_and_reduce_scatter(op, [A], [B], None, reduce_op, scatter_dim, group_name)


def _matmuls_reduce_scatter_cpu(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
) -> torch.Tensor:
    if not As:
        assert addend is not None
        reduced = unfused_reduce_scatter(addend, reduce_op, scatter_dim, group_name)
        return reduced.contiguous()
    op = "_fused_matmuls_reduce_scatter"
    return _multiply_and_reduce_scatter(op, As, Bs, addend, reduce_op, scatter_dim, group_name)


def _matmul_reduce_scatter_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    op = "fused_matmul_reduce_scatter"
    W = world_size_of(group_name)
    dim, _ = _check_matmul_reduce_scatter(op, [A], [B], reduce_op, scatter_dim, W)
    return A.new_empty(_scattered_shape(A, B, dim, W))


def _matmuls_reduce_scatter_fake(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
) -> torch.Tensor:
    if As:
        return _matmul_reduce_scatter_fake(As[0], Bs[0], reduce_op, scatter_dim, group_name)
    assert addend is not None
    shape = list(addend.shape)
    shape[scatter_dim] //= world_size_of(group_name)
    return addend.new_empty(shape)


def _matmul_reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, B, ctx.reduce_op, scatter_dim, ctx.group_name = inputs
    ctx.dim = scatter_dim % A.dim()
    ctx.save_for_backward(A, B)


def _matmul_reduce_scatter_autograd(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    A_grad, B_grad = torch.ops.symm_mem._fused_matmul_reduce_scatter_backward(
        grad, A, B, ctx.reduce_op, ctx.dim, ctx.group_name, need_a, need_b
    )
    return A_grad if need_a else None, B_grad if need_b else None, None, None, None


# --- gradients -------------------------------------------------------------------------------


def _weight_grad_cpu(
    A_shard: torch.Tensor, grads: list[torch.Tensor], gather_dim: int, group_name: str
) -> list[torch.Tensor]:
    """For each grad g: gathered(A_shard)^T @ g."""
    group = group_of(group_name)
    W, k = group.world_size, A_shard.shape[-1]
    columns = gather_dim == A_shard.dim() - 1
    outs = [A_shard.new_empty(k * (W if columns else 1), g.shape[-1]) for g in grads]
    sums = [] if columns else [Sum(out) for out in outs]
    shard = A_shard.flatten(0, -2) if columns else A_shard.movedim(gather_dim, 0)

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        left = shards[0].view(-1, k).t() if shards[0].numel() else shards[0].reshape(0, k).t()
        for index, g in enumerate(grads):
            if columns:
                torch.mm(left, g.flatten(0, -2), out=outs[index].narrow(0, rank * k, k))
            else:
                sums[index].add_product(left, rows_of(g, gather_dim, rank, W))

    what = what_is("_fused_all_gather_weight_grad", A_shard, detail=f"gather_dim={gather_dim}")
    cpu.all_gather_and_consume(group, [shard], consume, what)
    for total in sums:
        total.finish()
    return outs


def _weight_grad_fake(
    A_shard: torch.Tensor, grads: list[torch.Tensor], gather_dim: int, group_name: str
) -> list[torch.Tensor]:
    columns = gather_dim == A_shard.dim() - 1
    k = A_shard.shape[-1] * (world_size_of(group_name) if columns else 1)
    return [A_shard.new_empty(k, g.shape[-1]) for g in grads]


def _matmul_reduce_scatter_backward_cpu(
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
    A_grad = A.new_empty(
        [A.shape[:-1].numel() if need_a else 0, A.shape[-1]],
    )
    B_grad = B.new_empty(B.shape if need_b else (0, 0))
    A_sum = Sum(A_grad) if columns and need_a else None
    B_sum = Sum(B_grad) if not columns and need_b else None
    rows = A.shape[:-1].numel() // W
    n = B.shape[1] // W

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        g = shards[0].flatten(0, -2)
        if A_rows is not None:  # the columns of C were scattered
            if A_sum is not None:
                A_sum.add_product(g, B.narrow(1, rank * n, n).t())
            if need_b:
                B_grad.narrow(1, rank * n, n).copy_(torch.mm(A_rows.t(), g))
            return
        if need_a:
            torch.mm(g, B.t(), out=A_grad.narrow(0, rank * rows, rows))
        if B_sum is not None:
            B_sum.add_product(rows_of(A, scatter_dim, rank, W).t(), g)

    shard = grad if columns else grad.movedim(scatter_dim, 0)
    what = what_is("_fused_matmul_reduce_scatter_backward", grad, detail=f"dim={scatter_dim}")
    cpu.all_gather_and_consume(group, [shard], consume, what)
    for total in (A_sum, B_sum):
        if total is not None:
            total.finish()
    if reduce_op == "avg":
        A_grad.div_(W)
        B_grad.div_(W)
    if need_a and not columns:
        A_grad = A_grad.view(_front_shape(A, scatter_dim)).movedim(0, scatter_dim)
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


# --- registration ----------------------------------------------------------------------------

_KERNELS = {
    "fused_all_gather_matmul": (_all_gather_matmul_cpu, _all_gather_matmul_fake),
    "fused_matmul_reduce_scatter": (_matmul_reduce_scatter_cpu, _matmul_reduce_scatter_fake),
    "_fused_matmuls_reduce_scatter": (_matmuls_reduce_scatter_cpu, _matmuls_reduce_scatter_fake),
    "_fused_all_gather_weight_grad": (_weight_grad_cpu, _weight_grad_fake),
    "_fused_matmul_reduce_scatter_backward": (
        _matmul_reduce_scatter_backward_cpu,
        _matmul_reduce_scatter_backward_fake,
    ),
}


def register() -> None:
    """Adds the CPU kernels, the gradients, and fake kernels (torch's are wrong for some dims)."""
    for name, (kernel, fake) in _KERNELS.items():
        lib.impl(name, kernel, "CPU")
        lib.impl(name, fake, "Meta", allow_override=True)
    torch.library.register_autograd(
        "symm_mem::fused_all_gather_matmul",
        _all_gather_matmul_backward,
        setup_context=_all_gather_matmul_setup,
        lib=lib,
    )
    torch.library.register_autograd(
        "symm_mem::fused_matmul_reduce_scatter",
        _matmul_reduce_scatter_autograd,
        setup_context=_matmul_reduce_scatter_setup,
        lib=lib,
    )


# --- entry points ----------------------------------------------------------------------------


def all_gather_matmul(
    shard: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: GroupLike,
    return_gathered: bool = False,
) -> Any:
    """Multiplies an all-gathered tensor with one or several matrices, without gathering it first.

    Same result as::

        gathered = all_gather_tensor(shard, gather_dim, group)
        outputs = [gathered @ weight for weight in weights]

    Args:
        shard: (..., M, K), this rank's part along `gather_dim`; equal shapes on all ranks.
        weights: a (K, N) matrix or several ((K * W, N) when the last dimension is gathered).
        gather_dim: the dimension to gather, negative counts from the end.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        return_gathered: also return the gathered tensor.

    Returns the output, or a list of outputs for a sequence of weights; with `return_gathered` the
    pair (gathered, outputs). Differentiable in shard and weights. A contiguous shard in symmetric
    memory that was rendezvoused with the group is read in place by the peers. Raises `ValueError`
    or `TypeError` for arguments that do not fit, before any communication; `RuntimeError` when a
    peer fails or disagrees. Source: torch's `symm_mem::fused_all_gather_matmul`.
    """
    single = isinstance(weights, torch.Tensor)
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
        shard, matrices, gather_dim, group_name(group), return_A=return_gathered
    )
    result = outputs[0] if single else outputs
    return (gathered, result) if return_gathered else result


def matmul_reduce_scatter(
    a: torch.Tensor,
    weight: torch.Tensor,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    group: GroupLike,
) -> torch.Tensor:
    """Reduce-scatters a matrix product, sending each part as soon as it is computed.

    Same result as::

        reduce_scatter_tensor(a @ weight, reduce_op, scatter_dim, group)

    Args:
        a: (..., M, K); equal shapes on all ranks.
        weight: (K, N).
        scatter_dim: the dimension of the product to scatter; W must divide its length.
        reduce_op: "sum" or "avg".
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.

    Returns this rank's part, contiguous. Partial sums are added in rank order, in float32 for
    16-bit types, so results do not depend on timing. Differentiable in both. Errors as for
    `all_gather_matmul`. Source: torch's `symm_mem::fused_matmul_reduce_scatter`.
    """
    result: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        a, weight, reduce_op, scatter_dim, group_name(group)
    )
    return result
