"""The native executor of exchanges, through `symm_cp_exchange`, against torch in one process."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from symm_cp import native
from symm_cp.group.memory import resolve
from symm_cp.native.wire import DType, ExchangeKind, ReduceOp
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some

PIECE = 512 << 10  # kPieceBytes of csrc/exchange/exchange.h
SYNC, ASYNC = 0, 1
CHANNELS = (SYNC, ASYNC)
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)
#: Elements of all parts: none, one, some that end anywhere, a piece and a bit, several pieces.
SIZES = (0, 1, 1003, PIECE // 4 + 1)
LARGE = (PIECE + 3, 3 * PIECE + 17)


def exchange(
    group: dist.ProcessGroup,
    kind: ExchangeKind,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    channel: int = SYNC,
    name: str = "exchange",
    op: ReduceOp = ReduceOp.SUM,
) -> None:
    def extents(tensors: Sequence[torch.Tensor]) -> tuple[object, object, int]:
        count = len(tensors)
        addresses = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * count)(*[tensor.nbytes for tensor in tensors])
        return addresses, sizes, count

    dtype = DType[str(inputs[0].dtype).removeprefix("torch.").upper()]
    head = resolve(group).handle, channel, kind, False, name.encode()
    library = native.load()
    if library.symm_cp_exchange(*head, *extents(inputs), *extents(outputs), dtype, op) < 0:
        raise RuntimeError(native.error())


def given(dtype: torch.dtype, rank: int, part: int, size: int) -> torch.Tensor:
    """A rank's input for a part, which all ranks can compute."""
    generator = torch.Generator().manual_seed(1 + rank * 64 + part * 8 + size * 1024)
    numbers = torch.randint(-128, 128, (size,), generator=generator, dtype=torch.int64)
    return (numbers / 16 if dtype.is_floating_point else numbers).to(dtype)


def reduced(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction in rank order and in the accumulator's type, rounded once."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype is torch.bfloat16 else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = torch.maximum(total, part) if op is ReduceOp.MAX else total + part
    return (total / len(parts) if op is ReduceOp.AVG else total).to(dtype)


def check_all_kinds(
    group: dist.ProcessGroup, channel: int, dtype: torch.dtype, size: int, op: ReduceOp
) -> None:
    rank, world_size = group.rank(), group.size()
    ranks = range(world_size)

    def run(kind: ExchangeKind, gives: Sequence[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        outputs = [torch.full_like(each, 77) for each in wanted]
        name = f"{kind.name} {dtype} {size}"
        exchange(group, kind, gives, outputs, channel=channel, name=name, op=op)
        for found, each in zip(outputs, wanted, strict=True):
            assert torch.equal(found, each), name

    # Parts of different sizes, some of them empty.
    lengths = [max(0, size // world_size + (part * 5 - 3 if size > 100 else 0)) for part in ranks]
    whole = [given(dtype, source, 0, size) for source in ranks]
    parts = [[given(dtype, source, part, lengths[part]) for part in ranks] for source in ranks]
    columns = [reduced([parts[source][part] for source in ranks], op) for part in ranks]
    empty = torch.empty(0, dtype=dtype)
    root = size % world_size
    run(ExchangeKind.ALL_GATHER, [whole[rank]], whole)
    run(
        ExchangeKind.ALL_GATHER,
        [whole[rank] if rank == root else empty],
        [whole[root] if source == root else empty for source in ranks],
    )
    run(ExchangeKind.ALL_REDUCE, [whole[rank]], [reduced(whole, op)])
    run(ExchangeKind.ALL_REDUCE, [whole[rank]], [reduced(whole, op) if rank == root else empty])
    run(ExchangeKind.TWO_SHOT_ALL_REDUCE, parts[rank], columns)
    run(ExchangeKind.REDUCE_SCATTER, parts[rank], [columns[rank]])

    def between(source: int, target: int) -> torch.Tensor:
        return given(dtype, source, target, (lengths[target] * (source + 1)) // world_size)

    run(
        ExchangeKind.ALL_TO_ALL,
        [between(rank, target) for target in ranks],
        [between(source, rank) for source in ranks],
    )


def run_cases(
    group: dist.ProcessGroup, cases: Sequence[tuple[int, torch.dtype, int, ReduceOp]]
) -> None:
    for case in cases:
        check_all_kinds(group, *case)


def all_cases(sizes: Sequence[int]) -> list[tuple[int, torch.dtype, int, ReduceOp]]:
    return [
        (channel, dtype, size, op)
        for channel, dtype, size in itertools.product(CHANNELS, DTYPES, sizes)
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)
        if op is not ReduceOp.AVG or dtype.is_floating_point
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results(ranks: Ranks, world_size: int) -> None:
    cases = random.sample(all_cases(SIZES), 8) + random.sample(all_cases(LARGE[:1]), 1)
    ranks.run(world_size, run_cases, cases)


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_results(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, run_cases, all_cases(SIZES))
    ranks.run(world_size, run_cases, random.sample(all_cases(LARGE), 12))


def check_good(group: dist.ProcessGroup, channel: int) -> None:
    check_all_kinds(group, channel, torch.float32, 10, ReduceOp.SUM)


def disagree_on_sizes(group: dist.ProcessGroup, channel: int) -> list[str]:
    rank, world_size, told = group.rank(), group.size(), []
    for size in (3, PIECE // 4):
        gives = [torch.ones(size)] * world_size
        takes = [torch.empty(size + 1 + rank) for _ in range(world_size)]
        with pytest.raises(RuntimeError, match="ranks disagree") as caught:
            exchange(group, ExchangeKind.ALL_TO_ALL, gives, takes, channel=channel, name="op")
        told.append(str(caught.value))
        check_good(group, channel)
    return told


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("world_size", some(3, of=[2, 3, 4]))
def test_sizes_that_disagree_are_named_on_all_ranks(
    ranks: Ranks, world_size: int, channel: int
) -> None:
    for told in ranks.run(world_size, disagree_on_sizes, channel):
        for size, message in zip((3, PIECE // 4), told, strict=True):
            assert f"gives {4 * size} bytes to rank " in message
            assert any(f", which takes {4 * (size + 1 + r)}" in message for r in range(world_size))


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
@pytest.mark.ranks
def test_ranks_that_make_different_calls_disagree(
    group: dist.ProcessGroup, world_size: int, channel: int
) -> None:
    rank, x = group.rank(), torch.ones(5)
    kind = ExchangeKind.ALL_REDUCE if rank == 0 else ExchangeKind.ALL_GATHER
    outputs = [torch.empty(5) for _ in range(1 if rank == 0 else group.size())]
    with pytest.raises(RuntimeError, match=r"ranks disagree: rank \d calls .*, rank \d calls "):
        exchange(group, kind, [x], outputs, channel=channel, name=kind.name)
    check_good(group, channel)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.ranks(2)
def test_more_pieces_than_a_call_can_have_are_refused(
    group: dist.ProcessGroup, channel: int
) -> None:
    limit = (1 << 14) * PIECE
    huge = torch.empty(1, dtype=torch.uint8).expand(limit + 1)  # its memory is never touched
    with pytest.raises(RuntimeError, match=f"there must be at most {limit} in one call"):
        exchange(group, ExchangeKind.ALL_REDUCE, [huge], [huge], channel=channel)
    check_good(group, channel)
