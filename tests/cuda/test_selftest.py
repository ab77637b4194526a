"""The self-test of groups on devices, over a simulated driver: what works, and what does not."""

from __future__ import annotations

import torch
import torch.distributed as dist

from symm_cp import memory
from symm_cp.devices import Signals, Verdict, selftest
from tests.cuda.simulated import simulation
from tests.pool import Ranks


def judged(group: dist.ProcessGroup) -> Verdict:
    with simulation() as device:
        return selftest.verdict(memory.resolve(group), device)


def test_all_works(ranks: Ranks) -> None:
    for verdict in ranks.run(3, judged):
        assert verdict.signals is Signals.STREAM
        assert verdict.batches
        assert not verdict.reason, verdict
        print(verdict)
