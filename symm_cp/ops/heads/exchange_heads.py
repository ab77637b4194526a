"""Exchanges a sequence for heads, and back: all ranks' positions of some heads, or the reverse.

For attention of ranks that each hold part of a sequence: every rank gets the whole sequence of its
heads, in sequence order, attends to it as a single process does, and sends the result back. Each
direction is the gradient of the other. Source: DeepSpeed-Ulysses (Jacobs et al., 2023).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.native import wire
from symm_cp.ops.common import (
    check_reduce_op,
    group_of,
    world_size_of,
)
from symm_cp.ops.heads.packing import HeadExchange, HeadPart, HeadRanges, head_exchange
from symm_cp.ops.op import ONE_BY_ONE, BackwardOp, Op, arguments, declare, untouched
from symm_cp.runtime.calls import BoxesCall
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.results import contiguous

OP = "exchange_heads"

# `head_ranges` lists for every tensor each rank's first head and its last head + 1; by default each
# rank has H / W heads. schedule/layout.py explains `chunk_order` and `chunk_lengths`; by default
# rank r holds the r-th of W parts. `rank` is required with any of these, because the shapes of
# results depend on it.
_ARGUMENTS = (
    "(Tensor[] tensors, bool to_heads, str group_name, int[]? head_ranges=None, "
    "int[]? chunk_order=None, SymInt[]? chunk_lengths=None, int? rank=None)"
)


class _Kind(NamedTuple):
    """The checked properties of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> tuple[_Kind, ...]:
        """Returns the kinds of tensors."""
        return tuple([cls(t.shape, t.dtype, t.device) for t in tensors])


def _check_tensors(op: str, tensors: Sequence[_Kind]) -> None:
    if not tensors:
        raise ValueError(f"{op}: tensors is empty")
    like = tensors[0]
    for index, tensor in enumerate(tensors):
        if len(tensor.shape) != 4:
            raise ValueError(
                f"{op}: tensors[{index}] has shape {list(tensor.shape)}, must have 4 dimensions: "
                "(batch, heads, positions, features)"
            )
        if tensor.shape[2] != like.shape[2]:
            raise ValueError(
                f"{op}: tensors[{index}] has {tensor.shape[2]} positions and tensors[0] "
                f"{like.shape[2]}: they must agree"
            )
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise TypeError(
                f"{op}: tensors[{index}] is {tensor.dtype} on {tensor.device}, tensors[0] "
                f"{like.dtype} on {like.device}"
            )


def _ranges_of(
    op: str,
    tensors: Sequence[_Kind],
    to_heads: bool,
    head_ranges: Sequence[int] | None,
    world_size: int,
) -> list[HeadRanges]:
    """Returns the heads of each rank, of every tensor."""
    if head_ranges is None:
        return [_equal_heads(op, index, t, to_heads, world_size) for index, t in enumerate(tensors)]
    if len(head_ranges) != 2 * world_size * len(tensors):
        raise ValueError(
            f"{op}: head_ranges has {len(head_ranges)} numbers, must have 2 for each of "
            f"{world_size} ranks and {len(tensors)} tensors"
        )
    ends = list(zip(head_ranges[::2], head_ranges[1::2], strict=True))
    found = [tuple(ends[begin : begin + world_size]) for begin in range(0, len(ends), world_size)]
    for index, ranges in enumerate(found):
        _check_ranges(op, index, ranges)
    return found


def _equal_heads(op: str, index: int, tensor: _Kind, to_heads: bool, world_size: int) -> HeadRanges:
    heads = tensor.shape[1]
    each = heads // world_size if to_heads else heads
    if to_heads and heads % world_size:
        raise ValueError(
            f"{op}: tensors[{index}] has {heads} heads, which is not divisible by world size "
            f"{world_size}: pass heads, the heads of each rank"
        )
    return tuple((rank * each, (rank + 1) * each) for rank in range(world_size))


def _check_ranges(op: str, index: int, ranges: HeadRanges) -> None:
    heads = max(end for _, end in ranges)
    held = {head for begin, end in ranges for head in range(begin, end)}
    if any(not 0 <= begin <= end for begin, end in ranges) or len(held) != heads:
        raise ValueError(
            f"{op}: the ranks have heads {[list(each) for each in ranges]} of tensors[{index}], "
            "must be ranges in which each head is held by at least one rank"
        )


def _check_heads(
    op: str, tensors: Sequence[_Kind], to_heads: bool, ranges: Sequence[HeadRanges], rank: int
) -> None:
    for index, (tensor, each) in enumerate(zip(tensors, ranges, strict=True)):
        begin, end = each[rank]
        required = max(end for _, end in each) if to_heads else end - begin
        if tensor.shape[1] != required:
            raise ValueError(
                f"{op}: tensors[{index}] has {tensor.shape[1]} heads, must have {required} for "
                f"the ranks' heads {[list(each) for each in each]}"
            )


def _layout_of(
    op: str,
    like: _Kind,
    to_heads: bool,
    chunk_order: Sequence[int] | None,
    chunk_lengths: Sequence[int] | None,
    rank: int,
    world_size: int,
) -> SequenceLayout:
    length = like.shape[2]
    if chunk_order is None or chunk_lengths is None:
        if not to_heads and length % world_size:
            raise ValueError(
                f"{op}: the tensors have {length} positions, which is not divisible by world size "
                f"{world_size}: pass a load_balancer"
            )
        each = length if to_heads else length // world_size
        return SequenceLayout(world_size, tuple(range(world_size)), (each,) * world_size)
    try:
        layout = SequenceLayout(world_size, tuple(chunk_order), tuple(chunk_lengths))
    except ValueError as error:
        raise ValueError(f"{op}: load_balancer: {error}") from error
    required = layout.lengths[rank] if to_heads else layout.length
    if length != required:
        raise ValueError(
            f"{op}: the tensors have {length} positions, must have {required} for "
            f"chunk_lengths={list(chunk_lengths)}"
        )
    return layout


def exchange_of(
    tensors: Sequence[torch.Tensor],
    to_heads: bool,
    group_name: str,
    head_ranges: Sequence[int] | None = None,
    chunk_order: Sequence[int] | None = None,
    chunk_lengths: Sequence[int] | None = None,
    rank: int | None = None,
    *,
    op: str = OP,
) -> tuple[Group, HeadExchange]:
    """Returns the group and exchange for an op's arguments; raises `ValueError` or `TypeError`."""
    group = group_of(group_name, rank)
    options = [None if o is None else tuple(o) for o in (head_ranges, chunk_order, chunk_lengths)]
    kinds = _Kind.of(tensors)
    return group, _checked(op, kinds, to_heads, group.rank, group.world_size, *options)


@lru_cache(maxsize=512)
def _checked(
    op: str,
    tensors: tuple[_Kind, ...],
    to_heads: bool,
    rank: int,
    world_size: int,
    head_ranges: tuple[int, ...] | None,
    chunk_order: tuple[int, ...] | None,
    chunk_lengths: tuple[int, ...] | None,
) -> HeadExchange:
    _check_tensors(op, tensors)
    ranges = _ranges_of(op, tensors, to_heads, head_ranges, world_size)
    _check_heads(op, tensors, to_heads, ranges, rank)
    layout = _layout_of(op, tensors[0], to_heads, chunk_order, chunk_lengths, rank, world_size)
    parts = []
    for tensor, each in zip(tensors, ranges, strict=True):
        shape = (tensor.shape[0], max(end for _, end in each), layout.length, tensor.shape[3])
        parts.append(HeadPart(shape, tensor.dtype, layout, each))
        if not to_heads and not parts[-1].disjoint:
            check_reduce_op(op, "tensors", tensor.dtype)
    return head_exchange(rank, to_heads, tuple(parts))


def _kernel(
    tensors: list[torch.Tensor], to_heads: bool, group_name: str, *options: Any
) -> list[torch.Tensor]:
    group, exchange = exchange_of(tensors, to_heads, group_name, *options)
    return run_exchange(group, exchange, tensors)


def run_exchange(
    group: Group,
    exchange: HeadExchange,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None = None,
    name: bytes | None = None,
) -> list[torch.Tensor]:
    """Runs an exchange, for kernels. Collective; the tensors are not checked again.

    `outputs`: memory for the results, of the shapes of `exchange.new_outputs`. Heads that several
    ranks send are added, into new tensors. `name`: of the call, identical on all ranks.
    """
    dense = [t if t.stride(3) == 1 or t.shape[3] == 1 else contiguous(t) for t in tensors]
    outputs = exchange.new_outputs(dense) if outputs is None else outputs
    name = name or exchange_name(exchange)
    runtime.run(BoxesCall(group, exchange, dense, outputs, name))
    return exchange.summed(outputs)


@lru_cache(maxsize=512)
def exchange_name(exchange: HeadExchange, op: str = OP) -> bytes:
    """Returns a call's name, equal on all ranks; a checksum represents heads and layout."""
    checksum = zlib.crc32(repr(exchange.parts).encode())
    shapes = " ".join(f"{str(part.dtype)[6:]}{list(part.shape)}" for part in exchange.parts)
    name = f"{op} {'to heads' if exchange.to_heads else 'to sequence'} #{checksum:08x} {shapes}"
    return name.encode()[: wire.MAX_CALL_NAME]


def exchange_fake(
    tensors: Sequence[torch.Tensor],
    to_heads: bool,
    group_name: str,
    head_ranges: Sequence[int] | None = None,
    chunk_order: Sequence[int] | None = None,
    chunk_lengths: Sequence[int] | None = None,
    rank: int | None = None,
    *,
    op: str = OP,
) -> list[torch.Tensor]:
    """Returns tensors with the shapes, strides and dtypes of the op's results."""
    world_size, held = world_size_of(group_name), rank or 0
    kinds = _Kind.of(tensors)
    _check_tensors(op, kinds)
    ranges = _ranges_of(op, kinds, to_heads, head_ranges, world_size)
    length = tensors[0].shape[2]
    if chunk_order is None or chunk_lengths is None:
        length = length * world_size if to_heads else length // world_size
    elif to_heads:
        length = sum(chunk_lengths)
    else:
        each = len(chunk_order) // world_size
        chunks = chunk_order[held * each : (held + 1) * each]
        length = sum(chunk_lengths[chunk] for chunk in chunks)
    results = []
    for tensor, by_rank in zip(tensors, ranges, strict=True):
        batch, features = tensor.shape[0], tensor.shape[3]
        begin, end = by_rank[held]
        if to_heads:
            results.append(tensor.new_empty(batch, end - begin, length, features))
            continue
        heads = max(end for _, end in by_rank)
        results.append(tensor.new_empty(batch, length, heads, features).transpose(1, 2))
    return results


def _backward(
    grads: list[torch.Tensor], to_heads: bool, group_name: str, *options: Any
) -> list[torch.Tensor]:
    """Sends the gradients in the other direction."""
    results: list[torch.Tensor] = torch.ops.symm_mem.exchange_heads(
        grads, not to_heads, group_name, *options
    )
    return results


def _types(t: Any, tensors: Any, to_heads: Any, **_: Any) -> Any:
    source, to = (2, 1) if to_heads else (1, 2)
    return [t.all_to_all(x, source, to) for x in tensors]


declare(
    Op.backward(
        "_exchange_heads_backward",
        f"{_ARGUMENTS.replace('tensors', 'grads')} -> Tensor[]",
        _backward,
        lambda on: arguments([on.rand(1, 2, 3 * on.world_size, 4)], True, on.group_name),
    ),
    Op(
        name=OP,
        types=_types,
        schema=f"{_ARGUMENTS} -> Tensor[]",
        kernel=_kernel,
        fake=exchange_fake,
        gradient=BackwardOp("_exchange_heads_backward"),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            [on.rand(1, 2 * on.world_size, 3, size) for size in (4, 2)], True, on.group_name
        ),
        prepare=_checked,
    ),
)
