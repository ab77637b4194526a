"""Exchanges of whole tensors on CPU, each of them one native call: `symm_cp::exchange`.

Groups whose ranks work apart exchange by collectives of the process group instead.

On CPU nothing copies while a rank multiplies, so work shard by shard is never faster than one
exchange and one kernel (measured: 1.0 to 1.3 times the time). So ops exchange tensors of up to
`WHOLE_BYTES` at once; larger ones go through calls of patterns, which need no memory for the
whole. Kernels call these functions, and plans (csrc/plan) replay them without Python.

`name` is the bytes that name the call in errors, and that ranks compare.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import torch

from symm_cp.group.hosts import apart_of, has_epochs, in_test_mode
from symm_cp.group.memory import Group, reported
from symm_cp.modes import ordinary_tensors
from symm_cp.native import wire
from symm_cp.runtime import process_group, recorder
from symm_cp.runtime.calls import PackedBoxes, PlacedBox
from symm_cp.tensors.alignment import aligned, part_offsets, scratch
from symm_cp.tensors.results import contiguous, copied, new_result
from symm_cp.tensors.shards import Shape, Shards, Split, viewing

T = TypeVar("T")

#: The most bytes of a tensor that is exchanged at once.
WHOLE_BYTES = 64 << 20


def all_gather(
    group: Group, shard: torch.Tensor, split: Split, name: bytes, *, keep: bool = False
) -> torch.Tensor:
    """Returns the concatenation of all ranks' shards along the dimension that `split` divides.

    It may be the shard itself in a group of one rank, unless `keep`: then the op returns it.
    """
    if group.world_size == 1:
        return copied(shard) if keep else aligned(shard)
    gathered = new_result(shard, split.whole_shape(shard.shape))
    all_gather_into(group, shard, gathered, split, name)
    return gathered


def all_gather_pair(
    group: Group, pair: Sequence[torch.Tensor], split: Split, name: bytes
) -> torch.Tensor:
    """Returns two tensors of one shape, stacked, with a dimension gathered that `split` divides.

    `split.dim` counts from the stack's dimension, 0.
    """
    first = pair[0]
    shape = (2, *first.shape)
    if group.world_size == 1:
        return torch.stack(list(pair))
    given, taken = _gather_parts(split, shape, first.element_size(), group.rank)
    gathered = new_result(first, split.whole_shape(shape))
    dense = [contiguous(each) for each in pair]
    if first.numel() == 0:
        dense = [gathered]  # no bytes of it
    _exchange(group, dense, gathered, wire.ExchangeKind.ALL_GATHER, given, taken, name)
    return gathered


def all_gather_into(
    group: Group, shard: torch.Tensor, gathered: torch.Tensor, split: Split, name: bytes
) -> None:
    """Writes the concatenation of all ranks' shards to a contiguous tensor."""
    given, taken = _gather_parts(split, tuple(shard.shape), shard.element_size(), group.rank)
    kind = wire.ExchangeKind.ALL_GATHER
    _exchange(group, [contiguous(shard)], gathered, kind, given, taken, name)


@lru_cache(maxsize=512)
def _gather_parts(split: Split, shape: Shape, item: int, rank: int) -> tuple[list[int], list[int]]:
    """Returns the offsets and sizes of the given and the taken parts: see `symm_cp::exchange`."""
    rows, inner = math.prod(shape[: split.dim]), math.prod(shape[split.dim + 1 :]) * item
    pitch = split.length * inner
    taken: list[int] = []
    for begin, size in zip(accumulate((0, *split.sizes)), split.sizes, strict=False):
        row = size * inner
        taken += (begin * inner, rows * row, row if rows > 1 else 0, pitch)
    return [0, rows * split.sizes[rank] * inner], taken


def reduce_scatter(
    group: Group, parts: torch.Tensor, shapes: Sequence[Sequence[int]], name: bytes, *, mean: bool
) -> torch.Tensor:
    """Returns this rank's part of the sum of all ranks' `parts`, in rank order.

    `parts` is contiguous and holds the parts for all ranks, of these shapes, one after the other.
    Sums are computed in float32 for the 16-bit types.
    """
    if group.world_size == 1:
        return parts.view(*shapes[0])
    item = parts.element_size()
    sizes = [math.prod(shape) * item for shape in shapes]
    out = new_result(parts, shapes[group.rank])
    reduce_scatter_into(group, parts, tuple(accumulate((0, *sizes))), sizes, out, name, mean=mean)
    return out


def reduce_scatter_into(
    group: Group,
    parts: torch.Tensor,
    offsets: Sequence[int],
    sizes: Sequence[int],
    out: torch.Tensor,
    name: bytes,
    *,
    mean: bool,
) -> None:
    """Writes this rank's part of the sum of all ranks' `parts` to a contiguous tensor.

    Part r has `sizes[r]` bytes, from byte `offsets[r]` on.
    """
    given = [each for pair in zip(offsets, sizes, strict=False) for each in pair]
    taken = [0, sizes[group.rank], 0, 0]
    kind = wire.ExchangeKind.REDUCE_SCATTER
    _exchange(group, [parts], out, kind, given, taken, name, "avg" if mean else "sum")


def all_reduce(group: Group, tensor: torch.Tensor, name: bytes, *, mean: bool) -> torch.Tensor:
    """Returns the sum over ranks, contiguous; all ranks get the same bits."""
    if group.world_size == 1:
        return copied(tensor)
    out, kind, none = new_result(tensor, tensor.shape), wire.ExchangeKind.ALL_REDUCE, list[int]()
    given = [contiguous(tensor)]
    _exchange(group, given, out, kind, none, none, name, "avg" if mean else "sum")
    return out


def all_reduce_(group: Group, tensor: torch.Tensor, name: bytes, *, mean: bool) -> torch.Tensor:
    """Replaces a contiguous tensor by the sum over ranks; all ranks get the same bits."""
    if group.world_size > 1:
        kind, none = wire.ExchangeKind.ALL_REDUCE, list[int]()
        _exchange(group, [tensor], tensor, kind, none, none, name, "avg" if mean else "sum")
    return tensor


def all_gather_shards(group: Group, shards: Shards, name: bytes) -> torch.Tensor:
    """Returns aligned bytes: the shards of all ranks, `shards.nbytes` apart."""
    own, nbytes, ranks = shards.own[0], shards.nbytes, group.world_size
    sizes = [nbytes] * ranks
    if len(shards.own) == 1:
        sizes = [size for (size,) in shards.sizes.parts]
    if len(shards.own) > 1 or not shards.contiguous:
        own = scratch(own, nbytes)
        shards.pack(group.rank, viewing(own))
    gathered = scratch(own, ranks * nbytes)
    taken = [each for rank, size in enumerate(sizes) for each in (rank * nbytes, size, 0, 0)]
    given = [0, sizes[group.rank]]
    _exchange(group, [own], gathered, wire.ExchangeKind.ALL_GATHER, given, taken, name)
    return gathered


def pass_on(
    group: Group,
    given: torch.Tensor,
    to: int,
    given_bytes: int,
    taken: torch.Tensor,
    source: int,
    taken_bytes: int,
    name: bytes,
) -> None:
    """Sends the first bytes of a tensor to one rank, and writes those of another rank to `taken`.

    Collective: each rank gives to one rank, and takes from one.
    """
    given_sizes, taken_sizes = [0] * group.world_size, [0] * group.world_size
    given_sizes[to], taken_sizes[source] = given_bytes, taken_bytes
    all_to_all(group, given, given_sizes, taken, taken_sizes, name)


def all_to_all(
    group: Group,
    given: torch.Tensor,
    given_sizes: Sequence[int],
    taken: torch.Tensor,
    taken_sizes: Sequence[int],
    name: bytes,
) -> None:
    """Exchanges parts of these sizes in bytes, one for each rank, placed as by `part_offsets`."""
    of_given = zip(part_offsets(given_sizes), given_sizes, strict=False)
    of_taken = zip(part_offsets(taken_sizes), taken_sizes, strict=False)
    given_parts = [each for offset, size in of_given for each in (offset, size)]
    taken_parts = [each for offset, size in of_taken for each in (offset, size, 0, 0)]
    kind = wire.ExchangeKind.ALL_TO_ALL
    _exchange(group, [given], taken, kind, given_parts, taken_parts, name)


def all_to_all_rows(group: Group, given: torch.Tensor, name: bytes) -> torch.Tensor:
    """Exchanges equal parts of dimension 0 of a contiguous tensor; results are in rank order."""
    if group.world_size == 1:
        return copied(given)
    taken, size = new_result(given, given.shape), given.nbytes // group.world_size
    offsets = [rank * size for rank in range(group.world_size)]
    given_parts = [each for offset in offsets for each in (offset, size)]
    taken_parts = [each for offset in offsets for each in (offset, size, 0, 0)]
    kind = wire.ExchangeKind.ALL_TO_ALL
    _exchange(group, [given], taken, kind, given_parts, taken_parts, name)
    return taken


def exchange_boxes(
    group: Group,
    packed: PackedBoxes,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: bytes,
) -> None:
    """Exchanges parts of tensors: see `BoxesCall`.

    Each part is copied into the slot and out of it (csrc/exchange/boxes.h).
    """
    strides = tuple([t.stride() for t in (*tensors, *outputs)])
    given, taken = _boxes_of(packed, strides, group.world_size)
    try:
        torch.ops.symm_cp.exchange_boxes.default(
            tensors, outputs, given, taken, packed.joins, name.decode(), group.name
        )
    except RuntimeError as error:
        raise reported(error) from None


@lru_cache(maxsize=128)
def _boxes_of(
    packed: PackedBoxes, strides: tuple[tuple[int, ...], ...], world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of the given and of the taken boxes; `strides` as in `PackedBoxes`."""
    room = wire.EXCHANGE_PIECE // world_size // wire.EXCHANGE_PART * wire.EXCHANGE_PART
    given, taken = packed.boxes(strides, room)
    return _bytes_of(given), _bytes_of(taken)


def _bytes_of(boxes: Sequence[PlacedBox]) -> torch.Tensor:
    with ordinary_tensors():
        if not boxes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        numbers = (wire.Box * len(boxes))(*[wire.Box(*box) for box in boxes])
        return torch.frombuffer(numbers, dtype=torch.uint8)


def _exchange(
    group: Group,
    given: Sequence[torch.Tensor],
    taken: torch.Tensor,
    kind: wire.ExchangeKind,
    given_parts: list[int],
    taken_parts: list[int],
    name: bytes,
    reduce_op: str = "",
) -> None:
    if in_test_mode() or apart_of(group, taken.device) is not None:
        parts = (given_parts, taken_parts)
        return process_group.exchange(group, given, taken, kind, *parts, name, reduce_op)
    try:
        torch.ops.symm_cp.exchange.default(
            given, taken, int(kind), given_parts, taken_parts, reduce_op, name.decode(), group.name
        )
    except RuntimeError as error:
        raise reported(error) from None


def traced(
    group: Group,
    kernel: str,
    name: bytes,
    run: Callable[[], T],
    index: int | None = None,
    *,
    before: bool = False,
) -> T:
    """Runs the work of a call after its last exchange, or `before` one, and records when.

    `index` is the rank whose data it is; by default this rank. Returns the result of `run`. Before
    an exchange the peers wait for it, or will: an error is reported to them.
    """
    before = before or kernel == "produce"
    try:
        if recorder.active is None or not has_epochs(group):
            return run()
        epoch = group.workspace("sync").epoch + before
        of, results = group.rank if index is None else index, list[T]()
        recorder.active.kernel(lambda _: results.append(run()), kernel, of, name, epoch)
        return results[0]
    except BaseException as error:  # Ctrl-C, too: the peers wait for this rank
        if before:
            group.refuse("sync", error)
        reported(error)
        raise


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Inside, the peers have completed the exchange, and need no report of an error."""
    try:
        yield
    except Exception as error:
        reported(error)
        raise
