"""Calls that wait for long say so once, on stderr."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed import _functional_collectives as funcol

import symm_cp
from symm_cp import native
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.patience import patient

OPS = torch.ops.symm_mem
SILENT_MS, LATE = 200, 0.8  # seconds by which rank 1 comes later


@contextlib.contextmanager
def stderr() -> Iterator[Callable[[], str]]:
    """Yields a function that returns what this process has written to stderr."""
    before = os.dup(2)
    before_ms = native.load().symm_cp_say_waits_after(SILENT_MS)
    with tempfile.TemporaryFile("w+") as written:
        os.dup2(written.fileno(), 2)

        def text() -> str:
            written.seek(0)
            return written.read()

        try:
            yield text
        finally:
            os.dup2(before, 2)
            os.close(before)
            native.load().symm_cp_say_waits_after(before_ms)


def fused(group: dist.ProcessGroup) -> None:
    symm_cp.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 4), group=group)


def collective(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(5), group=group)


def in_background(group: dist.ProcessGroup) -> None:
    funcol.wait_tensor(OPS._low_contention_all_gather(torch.ones(5), group.group_name))


def message(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        dist.recv(torch.empty(3), 1, group=group)
    else:
        dist.send(torch.ones(3), 0, group=group)


def rendezvous(group: dist.ProcessGroup) -> None:
    torch_symm_mem.rendezvous(torch_symm_mem.empty(4, device="cpu"), group.group_name)


def symmetric(group: dist.ProcessGroup) -> torch_symm_mem._SymmetricMemory:
    handle = torch_symm_mem.rendezvous(torch_symm_mem.empty(4, device="cpu"), group.group_name)
    assert handle is not None
    return handle


#: Calls in which rank 0 waits for rank 1, and words that it must say.
CALLS: dict[str, tuple[Callable[[dist.ProcessGroup], None], str, bool]] = {
    "fused": (fused, "all_gather_matmul", True),
    "first fused": (fused, "all_gather_matmul", False),
    "collective": (collective, "all_reduce", True),
    "first collective": (collective, "all_reduce", False),
    "background": (in_background, "all_gather", True),
    "message": (message, "recv from rank 1", True),
    "rendezvous": (rendezvous, "rendezvous", False),
}
#: Calls whose waits are torch's own, unless its backend is ours.
OF_TORCH = ("collective", "first collective", "message")


def late(group: dist.ProcessGroup, kind: str, backend: str | None) -> str:
    call, _, warm = CALLS[kind]
    own = dist.new_group([0, 1], backend=backend)
    assert own is not None
    if warm:
        call(own)
    dist.barrier(group)
    with stderr() as text:
        if own.rank() == 1:
            time.sleep(patient(LATE))
        call(own)
        return text()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, "symm_cp") for kind in CALLS]
    + [(kind, None) for kind in CALLS if kind not in OF_TORCH],
)
def test_a_rank_that_is_late(ranks: Ranks, kind: str, backend: str | None) -> None:
    waiting, coming = ranks.run(2, late, kind, backend)
    assert waiting.count("still waiting") == 1
    for words in ("rank 1", CALLS[kind][1], "group '", "so far", "symm-cp doctor"):
        assert words in waiting, words
    assert "still waiting" not in coming


def signals(group: dist.ProcessGroup) -> list[str]:
    handle = symmetric(group)
    said = []
    for op in ("barrier", "wait_signal"):
        dist.barrier(group)
        with stderr() as text:
            if group.rank() == 1:
                time.sleep(patient(LATE))
            if op == "barrier":
                handle.barrier(0)
            elif group.rank() == 0:
                handle.wait_signal(1, 1)
            else:
                handle.put_signal(0, 1)
            said.append(text())
    return said


def test_signals_that_come_late(ranks: Ranks) -> None:
    waiting, _ = ranks.run(2, signals)
    for op, text in zip(("barrier", "wait_signal"), waiting, strict=True):
        assert text.count("still waiting") == 1, text
        assert op in text
        assert "waiting for rank 1" in text


def crossed(group: dist.ProcessGroup) -> str:
    own = [dist.new_group([0, 1]) for _ in range(2)][group.rank()]
    memory.resolve(own).set_timeout(int(1000 * patient(1.5)))
    with stderr() as text:
        with pytest.raises(RuntimeError, match="rank"):
            fused(own)
        return text()


def test_crossed_groups(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks.run(2, crossed)):
        assert text.count("still waiting") == 1, text
        assert "all_gather_matmul" in text
        assert f"rank {1 - rank}" in text
