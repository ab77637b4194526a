"""The kernels of fused matmul-reduce-scatter, of one product and of a sum of products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.ops.common import (
    check_dim,
    check_reduce_op,
    group_of,
    in_test_mode,
    name_of,
    scatter_split,
    sizes_text,
    unfused_reduce_scatter,
    world_size_of,
)
from symm_cp.ops.operands import check_matrices
from symm_cp.ops.products import Terms
from symm_cp.runtime.sums import real
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import Question, choose

SCATTER = "fused_matmul_reduce_scatter"
SUM = "_fused_matmuls_reduce_scatter"


def _check_scatter(
    op: str,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    sizes: Sequence[int] | None,
    world_size: int,
) -> tuple[Terms, bool]:
    """Returns what to sum, and whether to average."""
    for left, right in zip(lefts, rights, strict=True):
        check_matrices(op, left, [right], left.shape[-1] if left.dim() else 0)

    def divided(shape: list[int]) -> Split:
        dim = check_dim(op, "scatter_dim", scatter_dim, len(shape))
        return scatter_split(op, "scatter_dim", dim, shape[dim], sizes, world_size)

    terms = Terms.of(lefts, rights, addend, divided)
    if addend is not None and list(addend.shape) != terms.shape:
        raise ValueError(
            f"{op}: addend has shape {list(addend.shape)}, must be {terms.shape}, that of the sum"
        )
    return terms, check_reduce_op(op, "A", terms.like.dtype, reduce_op)


def _multiply_first(group: Group, terms: Terms) -> bool:
    """Whether to add up the whole before any part of it is sent."""
    if terms.by_columns or not terms.lefts:
        return False
    like = terms.like
    *lead, columns = terms.front.largest_shape(terms.moved)
    rows = math.prod(lead)
    products = tuple(
        (rows, left.shape[-1], right.shape[1])
        for left, right in zip(terms.lefts, terms.rights, strict=True)
    )
    nbytes = rows * columns * like.element_size()
    question = Question("matmul_reduce_scatter", like.dtype, products, partial=nbytes)
    return choose(group, like.device, question) == "whole"


def _multiply_and_reduce_scatter(
    op: str, group: Group, terms: Terms, reduce_op: str, mean: bool
) -> torch.Tensor:
    like, split, front = terms.like, terms.split, terms.front
    out = new_result(like, front.shape_of(group.rank, terms.moved))
    whole, is_complex = _multiply_first(group, terms), out.is_complex()
    summed: list[torch.Tensor] = []

    def produce(rank: int, numbers: torch.Tensor) -> None:
        partial = torch.view_as_complex(numbers) if is_complex else numbers
        if not whole:
            terms.add_up(partial, rank)
            return
        if not summed:
            # Here rather than before: a failure is then told to the peers.
            summed.append(new_result(like, terms.shape))
            terms.add_up(summed[0])
        partial.copy_(terms.part(rank, summed[0]))

    # Neither K nor the way, which follows from K, has to be the same on all ranks.
    detail = f"scatter_dim={split.dim} {reduce_op}{sizes_text(split)}"
    name = name_of(op, like.dtype, terms.shape, detail)
    numbers = real(out)
    shapes = None
    if not split.is_equal:
        shapes = front.shapes([*out.shape, *numbers.shape[out.dim() :]])
    runtime.of(out, group).produce_and_reduce_scatter(
        group, produce, numbers, name, shapes=shapes, mean=mean
    )
    return out if terms.by_columns else contiguous(out.movedim(0, split.dim))


def matmul_reduce_scatter_kernel(
    a: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """The op; `sizes` is the length of every rank's part where they differ."""
    group = group_of(group_name, rank)
    terms, mean = _check_scatter(
        SCATTER, [a], [weight], None, reduce_op, scatter_dim, sizes, group.world_size
    )
    if in_test_mode():
        dim = terms.split.dim
        return unfused_reduce_scatter(a @ weight, reduce_op, dim, group_name, terms.split)
    return _multiply_and_reduce_scatter(SCATTER, group, terms, reduce_op, mean)


def matmuls_reduce_scatter_kernel(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """Reduce-scatters a sum of products and an addend."""
    group = group_of(group_name, rank)
    terms, mean = _check_scatter(
        SUM, lefts, rights, addend, reduce_op, scatter_dim, sizes, group.world_size
    )
    return _multiply_and_reduce_scatter(SUM, group, terms, reduce_op, mean)


def matmuls_reduce_scatter_fake(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
    *,
    op: str = SUM,
) -> torch.Tensor:
    """Shape and dtype of what the op returns."""
    world_size = world_size_of(group_name)
    terms, _ = _check_scatter(op, lefts, rights, addend, reduce_op, scatter_dim, sizes, world_size)
    return terms.like.new_empty(terms.split.shape_of(rank or 0, terms.shape))


def matmul_reduce_scatter_fake(
    a: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """Shape and dtype of what the op returns."""
    return matmuls_reduce_scatter_fake(
        [a], [weight], None, reduce_op, scatter_dim, group_name, sizes, rank, op=SCATTER
    )
