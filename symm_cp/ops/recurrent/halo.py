"""The rows next to this rank's part, from its neighbours, for convolutions over a sequence.

The backward pass sends the gradients of these rows back to the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.common import (
    SIZES,
    call_signature,
    check_dim,
    check_reduce_op,
    gather_split,
    group_of,
    uneven_of,
    uneven_parts,
    world_size_of,
)
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.op import ONE_BY_ONE, Gradient, Op, arguments, declare, untouched
from symm_cp.runtime.calls import GatherCall
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import copied, new_result
from symm_cp.tensors.shards import Split

_EXCHANGE = "exchange_halo"
_ADD = "_add_halo"

_ARGUMENTS = f"SymInt left, SymInt right, int dim, str group_name, {SIZES}"


def _check(tensor: torch.Tensor, left: int, right: int, dim: int) -> int:
    dim = check_dim(_EXCHANGE, "dim", dim, tensor.dim())
    for name, rows in (("left", left), ("right", right)):
        if rows < 0:
            raise ValueError(f"{_EXCHANGE}: {name}={rows} must not be negative")
    return dim


def _check_padded(padded: torch.Tensor, left: int, right: int, dim: int) -> int:
    dim = _check(padded, left, right, dim)
    check_reduce_op(_ADD, "padded", padded.dtype)
    if padded.shape[dim] < left + right:
        raise ValueError(
            f"{_ADD}: dimension {dim} of padded {list(padded.shape)} must have at least "
            f"left + right = {left + right} rows"
        )
    return dim


def _place_in_halo(
    split: Split, rank: int, owner: int, left: int, right: int
) -> tuple[int, int, int]:
    """Where the rows of `owner` lie in the halos of `rank`: which halo, from which row, how many.

    Halo 0, on the left, holds the last rows of lower ranks, halo 1 the first rows of higher ranks.
    """
    begin, end = split.start(rank), split.start(rank) + split.sizes[rank]
    first, last = split.start(owner), split.start(owner) + split.sizes[owner]
    if owner < rank:
        rows = min(split.sizes[owner], max(0, last - begin + left))
        return 0, max(0, left - (begin - last) - rows), rows
    return 1, min(first - end, right), min(split.sizes[owner], max(0, end + right - first))


def _exchange_kernel(
    x: torch.Tensor,
    left: int,
    right: int,
    dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    group = group_of(group_name, rank)
    dim = _check(x, left, right, dim)
    split = gather_split(_EXCHANGE, "dim", dim, x, sizes, group.rank, group.world_size)
    length = x.shape[dim]
    shape = split._replaced(x.shape, left + length + right)
    padded = new_result(x, shape)
    halos = [padded.narrow(dim, 0, left), padded.narrow(dim, left + length, right)]
    padded.narrow(dim, left, length).copy_(x)
    for halo in halos:
        halo.zero_()
    if group.world_size == 1 or left + right == 0:
        return padded
    # Higher ranks need a part's last rows, lower ranks its first rows.
    edges = [(min(left, size), min(right, size)) for size in split.sizes]
    shapes = [tuple(tuple(split._replaced(x.shape, n)) for n in rows) for rows in edges]
    tail, head = edges[group.rank]

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        if owner == group.rank:
            return
        side, begin, rows = _place_in_halo(split, group.rank, owner, left, right)
        edge = shards[side]
        at = edge.shape[dim] - rows if side == 0 else 0
        halos[side].narrow(dim, begin, rows).copy_(edge.narrow(dim, at, rows))

    name = call_signature(_EXCHANGE, x, split=split, detail=f"{left=} {right=} {dim=}")
    own = [x.narrow(dim, length - tail, tail), x.narrow(dim, 0, head)]
    runtime.run(GatherCall(group, own, consume, name, shapes=shapes))
    return padded


def _split_of_padded(
    padded: torch.Tensor,
    left: int,
    right: int,
    dim: int,
    sizes: Sequence[int] | None,
    rank: int | None,
    world_size: int,
) -> Split:
    own = padded.narrow(dim, left, padded.shape[dim] - left - right)
    return gather_split(_ADD, "dim", dim, own, sizes, rank, world_size)


def _add_kernel(
    padded: torch.Tensor,
    left: int,
    right: int,
    dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """The transpose of `exchange_halo`: adds to each row its copies in the halos of all ranks."""
    group = group_of(group_name, rank)
    dim = _check_padded(padded, left, right, dim)
    ranks = group.world_size
    split = _split_of_padded(padded, left, right, dim, sizes, group.rank, ranks)
    length = split.sizes[group.rank]
    own = padded.narrow(dim, left, length)
    if ranks == 1 or left + right == 0:
        return copied(own)
    # Sums in float32 for 16-bit types, in the fixed order in which a runtime visits the peers.
    total = new_result(own, own.shape, wide(own.dtype)).copy_(own)
    halos = [padded.narrow(dim, 0, left), padded.narrow(dim, left + length, right)]
    shapes = [tuple(tuple(halo.shape) for halo in halos)] * ranks

    def consume(shards: list[torch.Tensor], sender: int) -> None:
        if sender == group.rank:
            return
        side, begin, rows = _place_in_halo(split, sender, group.rank, left, right)
        at = length - rows if side == 0 else 0
        total.narrow(dim, at, rows).add_(shards[side].narrow(dim, begin, rows))

    name = call_signature(_ADD, own, split=split, detail=f"{left=} {right=} {dim=}")
    runtime.run(GatherCall(group, halos, consume, name, shapes=shapes))
    return total if total.dtype == padded.dtype else total.to(padded.dtype)


def _exchange_fake(
    x: torch.Tensor,
    left: int,
    right: int,
    dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    dim = _check(x, left, right, dim)
    gather_split(_EXCHANGE, "dim", dim, x, sizes, rank, world_size_of(group_name))
    shape = list(x.shape)
    shape[dim] = left + x.shape[dim] + right
    return x.new_empty(shape)


def _add_fake(
    padded: torch.Tensor,
    left: int,
    right: int,
    dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    dim = _check_padded(padded, left, right, dim)
    _split_of_padded(padded, left, right, dim, sizes, rank, world_size_of(group_name))
    shape = list(padded.shape)
    shape[dim] = padded.shape[dim] - left - right
    return padded.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *ctx.halo, ctx.group_name = inputs[:5]
    ctx.uneven = uneven_of(inputs[5:])


def _exchange_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    total = torch.ops.symm_mem._add_halo(grad, *ctx.halo, ctx.group_name, *ctx.uneven)
    return total, *(None,) * (4 + len(ctx.uneven))


def _add_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    padded = direct("exchange_halo")(grad, *ctx.halo, ctx.group_name, *ctx.uneven)
    return padded, *(None,) * (4 + len(ctx.uneven))


def _types(t: Any, x: Any, dim: Any, **_: Any) -> Any:
    labels = list("abcdefgh"[: getattr(x, "ndim", 1)])
    if isinstance(dim, int):
        labels[dim] = "_"
    equation = "".join(labels)
    return t.varying("{} with its halo", f"{equation}->{equation}", x, "all_to_all_single")


declare(
    Op(
        name=_EXCHANGE,
        types=_types,
        schema=f"(Tensor x, {_ARGUMENTS}) -> Tensor",
        kernel=_exchange_kernel,
        fake=_exchange_fake,
        gradient=Gradient(_exchange_backward, _setup),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(on.rand(4, 6, 4), 1, 2, 1, on.group_name),
    ),
    Op(
        name=_ADD,
        types=lambda t, padded, dim, **_: t.varying("{}", "...->...", padded, "all_to_all_single"),
        schema=f"(Tensor padded, {_ARGUMENTS}) -> Tensor",
        kernel=_add_kernel,
        fake=_add_fake,
        gradient=Gradient(_add_backward, _setup),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(on.rand(2, 6, 3), 1, 1, 1, on.group_name),
        internal=True,
    ),
)


@entry_point()
def exchange_halo(
    x: torch.Tensor,
    left: int,
    right: int = 0,
    dim: int = -1,
    *,
    group: GroupLike,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Extends this rank's part of a sequence by the rows before and after it on other ranks.

    Same result as::

        whole = all_gather_tensor(x, dim, group)  # in rank order
        zeros = lambda rows: torch.zeros_like(whole).narrow(dim, 0, rows)  # if rows <= its length
        padded = torch.cat([zeros(left), whole, zeros(right)], dim)
        padded.narrow(dim, start_of_this_rank, left + x.shape[dim] + right)

    A causal convolution over a sequence that is spread in order:
    `F.conv1d(exchange_halo(x, kernel_size - 1, group=group), weight)`, without padding.

    Args:
        x: any shape and dtype (complex, too), of any strides.
        left, right: the numbers of rows before and after the part; may exceed a neighbour's part.
            Equal on all ranks.
        dim: the dimension of the sequence, negative counts from the end.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        sizes: the length of every rank's part along `dim`; by default all equal this rank's.

    Returns a contiguous tensor with `left + x.shape[dim] + right` rows along `dim`: zeros before
    the first and after the last position of the sequence. Twice differentiable: the gradients of
    rows that are copies go back to their owners and are added in a fixed order, in float32 for
    16-bit types. Raises `ValueError` or `TypeError` for arguments that do not fit, before any
    communication; `RuntimeError` when a peer fails or disagrees.
    """
    name = group_name(group)
    padded: torch.Tensor = direct("exchange_halo")(
        x, left, right, dim, name, *uneven_parts(sizes, name)
    )
    return padded
