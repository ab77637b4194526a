"""A store that never answers, because a rank holds the lock of its file."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import symm_cp
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.patience import patient

TIMEOUT_MS = 500


def _op(group: dist.ProcessGroup) -> None:
    symm_cp.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 4), group=group)


def _rendezvous(group: dist.ProcessGroup) -> None:
    symm_mem.rendezvous(symm_mem.empty(16, device="cpu"), group)


def _backend(group: dist.ProcessGroup) -> None:
    symm_cp.backend.native_backend(
        dist.distributed_c10d._get_default_store(), "locked", group.rank(), group.size(),
        dist.distributed_c10d.timedelta(milliseconds=TIMEOUT_MS),
    )  # fmt: skip


CALLS = {call.__name__[1:]: call for call in (_op, _rendezvous, _backend)}


def while_locked(old: dist.ProcessGroup, path: Path, call: str) -> tuple[str, float]:
    """Rank 1 locks the file of the store and stays away; rank 0 makes its first call."""
    rank = old.rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    os.environ["SYMM_CP_TIMEOUT_MS"] = str(TIMEOUT_MS)
    dist.barrier()
    with path.open() as file:
        if rank == 1:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        begin, error = time.monotonic(), ""
        if rank == 0:
            try:
                CALLS[call](group)
            except RuntimeError as raised:
                error = str(raised)
        seconds = time.monotonic() - begin
        dist.barrier()
    return error, seconds


@pytest.mark.parametrize("call", some("op", of=CALLS))
def test_a_store_that_is_locked_ends_in_time(ranks: Ranks, tmp_path: Path, call: str) -> None:
    with ranks.own(2, while_locked, tmp_path / "store", call) as running:
        (error, seconds), _ = (outcome.result for outcome in running.outcomes())
    if call == "op":
        assert "all_gather_matmul: the group's" in error, error
    assert re.search(r"store did not answer within (0.5 s|500 ms)", error), error
    assert seconds < patient(TIMEOUT_MS / 1000 + 2)
