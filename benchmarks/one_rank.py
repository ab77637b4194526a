"""One process as a rank of a group whose other ranks do not exist, for idle.py and loopback.py."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from symm_cp import cuda, native, tuning
from symm_cp.group import liveness, memory
from symm_cp.group.hosts import SPREADS, Hosts

assert fake_pg is not None  # its import registers the backend "fake"

_MOST_RANKS = 64

Call = Callable[[], object]


class _Shards(dict[str, str]):
    """A table of `symm-cp tune` where matmuls by shards are faster, as they are for large ones."""

    def get(self, key: str, default: object = None) -> str:
        return "shards"


def group_of(ranks: int, device: str = "cpu") -> dist.ProcessGroup:
    """Returns a group of which this process is rank 0, and whose other ranks do not exist.

    `device`: type of the tensors for which all ranks count as being on one host.
    """
    if not dist.is_initialized():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=_MOST_RANKS)
    group = dist.new_group(list(range(ranks)))
    known = memory.resolve(group)
    # Facts that ranks would exchange.
    on_one_host: dict[str, Hosts | None] = {"cpu": None, device: None}
    known.put(SPREADS, on_one_host)
    known.put(liveness._PROCESSES, [-1] * ranks)
    with mock.patch.object(tuning, "parse_tuned", return_value=_Shards()):
        tuning.tuned(known)
    return group


def _as_rank_0_says(
    group: memory.Group, store: dist.Store, keys: Sequence[str], **_: Any
) -> list[str]:
    return [store.get(keys[0]).decode()] * len(keys)


@contextmanager
def answered() -> Iterator[None]:
    """Inside, rank 0's answer stands for all ranks' entries in the store, so no call waits."""
    with ExitStack() as stack:
        for name, stub in {"generation": lambda group: "alone", "read": _as_rank_0_says}.items():
            stack.enter_context(mock.patch.object(liveness, name, stub))
        yield


@cache
def _works(signals: cuda.Signals) -> cuda.Verdict:
    """Cached like the verdict of a self-test: making it is not part of issuing an op."""
    return cuda.Verdict(signals)


class AloneDevice(cuda.Device):
    """A device with one rank; a mixin that precedes the device's class among the bases."""

    signals_by = cuda.Signals.STREAM
    workspaces: ClassVar[type[cuda.DeviceWorkspace]]

    def verdict(self, group: memory.Group) -> cuda.Verdict:
        """Assumes that everything works: there are no peers for the self-test."""
        return _works(self.signals_by)

    def workspace(
        self,
        group: memory.Group,
        channel: str,
        slot_bytes: int,
        *,
        graph: bool,
        verdict: cuda.Verdict,
    ) -> cuda.DeviceWorkspace:
        """Makes a workspace of this rank's memory alone."""
        return self.workspaces(group, self, channel, slot_bytes, graph=graph, verdict=verdict)

    def is_symmetric(self, tensor: torch.Tensor, group: memory.Group) -> bool:
        """Returns False: no other rank maps the tensor."""
        return False


@cache
def driver_functions() -> tuple[str, ...]:
    """Returns the names of the driver's functions that csrc/cuda/driver.cpp looks up."""
    text = (native.source_dir() / "cuda/driver.cpp").read_text()
    return tuple(sorted(set(re.findall(r'"(cu[A-Z]\w+)"', text))))


def build_driver(folder: Path, name: str, source: str) -> str:
    """Compiles a library in C++ that stands in for the driver; returns its path."""
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(source)
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-o", str(library), str(path), "-ldl"]
    subprocess.run([*shlex.split(native.find_compiler()), *flags], check=True)
    return str(library)


def gradient(out: torch.Tensor, inputs: list[torch.Tensor]) -> Call:
    """Returns a call of the backward pass that leads to `out`, which may be repeated."""
    ones = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, ones, retain_graph=True)
