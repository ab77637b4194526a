"""Exchanges of whole tensors on CPU, each of them one native call: `symm_cp::exchange`.

On CPU nothing copies while a rank multiplies, so work shard by shard is never faster than one
exchange and one kernel (measured: 1.0 to 1.3 times the time). So ops exchange tensors of up to
`WHOLE_BYTES` at once; larger ones go through the patterns of `Runtime`, which need no memory for
the whole. Kernels call these functions, and plans (csrc/plan) replay them without Python.

`name` is the bytes that name the call in errors, and that ranks compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch

from symm_cp.group.memory import Group, reported
from symm_cp.native import wire
from symm_cp.runtime import recorder
from symm_cp.tensors.alignment import aligned
from symm_cp.tensors.results import contiguous, copied, new_result
from symm_cp.tensors.shards import Shape, Split

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
    given, taken = _gather_parts(split, tuple(shard.shape), shard.element_size(), group.rank)
    gathered = new_result(shard, split.whole_shape(shard.shape))
    kind = wire.ExchangeKind.ALL_GATHER
    _exchange(group, [contiguous(shard)], gathered, kind, given, taken, name)
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
    given = [each for pair in zip(accumulate((0, *sizes)), sizes, strict=False) for each in pair]
    out = new_result(parts, shapes[group.rank])
    taken = [0, sizes[group.rank], 0, 0]
    kind = wire.ExchangeKind.REDUCE_SCATTER
    _exchange(group, [parts], out, kind, given, taken, name, "avg" if mean else "sum")
    return out


def all_reduce_(group: Group, tensor: torch.Tensor, name: bytes, *, mean: bool) -> torch.Tensor:
    """Replaces a contiguous tensor by the sum over ranks; all ranks get the same bits."""
    if group.world_size > 1:
        kind, none = wire.ExchangeKind.ALL_REDUCE, list[int]()
        _exchange(group, [tensor], tensor, kind, none, none, name, "avg" if mean else "sum")
    return tensor


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
    try:
        torch.ops.symm_cp.exchange.default(
            given, taken, int(kind), given_parts, taken_parts, reduce_op, name.decode(), group.name
        )
    except RuntimeError as error:
        raise reported(error) from None


def traced(group: Group, kernel: str, name: bytes, run: Callable[[], None]) -> None:
    """Runs the work of a call before or after its exchange, and records when."""
    if recorder.active is None:
        run()
        return
    epoch = group.workspace("sync").epoch + (kernel == "produce")
    recorder.active.kernel(lambda _: run(), kernel, group.rank, name, epoch)
