"""Hooks and windows of process groups; these tests are collected from torch 2.14 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.backend.common import shared
from tests.backend.faulty import told
from tests.exhaustive import some

if hasattr(dist.ProcessGroup, "register_pre_hook"):

    def hooked(group: dist.ProcessGroup) -> tuple[list[int], list[int], list[bool], torch.Tensor]:
        """Hooks see a blocking and an asynchronous call, and none after they are unregistered."""
        ours: Any = shared(group)
        x = torch.ones(3)
        before: list[int] = []
        after: list[int] = []
        without_work: list[bool] = []

        def note(call: Any) -> None:
            after.append(call.op_id)
            without_work.append(call.work is None)

        ours.register_pre_hook(7, lambda call: before.append(call.op_id))
        ours.register_post_hook(7, note)
        dist.all_reduce(x, group=ours)
        if (work := dist.all_reduce(x, group=ours, async_op=True)) is not None:
            work.wait()
        ours.unregister_pre_hook(7)
        ours.unregister_post_hook(7)
        dist.all_reduce(x, group=ours)
        return before, after, without_work, x

    @pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
    def test_hooks_see_calls_of_both_kinds(ranks: Ranks, world_size: int) -> None:
        for before, after, without_work, x in ranks.run(world_size, hooked):
            assert before == after
            assert len(set(before)) == 2
            assert without_work == [True, False]
            assert torch.equal(x, torch.full((3,), world_size**3.0))

    def refused(group: dist.ProcessGroup) -> list[str]:
        ours: Any = shared(group)
        assert not ours.supports_window
        return [told(ours.new_window), told(lambda: ours.register_abort_hook(7, print))]

    def test_windows_and_abort_hooks_are_refused(ranks: Ranks) -> None:
        """Torch refuses both in the backend's name; gloo does not support them either."""
        for window, hook in ranks.run(2, refused):
            assert "symm_cp does not support new_window" in window
            assert "symm_cp does not support registerAbortHook" in hook
