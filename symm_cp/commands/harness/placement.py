"""Where two ranks run, by the time of a signal between them.

A signal takes 40 ns between two threads of a core, 240 ns between cores without a common cache (AMD
EPYC), and far longer if both ranks are on one processor. Virtual machines do not show where their
processors are, and may move them every few seconds; times of small exchanges differ by factors.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp import native
from symm_cp.ranks import quick_barrier

_ROUNDS, _BATCHES = 100, 15  # a measurement takes less than a millisecond
#: Signals that differ by this factor belong to two placements; within one they differ by a tenth.
_FACTOR = 2.0
#: Longer signals have waited for the scheduler.
_LONGEST_NS = 5000.0


class SignalTimer:
    """Times signals between ranks 0 and 1. Making and calling it are collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._last = group, 0
        self._word = symm_mem.empty(1, dtype=torch.int32, device="cpu").zero_()
        self._barrier = quick_barrier(group)
        handle = symm_mem.rendezvous(self._word, group)
        # The other ranks send no signals.
        peer = 1 - group.rank() if group.rank() < 2 <= group.size() else group.rank()
        self._theirs = handle.get_buffer(peer, (1,), torch.int32)
        self._barrier()

    def nanoseconds(self) -> float:
        """Returns the median time of a signal, identically on all ranks; 0 for one rank.

        Raises ``RuntimeError`` if a signal does not come within ten seconds.
        """
        batches = [0.0]
        if self._theirs.data_ptr() != self._word.data_ptr():
            self._barrier()
            batches = [self._batch() for _ in range(_BATCHES)]
        elif self._group.size() > 1:
            self._barrier()
        time = torch.tensor([statistics.median(batches)], dtype=torch.float64)
        dist.all_reduce(time, dist.ReduceOp.MAX, group=self._group)
        return float(time.item())

    def _batch(self) -> float:
        own, theirs = self._word.data_ptr(), self._theirs.data_ptr()
        nanoseconds = native.load().symm_cp_signal_time(own, theirs, self._last, _ROUNDS)
        if nanoseconds < 0:
            raise RuntimeError("signals between ranks 0 and 1: none came for 10 seconds")
        self._last += _ROUNDS
        return float(nanoseconds) / _ROUNDS


def placements(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Returns the signals of rows during which the ranks did not move, by placement, fastest first.

    A row has `signal_ns`: the time of a signal before the case and after it.
    """
    steady = [max(row["signal_ns"]) for row in rows if _is_steady(row["signal_ns"])]
    found: list[list[float]] = []
    for time in sorted(steady):
        if found and time < _FACTOR * found[-1][0]:
            found[-1].append(time)
        else:
            found.append([time])
    return found


def _is_steady(pair: Sequence[float]) -> bool:
    return 0 < max(pair) < min(_LONGEST_NS, _FACTOR * min(pair))


def described(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line that says in which placements the rows were measured."""
    seen = placements(rows)
    parts = [f"{each[0]:.0f} to {each[-1]:.0f} ns in {len(each)} cases" for each in seen]
    others = len(rows) - sum(map(len, seen))
    if others:
        parts.append(f"changed, or had to wait for a processor, in {others}")
    return f"a signal between ranks 0 and 1 took {', '.join(parts)}"
