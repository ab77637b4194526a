"""Fused all-gather-matmul and matmul-reduce-scatter, with gradients.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N); a trailing
`_shard` names a tensor of which each rank holds its part. W is the world size.

Gradients communicate through the same pipelines: that of an all-gather-matmul is a
matmul-reduce-scatter and a weight gradient that gathers the shards again (rather than keep the
gathered input alive); that of a matmul-reduce-scatter gathers the gradient once for both. They are
in matmul_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.alignment import aligned
from symm_cp.memory import Group, GroupLike, group_name
from symm_cp.ops.common import (
    Op,
    Sum,
    at_last,
    check_dim,
    check_divisible,
    check_matrices,
    check_reduce_op,
    front_shape,
    group_of,
    in_test_mode,
    lib,
    nbytes_of,
    new_result,
    real,
    register_kernel,
    rows_of,
    unfused_all_gather,
    unfused_reduce_scatter,
    what_is,
    world_size_of,
)
from symm_cp.shards import Split
from symm_cp.tuning import Question, choose

lib.define(
    "_fused_matmuls_reduce_scatter(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, "
    "int scatter_dim, str group_name) -> Tensor"
)


# How many rows are gathered at a time where a matmul cannot do without: bounds the extra memory.
_BLOCK_ROWS = 1024

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


def _all_gather_matmul_kernel(
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
    detail = f"gather_dim={dim}"
    if dim == A.dim() - 1:
        what = what_is("fused_all_gather_matmul", A, detail=detail)
        return _all_gather_matmul_columns(A, Bs, group_name, what, return_A)
    shard = A.movedim(dim, 0)
    rows = shard.shape[:-1].numel()
    products = tuple((rows, A.shape[-1], B.shape[1]) for B in Bs)
    question = Question("all_gather_matmul", A.dtype, products, shard=nbytes_of(A))
    whole = choose(group, A.device, question) == "whole"
    what = what_is("fused_all_gather_matmul", A, detail=detail + " whole" * whole)
    outs = [new_result(A, (rows * group.world_size, B.shape[1])) for B in Bs]
    kept = return_A or whole
    A_full = new_result(A, front_shape(A, dim, group.world_size)) if kept else None

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        A_rows = aligned(shards[0]).view(rows, A.shape[-1])
        for out, B in zip(outs, Bs, strict=True):
            torch.mm(A_rows, B, out=out.narrow(0, rank * rows, rows))

    def multiply() -> None:
        assert A_full is not None
        for out, B in zip(outs, Bs, strict=True):
            torch.mm(A_full.flatten(0, -2), B, out=out)

    runtime.of(A, group).all_gather_and_consume(
        group, [shard], at_last(multiply, group) if whole else consume, what, gathered=A_full
    )
    if not return_A:
        A_full = None
    lead = front_shape(A, dim, group.world_size)[:-1]
    results = [out.view(*lead, out.shape[1]).movedim(0, dim) for out in outs]
    return (A_full.movedim(0, dim) if A_full is not None else None), results


def _all_gather_matmul_columns(
    A: torch.Tensor, Bs: list[torch.Tensor], group_name: str, what: bytes, return_A: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers the last dimension, which the matmul sums over."""
    group = group_of(group_name)
    A_rows = A.flatten(0, -2)
    outs = [new_result(A, (A_rows.shape[0], B.shape[1])) for B in Bs]
    shape = (A_rows.shape[0], A.shape[-1] * group.world_size)
    A_full = new_result(A, shape) if return_A else None
    if A.dtype.itemsize == 2:
        _multiply_gathered_blocks(group, A_rows, Bs, outs, A_full, what)
    else:
        _add_products_of_shards(group, A_rows, Bs, outs, A_full, what)
    lead = A.shape[:-1]
    results = [out.view(*lead, out.shape[1]) for out in outs]
    return (A_full.view(*lead, shape[1]) if A_full is not None else None), results


def _add_products_of_shards(
    group: Group,
    A_rows: torch.Tensor,
    Bs: list[torch.Tensor],
    outs: list[torch.Tensor],
    A_full: torch.Tensor | None,
    what: bytes,
) -> None:
    k = A_rows.shape[1]
    sums = [Sum(out, group.world_size) for out in outs]

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        columns = aligned(shards[0])
        for total, B in zip(sums, Bs, strict=True):
            total.add_product(columns, B.narrow(0, rank * k, k))

    columns = Split.equal(k, group.world_size, dim=1)
    runtime.of(A_rows, group).all_gather_and_consume(
        group, [A_rows], consume, what, gathered=A_full, split=columns
    )
    for total in sums:
        total.finish()


def _multiply_gathered_blocks(
    group: Group,
    A_rows: torch.Tensor,
    Bs: list[torch.Tensor],
    outs: list[torch.Tensor],
    A_full: torch.Tensor | None,
    what: bytes,
) -> None:
    """For 16-bit types: products of shards would each be rounded, whole rows are rounded once."""

    def combine(shards: list[torch.Tensor]) -> None:
        at_a_time = _BLOCK_ROWS if A_rows.device.type == "cpu" else max(1, A_rows.shape[0])
        for begin in range(0, A_rows.shape[0], at_a_time):
            rows = slice(begin, begin + at_a_time)
            block = torch.cat([shard[rows] for shard in shards], 1)
            if A_full is not None:
                A_full[rows] = block
            for out, B in zip(outs, Bs, strict=True):
                torch.mm(block, B, out=out[rows])

    runtime.of(A_rows, group).all_gather_and_combine(group, A_rows, combine, what)


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
    shape = front_shape(A, dim, world_size)
    if dim == A.dim() - 1:
        shape = [*A.shape[:-1], A.shape[-1] * world_size]
        dim = 0
    A_full = A.new_empty(shape).movedim(0, dim) if return_A else None
    return A_full, [A.new_empty([*shape[:-1], B.shape[1]]).movedim(0, dim) for B in Bs]


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
    mean = check_reduce_op(op, "A", A.dtype, reduce_op)
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
    out = new_result(As[0], front)

    rows = As[0].shape[:-1].numel() // W
    products = tuple((rows, A.shape[-1], B.shape[1]) for A, B in zip(As, Bs, strict=True))
    question = Question("matmul_reduce_scatter", out.dtype, products, partial=nbytes_of(out))
    whole = not columns and choose(group, out.device, question) == "whole"
    products_summed: list[torch.Tensor] = []

    def produce(rank: int, numbers: torch.Tensor) -> None:
        partial = torch.view_as_complex(numbers) if out.is_complex() else numbers
        if whole:
            if not products_summed:
                # Here rather than before: a failure is then told to the peers.
                products_summed.append(_sum_of_products(As, Bs, addend))
            part = products_summed[0].narrow(dim, rank * shape[dim], shape[dim])
            partial.copy_(part.movedim(dim, 0))
            return
        into = partial.flatten(0, -2)
        total = Sum(into, len(As) + (addend is not None))
        for A, B in zip(As, Bs, strict=True):
            left = A.flatten(0, -2) if columns else rows_of(A, dim, rank, W)
            total.add_product(left, B.chunk(W, 1)[rank] if columns else B)
        if addend is not None:
            part = addend.narrow(dim, rank * shape[dim], shape[dim])
            total.add((part if columns else part.movedim(dim, 0)).reshape(into.shape))
        total.finish()

    detail = f"N={Bs[0].shape[1]} scatter_dim={dim} {reduce_op}" + " whole" * whole
    what = what_is(op, As[0], detail=detail)
    runtime.of(out, group).produce_and_reduce_scatter(group, produce, real(out), what, mean=mean)
    return out if columns else out.movedim(0, dim).contiguous()


def _sum_of_products(
    As: list[torch.Tensor], Bs: list[torch.Tensor], addend: torch.Tensor | None
) -> torch.Tensor:
    product = As[0].new_empty([*As[0].shape[:-1], Bs[0].shape[1]])
    total = Sum(product.flatten(0, -2), len(As) + (addend is not None))
    for A, B in zip(As, Bs, strict=True):
        total.add_product(A.flatten(0, -2), B)
    if addend is not None:
        total.add(addend.flatten(0, -2))
    total.finish()
    return product


def _matmul_reduce_scatter_kernel(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    op = "fused_matmul_reduce_scatter"
    if in_test_mode():
        W = group_of(group_name).world_size
        dim, _ = _check_matmul_reduce_scatter(op, [A], [B], reduce_op, scatter_dim, W)
        return unfused_reduce_scatter(A @ B, reduce_op, dim, group_name)
    return _multiply_and_reduce_scatter(op, [A], [B], None, reduce_op, scatter_dim, group_name)


def _matmuls_reduce_scatter_kernel(
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


# --- registration ----------------------------------------------------------------------------

_KERNELS: dict[str, tuple[Op, Op]] = {
    "fused_all_gather_matmul": (_all_gather_matmul_kernel, _all_gather_matmul_fake),
    "fused_matmul_reduce_scatter": (_matmul_reduce_scatter_kernel, _matmul_reduce_scatter_fake),
    "_fused_matmuls_reduce_scatter": (_matmuls_reduce_scatter_kernel, _matmuls_reduce_scatter_fake),
}


def register() -> None:
    """Adds the kernels, and fake kernels (torch's are wrong for some dims)."""
    for name, (kernel, fake) in _KERNELS.items():
        register_kernel(name, kernel, replaces_torch=not name.startswith("_"))
        lib.impl(name, fake, "Meta", allow_override=True)


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
    memory that was rendezvoused with the group is read in place by the peers. Bits depend neither
    on where the shard lies nor on `return_gathered`. Raises `ValueError` or `TypeError` for
    arguments that do not fit, before any communication; `RuntimeError` when a peer fails or
    disagrees. Source: torch's `symm_mem::fused_all_gather_matmul`.
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
