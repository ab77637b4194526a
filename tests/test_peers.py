"""The mesh of a group's ranks: one of them gives up while it is made, and all meet again."""

from __future__ import annotations

import datetime
import os
import random
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.distributed_c10d import _get_process_group_store

from symm_cp.backend import native_backend
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.patience import patient

#: A rank that finds its peers waiting looks at the store less often.
POINTS = 24
LIMIT = 2.0
_times: Counter[tuple[int, int]] = Counter()


class Unreliable(dist.Store):
    """A store that is slow at one access, and fails at another; 0: at none."""

    def __init__(self, inner: dist.Store, *, slow_at: int, fails_at: int) -> None:
        super().__init__()
        self.inner, self.slow_at, self.fails_at, self.accesses = inner, slow_at, fails_at, 0

    def _count(self) -> None:
        self.accesses += 1
        if self.accesses == self.slow_at:
            time.sleep(0.1)
        if self.accesses == self.fails_at:
            raise RuntimeError("no luck with the store")

    def set(self, key: str, value: bytes | str) -> None:
        self._count()
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        return self.inner.get(key)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return self.inner.check(keys)


def meet(name: str) -> None:
    """A rendezvous, and a barrier in the memory that it made."""
    tensor = symm_mem.empty(16, device="cpu")
    handle = _SymmetricMemory.rendezvous(tensor, name)
    assert handle is not None
    handle.barrier()


@pytest.mark.parametrize(
    ("world_size", "quitter"),
    some((3, 1), of=[(w, q) for w in (2, 3, 4) for q in range(w)]),
)
@pytest.mark.ranks
def test_a_rank_gives_up_at_each_point(
    group: dist.ProcessGroup, world_size: int, quitter: int
) -> None:
    """One rank gives up at each of its steps: all are told, and the next rendezvous succeeds."""
    choose = random.Random(torch.initial_seed() + group.rank())
    # torch keeps a group's name until the process ends, and a process may run this again.
    time_of = _times[group.size(), quitter] = _times[group.size(), quitter] + 1
    for point in range(1, POINTS + 1):
        name = f"rank {quitter} of {group.size()} gives up at {point}, time {time_of}"
        store = Unreliable(
            dist.PrefixStore(name, _get_process_group_store(group)),
            slow_at=choose.randrange(10),
            fails_at=point if group.rank() == quitter else 0,
        )
        _SymmetricMemory.set_group_info(name, group.rank(), group.size(), store)
        begin = time.monotonic()
        try:
            meet(name)
            told = ""
        except RuntimeError as error:
            told = str(error)
        assert time.monotonic() - begin < patient(LIMIT), (point, told)
        meet(name)  # at once: others may still be in the one that was given up
        heard = [told] * group.size()
        dist.all_gather_object(heard, told, group=group)
        happened = heard[quitter] != ""
        for text in heard:
            assert ("no luck with the store" in text) == happened, (point, heard)


class Slow(Unreliable):
    """A store that takes `delay` for each access, and has a key only after a second."""

    def __init__(self, inner: dist.Store, *, delay: float, late: str) -> None:
        super().__init__(inner, slow_at=0, fails_at=0)
        self.delay, self.late, self.begin = delay, late, time.monotonic()

    def check(self, keys: list[str]) -> bool:
        time.sleep(self.delay)
        return (keys != [self.late] or time.monotonic() - self.begin > 1) and super().check(keys)


def leaves(group: dist.ProcessGroup, kind: str) -> str:
    """Rank 1 leaves once it has met all; rank 2 meets rank 0, or looks at rank 1, after that."""
    rank, timeout = group.rank(), datetime.timedelta(seconds=20)
    store: dist.Store = dist.PrefixStore("leaves", _get_process_group_store(group))
    if kind == "closes" and rank == 2:
        store = Slow(store, delay=0, late="symm_cp/peer/0")
    elif kind == "dies" and rank > 0:
        store = Slow(store, delay=0.05 if rank == 1 else 0.3, late="")
    made = native_backend(store, "leaves", rank, group.size(), timeout)
    if rank == 1 and kind == "dies":
        os._exit(0)
    return f"rank {made.rank()}"


@pytest.mark.parametrize("kind", ["closes", "dies"])
def test_a_rank_may_leave_once_it_has_met_all(ranks: Ranks, kind: str) -> None:
    """It has done its part, even if others do not know each other yet."""
    with ranks.own(3, leaves, kind) as running:
        outcomes = running.outcomes()
    for rank in (0, 2):
        assert outcomes[rank].result == f"rank {rank}", outcomes[rank]
