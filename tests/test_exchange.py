"""What the native executor of exchanges refuses; collectives and the backend show its results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from symm_cp import native
from symm_cp.group.memory import resolve
from symm_cp.native.wire import DType, ExchangeKind, ReduceOp
from symm_cp.testing import Ranks
from tests.exhaustive import some

PIECE = 512 << 10  # kPieceBytes of csrc/exchange/exchange.h
SYNC, ASYNC = 0, 1
CHANNELS = (SYNC, ASYNC)


def exchange(
    group: dist.ProcessGroup,
    kind: ExchangeKind,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    channel: int = SYNC,
    name: str = "exchange",
) -> None:
    def extents(tensors: Sequence[torch.Tensor]) -> tuple[object, object, int]:
        count = len(tensors)
        addresses = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * count)(*[tensor.nbytes for tensor in tensors])
        return addresses, sizes, count

    dtype = DType[str(inputs[0].dtype).removeprefix("torch.").upper()]
    head = resolve(group).handle, channel, kind, False, name.encode()
    run = native.load().symm_cp_exchange
    if run(*head, *extents(inputs), *extents(outputs), dtype, ReduceOp.SUM) < 0:
        raise RuntimeError(native.error())


def check_good(group: dist.ProcessGroup, channel: int) -> None:
    total = torch.empty(3)
    exchange(group, ExchangeKind.ALL_REDUCE, [torch.ones(3)], [total], channel=channel)
    assert total.tolist() == [group.size()] * 3


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
@pytest.mark.ranks(2)
def test_more_pieces_than_a_call_can_have_are_refused(
    group: dist.ProcessGroup, channel: int
) -> None:
    limit = (1 << 14) * PIECE
    huge = torch.empty(1, dtype=torch.uint8).expand(limit + 1)  # its memory is never touched
    with pytest.raises(RuntimeError, match=f"there must be at most {limit} in one call"):
        exchange(group, ExchangeKind.ALL_REDUCE, [huge], [huge], channel=channel)
    check_good(group, channel)
