"""Ranks that find themselves on one processor: a wait sleeps, so that the kernel can move one."""

from __future__ import annotations

import os
import resource

import torch
import torch.distributed as dist

from symm_cp.testing import Ranks

_CALLS = 200


def sleeps_on_one_processor(group: dist.ProcessGroup) -> int:
    """Returns how often this rank has slept; yields and time slices that end do not count."""
    allowed = os.sched_getaffinity(0)
    one_shot, tensor = torch.ops.symm_mem.one_shot_all_reduce, torch.ones(1)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        for _ in range(3):  # the first calls tell the peer
            one_shot(tensor, "sum", group.group_name)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(_CALLS):
            assert one_shot(tensor, "sum", group.group_name).item() == group.size()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_wait_for_a_peer_on_this_processor_sleeps(ranks: Ranks) -> None:
    assert sum(ranks.run(2, sleeps_on_one_processor)) > _CALLS // 2
