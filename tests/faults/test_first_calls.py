"""A group's first call waits for a late peer, whatever modes the caller has set."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import symm_cp  # noqa: F401 (registers the ops)
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.faults import strange, strange_kinds
from tests.patience import patient

#: Long enough for the others to look for this rank, and to watch the link to it.
LATE = 0.5


def call(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered, _ = torch.ops.symm_mem.all_gather_kv(x, x, 0, group.group_name)
    return gathered.sum(0)


def plain(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return call(x, group)


def mapped(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.vmap(lambda row: call(row, group))(x.unsqueeze(0))[0]


def counted(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    with FlopCounterMode(display=False):
        return call(x, group)


def inference(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    with torch.inference_mode():
        return call(x, group)


def after_a_refusal(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The op does not support jvp: all ranks refuse the first call, and none reports a death."""
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda x: call(x, group), (x,), (x,))
    return call(x, group)


def first(group: dist.ProcessGroup, make: Callable[..., torch.Tensor]) -> None:
    dist.barrier(group)
    if group.rank() == group.size() - 1:
        time.sleep(LATE)
    x = torch.full((2, 3), 1.0 + group.rank())
    total = 2.0 * sum(range(1, group.size() + 1))
    assert make(x, group).tolist() == [total] * 3


@pytest.mark.parametrize("make", [plain, mapped, counted, inference, after_a_refusal])
def test_a_late_peer_is_not_a_dead_one(ranks: Ranks, make: Callable[..., torch.Tensor]) -> None:
    # In new processes: after the first call of one group, all groups know the ranks' hosts.
    with ranks.own(2, first, make) as running:
        assert [outcome.failure for outcome in running.outcomes()] == ["", ""]


OPS = sorted((*strange.RAW, *strange.ENTRY_POINTS))


@pytest.mark.parametrize("name", some(*OPS[::7], of=OPS))
@pytest.mark.ranks(2)
def test_a_refusal_waits_for_nobody(group: dist.ProcessGroup, name: str) -> None:
    """Rank 0 refuses the first call of a group, while the other has not come to it."""
    op = strange.ALL[name]
    # If the user names the hosts, a group does not learn them from another group.
    with mock.patch.dict(os.environ, {"SYMM_CP_HOST": "here"}):
        own = dist.new_group(list(range(group.size())))
        tensors = op.tensors(group.size())
        given = [x.clone() for x in tensors]
        if group.rank() == 0:
            given[0] = strange_kinds.MAKE["deleted"](given[0])
        else:
            dist.barrier(group)
        begin = time.monotonic()
        error = strange.called(op, given, own)
        assert time.monotonic() - begin < patient(2)
        if group.rank() == 0:
            dist.barrier(group)
        assert isinstance(error, Exception), error
        assert "storage" in str(error)
        after = strange.called(op, [x.clone() for x in tensors], own)
        assert isinstance(after, list), after


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.ranks(2)
def test_threads_make_the_first_calls(group: dist.ProcessGroup, count: int) -> None:
    """Threads make equal calls, so any thread's call may meet any of a peer's."""
    for _ in range(12):
        own = dist.new_group(list(range(group.size())), timeout=datetime.timedelta(seconds=30))
        ready = threading.Barrier(count)

        def work(own: dist.ProcessGroup = own, ready: threading.Barrier = ready) -> list[float]:
            ready.wait()
            return [call(torch.ones(2, 3), own).tolist() for _ in range(5)]

        with ThreadPoolExecutor(count) as pool:
            for found in [pool.submit(work) for _ in range(count)]:
                assert found.result() == [[2.0 * group.size()] * 3] * 5
