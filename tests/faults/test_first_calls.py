"""A group's first call under the caller's modes, while a peer is late: it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import symm_cp  # noqa: F401 (registers the ops)
from symm_cp.testing import Ranks

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
    """No transform serves the op: all ranks refuse the first call, and none tells of a death."""
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
    # In new processes: where ranks are is known to all groups after the first call of one.
    with ranks.own(2, first, make) as running:
        assert [outcome.failure for outcome in running.outcomes()] == ["", ""]
