"""Fused matmul-all-reduce: what follows a row-parallel linear layer without sequence parallelism.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N). W is the world
size. K may differ from rank to rank, and may be 0: every rank contributes the product of what it
has. The gradients are in matmul_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as funcol

from symm_cp import runtime
from symm_cp.cuda import has_streams
from symm_cp.group import memory
from symm_cp.group.hosts import hosts_of
from symm_cp.group.memory import Group, GroupLike
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    Op,
    check_reduce_op,
    entry_point,
    group_of,
    in_test_mode,
    lib,
    register_device_kernel,
    register_in_python,
    register_kernel,
    what_is,
    world_size_of,
)
from symm_cp.ops.operands import check_matrices
from symm_cp.ops.products import Terms
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import Question, choose

ALL_REDUCE = "fused_matmul_all_reduce"
SUM = "_fused_matmuls_all_reduce"

lib.define(
    f"{ALL_REDUCE}(Tensor A, Tensor B, Tensor? bias, str reduce_op, str group_name) -> Tensor"
)
lib.define(
    f"{SUM}(Tensor[] As, Tensor[] Bs, Tensor? addend, Tensor? bias, str reduce_op, "
    "str group_name) -> Tensor"
)


def _check(
    op: str,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    reduce_op: str,
) -> list[int]:
    """Returns the shape of the sum."""
    if len(lefts) != len(rights):
        raise ValueError(f"{op}: {len(lefts)} As and {len(rights)} Bs: needs as many of both")
    for left, right in zip(lefts, rights, strict=True):
        check_matrices(op, left, [right], left.shape[-1] if left.dim() else 0)
    first = addend if addend is not None else lefts[0]
    name = "addend" if addend is not None else "A"
    if first.is_complex():
        raise TypeError(f"{op}: {name} is {first.dtype}: complex numbers are not supported")
    check_reduce_op(op, name, first.dtype, reduce_op)
    if first.dim() < 2:
        raise ValueError(
            f"{op}: {name} must have at least 2 dimensions, has shape {list(first.shape)}"
        )
    terms = [(f"A[{i}] @ B[{i}]", [*left.shape[:-1], right.shape[1]], left.dtype, left.device)
             for i, (left, right) in enumerate(zip(lefts, rights, strict=True))]  # fmt: skip
    shape = list(addend.shape) if addend is not None else terms[0][1]
    if bias is not None:
        terms.append(("bias", [*bias.shape], bias.dtype, bias.device))
    for what, own, dtype, device in terms:
        needed = shape[-1:] if what == "bias" else shape
        if own != needed:
            raise ValueError(f"{op}: {what} has shape {own}, must have {needed}")
        if dtype != first.dtype:
            raise TypeError(f"{op}: {what} is {dtype} and {name} is {first.dtype}: they must agree")
        if device != first.device:
            raise ValueError(f"{op}: {what} is on {device} and {name} on {first.device}")
    return shape


def unfused_all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """The definition: torch's functional all-reduce, waited for."""
    return funcol.wait_tensor(funcol.all_reduce(tensor, reduce_op, group_name))


def _reduced(op: str, group: Group, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
    """The all-reduce of a tensor that is there already."""
    if not has_streams(tensor.device) and hosts_of(group, tensor.device) is None:
        try:
            total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(
                tensor, reduce_op, group.name
            )
        except RuntimeError as error:
            raise memory.reported(error) from None  # by the native op
        return total
    total = new_result(tensor, tensor.shape)
    runtime.of(total, group).produce_and_all_reduce(
        group,
        lambda _, partial: partial.copy_(tensor),
        total,
        what_is(op, total, detail=reduce_op),
        mean=reduce_op == "avg",
    )
    return total


def _by_rows(group: Group, matrix: torch.Tensor) -> Split:
    return Split.nearly_equal(matrix.shape[0], group.world_size)


def produce_and_all_reduce(
    op: str,
    group: Group,
    produce: Callable[[int | None, torch.Tensor], None],
    out: torch.Tensor,
    reduce_op: str,
    detail: str = "",
) -> None:
    """Writes the sum over ranks to `out`, a matrix.

    `produce(rank, partial)` writes this rank's contribution to the rows that are rank `rank`'s by
    `Split.nearly_equal`; None: to all rows.
    """
    split = _by_rows(group, out)
    rows, columns = split.sizes[0], out.shape[1]
    # The inner dimension may differ from rank to rank, and all must choose alike: a nominal one.
    question = Question(
        "matmul_all_reduce",
        out.dtype,
        ((rows, columns, columns),),
        partial=rows * columns * out.element_size(),
        everywhere=True,
    )
    whole = choose(group, out.device, question) == "whole"
    runtime.of(out, group).produce_and_all_reduce(
        group,
        lambda rank, partial: produce(None if whole else rank, partial),
        out,
        what_is(op, out, detail=f"{reduce_op}{detail}{' whole' * whole}"),
        split=None if whole else split,
        mean=reduce_op == "avg",
    )


def _multiply_and_all_reduce(
    op: str,
    group: Group,
    terms: Terms,
    bias: torch.Tensor | None,
    reduce_op: str,
    shape: list[int],
) -> torch.Tensor:
    out = new_result(terms.like, shape)
    # One rank adds the bias to what it contributes: that costs no pass over the result.
    added = bias if reduce_op == "sum" else None

    def produce(rank: int | None, partial: torch.Tensor) -> None:
        adds = group.rank == (0 if rank is None else rank)
        terms.add_up(partial, rank, added if adds else None)

    detail = " bias" * (bias is not None)
    produce_and_all_reduce(op, group, produce, out.flatten(0, -2), reduce_op, detail)
    return out if bias is added else out.add_(bias)


def _matmul_all_reduce_kernel(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reduce_op: str,
    group_name: str,
) -> torch.Tensor:
    group = group_of(group_name)
    shape = _check(ALL_REDUCE, [a], [weight], None, bias, reduce_op)
    if in_test_mode():
        total = unfused_all_reduce(a @ weight, reduce_op, group_name)
        return total if bias is None else total + bias
    terms = _terms([a], [weight], None, group)
    return _multiply_and_all_reduce(ALL_REDUCE, group, terms, bias, reduce_op, shape)


def _matmuls_all_reduce_kernel(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    reduce_op: str,
    group_name: str,
) -> torch.Tensor:
    group = group_of(group_name)
    shape = _check(SUM, lefts, rights, addend, bias, reduce_op)
    if not lefts and bias is None and addend is not None:
        return _reduced(SUM, group, addend, reduce_op)
    terms = _terms(lefts, rights, addend, group)
    return _multiply_and_all_reduce(SUM, group, terms, bias, reduce_op, shape)


def _terms(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    group: Group,
) -> Terms:
    """The terms as matrices, of which the ranks take rows."""
    return Terms.of(
        [left.flatten(0, -2) for left in lefts],
        rights,
        None if addend is None else addend.flatten(0, -2),
        lambda shape: Split.nearly_equal(shape[0], group.world_size),
    )


def _matmuls_all_reduce_fake(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    reduce_op: str,
    group_name: str,
    *,
    op: str = SUM,
) -> torch.Tensor:
    world_size_of(group_name)  # there is such a group
    shape = _check(op, lefts, rights, addend, bias, reduce_op)
    like = addend if addend is not None else lefts[0]
    return like.new_empty(shape)


def _matmul_all_reduce_fake(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reduce_op: str,
    group_name: str,
) -> torch.Tensor:
    return _matmuls_all_reduce_fake([a], [weight], None, bias, reduce_op, group_name, op=ALL_REDUCE)


_KERNELS: dict[str, Op] = {
    ALL_REDUCE: _matmul_all_reduce_kernel,
    SUM: _matmuls_all_reduce_kernel,
}
_FAKES: dict[str, Op] = {ALL_REDUCE: _matmul_all_reduce_fake, SUM: _matmuls_all_reduce_fake}


def register() -> None:
    """Adds the kernels and fake kernels."""
    # csrc/matmul_all_reduce.cpp calls the kernel for all but few rows.
    register_device_kernel(ALL_REDUCE, _KERNELS[ALL_REDUCE])
    register_in_python(ALL_REDUCE, _KERNELS[ALL_REDUCE])
    register_kernel(SUM, _KERNELS[SUM])
    for name, fake in _FAKES.items():
        lib.impl(name, fake, "Meta")
    autocast.register(autocast.cast, ALL_REDUCE)


@entry_point
def matmul_all_reduce(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduce_op: str = "sum",
    group: GroupLike,
) -> torch.Tensor:
    """All-reduces a matrix product.

    Same result as::

        total = all_reduce(a @ weight, reduce_op, group)
        total if bias is None else total + bias

    Args:
        a: (..., M, K); K may differ from rank to rank, all else is equal on all ranks.
        weight: (K, N).
        bias: (N,), equal on all ranks; it is added once.
        reduce_op: "sum" or "avg".
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.

    Returns (..., M, N), contiguous, with the same bits on all ranks: partial sums are added in rank
    order, in float32 for 16-bit types. Differentiable (twice) in all three, as torch's functional
    all-reduce: the gradient of the sum is all-reduced. Errors as for `all_gather_matmul`; complex
    numbers raise `TypeError`.
    """
    name = memory.group_name(group)
    result: torch.Tensor = torch.ops.symm_mem.fused_matmul_all_reduce(
        a, weight, bias, reduce_op, name
    )
    return result
