"""The pipeline of round trips, against the same work on whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from symm_cp.group.memory import resolve
from symm_cp.ops.heads.packing import HeadPart, HeadRanges, head_exchange
from symm_cp.runtime.round_trips import RoundTrip, Tensors, run_round_trips
from symm_cp.schedule import head_tail
from symm_cp.tensors.shards import Split
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import some

pytestmark = device.devices(*device.NAMES)


def part_of(ranges: HeadRanges, groups: int, index: int) -> HeadRanges:
    """One of several groups of each rank's heads."""
    found = []
    for begin, end in ranges:
        split = Split.nearly_equal(end - begin, groups)
        first = begin + split.start(index)
        found.append((first, first + split.sizes[index]))
    return tuple(found)


def pipelines(group: dist.ProcessGroup, groups: int, dtype: torch.dtype) -> None:
    W, rank = group.size(), group.rank()
    H, length = 2 * W + 1, 4 * W + 3
    layout, heads = head_tail(length, W), Split.nearly_equal(2 * W + 1, W)
    ranges = tuple((heads.start(r), heads.start(r) + heads.sizes[r]) for r in range(W))
    x, y = torch.randn(2, H, length, 6).to(dtype), torch.randn(2, H, length, 3).to(dtype)
    rows = torch.tensor(list(layout.positions(rank)))
    given = [x[:, :, rows], y[:, :, rows]]
    out = torch.full((2, H, len(rows), 3), torch.nan, dtype=dtype)
    worked: list[int] = []

    def step(index: int) -> RoundTrip:
        each = part_of(ranges, groups, index)
        parts = tuple(HeadPart(tuple(t.shape), dtype, layout, each) for t in (x, y))
        there = head_exchange(rank, True, parts)
        back = head_exchange(rank, False, parts[1:])

        def work(arrived: Tensors) -> Tensors:
            # Mixes all positions: wrong unless all of them have arrived, in order.
            worked.append(index)
            return [arrived[0].cumsum(2)[..., :3].flip(2) * arrived[1]]

        new = lambda: there.new_outputs(given)  # noqa: E731
        return RoundTrip(there, given, new, work, back, [out])

    mine = resolve(group)
    for _ in range(2):
        run_round_trips(mine, [step(i) for i in range(groups)], x.device, b"groups")
        want = (x.cumsum(2)[..., :3].flip(2) * y)[:, :, rows]
        torch.testing.assert_close(out, want)
        out.fill_(torch.nan)
    assert worked == [*range(groups)] * 2


@pytest.mark.parametrize("groups", some(1, 3, of=[1, 2, 3]))
@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
def test_groups_travel_one_after_the_other(ranks: Ranks, world_size: int, groups: int) -> None:
    ranks.run(world_size, pipelines, groups, torch.float32 if groups < 3 else torch.bfloat16)


def fails(group: dist.ProcessGroup) -> None:
    layout = head_tail(8, 2)
    each = tuple((r, r + 1) for r in range(2))
    parts = (HeadPart((1, 2, 8, 2), torch.float32, layout, each),)
    there, back = (head_exchange(group.rank(), way, parts) for way in (True, False))
    given, out = [torch.ones(1, 2, 4, 2)], [torch.ones(1, 2, 4, 2)]

    def work(arrived: Tensors) -> Tensors:
        if group.rank() == 1:
            raise ValueError("no work today")
        return arrived

    def one() -> RoundTrip:
        return RoundTrip(there, given, lambda: there.new_outputs(given), work, back, out)

    mine = resolve(group)
    with pytest.raises((ValueError, RuntimeError), match="no work today"):
        run_round_trips(mine, [one(), one()], torch.device("cpu"), b"f")


@device.devices("cpu")
def test_a_failure_of_the_work_reaches_the_peers(ranks: Ranks) -> None:
    ranks.run(2, fails)
