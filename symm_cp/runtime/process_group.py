"""The process group's own collectives, for groups whose ranks work apart and in torch's test mode.

`exchange` is what `symm_cp::exchange` is to ranks with common memory. Contributions travel as they
are and are added by their owner, in the order and the dtype of the native exchange: sums have the
bits that they have on one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.group.memory import Group, is_fake
from symm_cp.group.one_process import is_one_of_several, rank_of
from symm_cp.native import wire
from symm_cp.tensors.dtypes import as_bytes, real, wide
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split

_ops = torch.ops._c10d_functional


def all_gather(shard: torch.Tensor, split: Split, group_name: str) -> torch.Tensor:
    """All-gathers shards, rank r's of `split.sizes[r]` rows; `wait_tensor` waits for the result."""
    ranks = len(split.sizes)
    if split.is_equal:
        return _ops.all_gather_into_tensor(shard.contiguous(), ranks, group_name)
    # gloo's all-gather takes equal parts only. Here each rank sends its shard to every rank.
    copies = shard.repeat(ranks, *(1 for _ in shard.shape[1:]))
    sent = [shard.shape[0]] * ranks
    return _ops.all_to_all_single(copies, list(split.sizes), sent, group_name)


def reduce_scatter(
    whole: torch.Tensor, reduce_op: str, split: Split, group_name: str
) -> torch.Tensor:
    """Reduce-scatters a tensor, `split.sizes[r]` rows to rank r; `wait_tensor` waits for it."""
    ranks = len(split.sizes)
    if split.is_equal:
        return _ops.reduce_scatter_tensor(whole.contiguous(), reduce_op, ranks, group_name)
    # torch's op takes equal parts only: parts are padded to the length of the largest.
    padded = whole.new_zeros((ranks, *split.largest_shape(whole.shape)))
    for rank, size in enumerate(split.sizes):
        padded[rank, :size] = split.of(rank, whole)
    scattered = _ops.reduce_scatter_tensor(padded.flatten(0, 1), reduce_op, ranks, group_name)
    rank = rank_of(_resolve_process_group(group_name))  # type: ignore[arg-type]
    return scattered[: split.sizes[rank]]


def exchange(
    group: Group,
    given: Sequence[torch.Tensor],
    taken: torch.Tensor,
    kind: wire.ExchangeKind,
    given_parts: Sequence[int],
    taken_parts: Sequence[int],
    name: bytes,
    reduce_op: str,
) -> None:
    """Like `symm_cp::exchange` (csrc/plan/exchange_op.cpp). Collective."""
    if kind == wire.ExchangeKind.ALL_REDUCE:
        _all_reduce(group, given[0], taken, name, reduce_op)
        return
    sent = [
        data.narrow(0, begin if size else 0, size)  # an empty part may begin behind the end
        for data in map(as_bytes, given)
        for begin, size in _parts(given_parts, 2, len(given))
    ]
    places, into = list(_parts(taken_parts, 4)), as_bytes(taken)
    if kind == wire.ExchangeKind.REDUCE_SCATTER:
        sizes = [into.numel()] * group.world_size
        arrived = _all_to_all(group, sent, sizes, name).view(real(taken).dtype)
        first, *others = arrived.view(group.world_size, real(taken).numel())
        total = first.to(wide(arrived.dtype))
        for other in others:
            total.add_(other)
        total = total.div_(group.world_size) if reduce_op == "avg" else total
        real(taken).view(-1).copy_(total)
        return
    sizes = [size for _, size, _, _ in places]
    if kind == wire.ExchangeKind.ALL_TO_ALL:
        arrived = _all_to_all(group, sent, sizes, name)
    elif not any(sizes):
        return
    else:
        with _named(group, name):
            gathered = all_gather(torch.cat(sent), Split(tuple(sizes)), group.name)
            arrived = funcol.wait_tensor(gathered)
    for part, (begin, size, row, pitch) in zip(arrived.split(sizes), places, strict=True):
        if size > 0:
            shape, strides = (size // (row or size), row or size), (pitch or size, 1)
            into.as_strided(shape, strides, into.storage_offset() + begin).copy_(part.view(shape))


def _parts(numbers: Sequence[int], count: int, of: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields a part's offset, its size and so on; `of`: the parts are spread over tensors."""
    for at in range(0, len(numbers), count):
        begin, size, *rest = numbers[at : at + count]
        yield begin, size // of, *rest


def _all_reduce(
    group: Group, given: torch.Tensor, taken: torch.Tensor, name: bytes, reduce_op: str
) -> None:
    """Each rank sums a part, and all gather the parts."""
    numbers, rank = real(given).view(-1), group.rank
    lengths = Split.nearly_equal(numbers.numel(), group.world_size).sizes
    sizes = [length * numbers.itemsize for length in lengths]
    offsets = list(accumulate((0, *sizes)))[:-1]
    parts = [each for pair in zip(offsets, sizes, strict=True) for each in pair]
    own, kinds = new_result(numbers, (lengths[rank],)), wire.ExchangeKind
    exchange(group, [numbers], own, kinds.REDUCE_SCATTER, parts, [], name, reduce_op)
    places = [each for pair in zip(offsets, sizes, strict=True) for each in (*pair, 0, 0)]
    exchange(group, [own], taken, kinds.ALL_GATHER, [0, sizes[rank]], places, name, "")


def _all_to_all(
    group: Group, sent: Sequence[torch.Tensor], arriving: Sequence[int], call_name: bytes
) -> torch.Tensor:
    """Sends a part to each rank; returns theirs, of these sizes."""
    given, sizes = torch.cat(list(sent)), [part.numel() for part in sent]
    # torch's backend refuses to send nothing and receive something.
    if is_fake(group.name) and not is_one_of_several():
        return given.new_zeros(sum(arriving))
    with _named(group, call_name):
        started = _ops.all_to_all_single(given, list(arriving), sizes, group.name)
        return funcol.wait_tensor(started)


@contextmanager
def _named(group: Group, call_name: bytes) -> Iterator[None]:
    """Names the call in the errors of the process group, which does not know it."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{call_name.decode(errors='replace')}: on rank {group.rank} the collective of process "
            f"group {group.name!r} failed, perhaps because a rank has died: {error}"
        ) from error
