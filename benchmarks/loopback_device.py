"""One process as a rank whose peers are itself, with real streams, kernels and calls of the driver.

The workspace of each rank is this rank's own memory. The flags that a peer would raise there are
raised beforehand, so that each wait passes at once:

eager        Flags grow: a wait passes from the awaited number on (mod 2^32), so flags that are
             raised to 2^30 once pass in every call. What this rank signals to a peer lands in its
             own column of the flags, which nobody waits for.
in graphs    Waiters reset flags: each call raises them anew before it begins, by a kernel in the
             caller's stream, which becomes part of the graph.

In gathers each peer's shard is a copy of this rank's. In scatters, a peer's part for this rank is
the previous content of its slot: zeros after `forget_slots`.
"""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._C._distributed_c10d import _SymmetricMemory
from torch.testing._internal.distributed import fake_pg

import symm_cp
from symm_cp import cuda, native, tuning
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import liveness, memory
from symm_cp.group.hosts import APART
from symm_cp.native import wire

assert fake_pg is not None  # its import registers the backend "fake"

#: The value that growing flags are raised to: waits for calls 1 to 2^30 pass.
PASSED = 1 << 30
_MOST_RANKS = 64
# Made once like the verdict of a self-test: making it is not part of issuing an op.
_WORKS = cuda.Verdict()

# --- the group -------------------------------------------------------------------------------


def group_of(ranks: int, device: str = "cpu") -> dist.ProcessGroup:
    """Returns a group of which this process is rank 0, and whose other ranks do not exist.

    `device`: type of the tensors for which all ranks count as being on one host.
    """
    if not dist.is_initialized():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=_MOST_RANKS)
    group = dist.new_group(list(range(ranks)))
    known = memory.resolve(group)
    # Facts that ranks would exchange; no table of `symm-cp tune`.
    known.put(APART, {"cpu": None, device: None})
    known.put(liveness._PROCESSES, [-1] * ranks)
    with mock.patch.object(tuning, "parse_tuned", return_value={}):
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


# --- the driver ------------------------------------------------------------------------------

# Each function of the driver, timed. All parameters and results are numbers or pointers, and no
# function has more than nine: nine words are passed on, and a function ignores any beyond its own.
_SOURCE = """
#include <atomic>
#include <chrono>
#include <cstdint>
#include <dlfcn.h>
namespace {
using Word = uintptr_t;
using Function = Word (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word);
struct Timed {
  Function function;
  std::atomic<int64_t> calls, nanoseconds;
};
void* library = dlopen(PATH, RTLD_NOW | RTLD_LOCAL);
std::atomic<bool> timing{false};
int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
}  // namespace
#define FORWARD(name) \\
  static Timed timed_##name{reinterpret_cast<Function>(dlsym(library, #name)), {0}, {0}}; \\
  extern "C" int64_t name##_calls() { return timed_##name.calls.exchange(0); } \\
  extern "C" int64_t name##_nanoseconds() { return timed_##name.nanoseconds.exchange(0); } \\
  extern "C" Word name(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i) { \\
    if (!timing.load(std::memory_order_relaxed)) \\
      return timed_##name.function(a, b, c, d, e, f, g, h, i); \\
    const int64_t begin = now(); \\
    const Word result = timed_##name.function(a, b, c, d, e, f, g, h, i); \\
    timed_##name.nanoseconds += now() - begin; \\
    ++timed_##name.calls; \\
    return result; \\
  }
extern "C" void set_timing(int on) { timing = on != 0; }
"""


@cache
def driver_functions(names: str = r"cu[A-Z]\w+") -> tuple[str, ...]:
    """Returns the names of the driver's functions that csrc/cuda/driver.cpp looks up."""
    text = (native.source_dir() / "cuda/driver.cpp").read_text()
    return tuple(sorted(set(re.findall(f'"({names})"', text))))


def build_driver(folder: Path, name: str, source: str) -> str:
    """Compiles a library in C++ that stands in for the driver; returns its path."""
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(source)
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-o", str(library), str(path), "-ldl"]
    subprocess.run([*shlex.split(native.find_compiler()), *flags], check=True)
    return str(library)


class TimedDriver:
    """A library that forwards to the driver, and times each call when asked to."""

    def __init__(self, folder: Path, real: str) -> None:
        present = ctypes.CDLL(real)
        self._names = [name for name in driver_functions() if hasattr(present, name)]
        # Functions by which drivers that run on the CPU let calls of CPU tensors be recorded.
        hosted = (n for n in driver_functions(r"symm_cp_hosted_\w+") if hasattr(present, n))
        forwards = [f"FORWARD({name})" for name in (*self._names, *hosted)]
        source = _SOURCE.replace("PATH", f'"{real}"', 1)
        self.path = build_driver(folder, "timed", "\n".join([source, *forwards, ""]))
        self._library = ctypes.CDLL(self.path)
        for name in self._names:
            for what in ("calls", "nanoseconds"):
                getattr(self._library, f"{name}_{what}").restype = ctypes.c_int64

    def calls_of(self, call: Callable[[], object]) -> dict[str, tuple[int, float]]:
        """Returns how often each function is called meanwhile, by any thread, and microseconds."""
        self._counted()
        self._library.set_timing(1)
        try:
            call()
        finally:
            self._library.set_timing(0)
        return {name: (calls, us) for name, (calls, us) in self._counted().items() if calls}

    def _counted(self) -> dict[str, tuple[int, float]]:
        def number(name: str, what: str) -> int:
            return int(getattr(self._library, f"{name}_{what}")())

        return {n: (number(n, "calls"), number(n, "nanoseconds") / 1e3) for n in self._names}


# --- the device ------------------------------------------------------------------------------


def place_of(device: cuda.Device) -> torch.device:
    """Returns the torch device of its tensors: those on CPU have no index."""
    return torch.device("cpu") if device.torch_type == "cpu" else device.torch_device


class LoopbackWorkspace(cuda.DeviceWorkspace):
    """A workspace that every rank has at the same address, and whose waits pass."""

    def allocate(self, group: memory.Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Allocates as symmetric memory does, of which streams may treat flags differently."""
        place = place_of(self.device)
        memory = _SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, place)
        memory.zero_()
        return memory, [memory.data_ptr()] * self.world_size

    def next_epoch(self) -> int:
        """Begins a call, whose waits will pass."""
        graph = self.slots == 1
        if graph or self.epoch == 0:
            self._raise_flags(1 if graph else PASSED)
        return super().next_epoch()

    def _raise_flags(self, value: int) -> None:
        """Raises peers' flags, but not flags of this rank's copies or of ranks that gave up."""
        end = wire.flag_offset(len(wire.FLAGS), 0, self.world_size)
        self.memory[:end].view(torch.int32).fill_(value)
        if value == PASSED:
            self.flags("ready in place").fill_(value)

    def forget_slots(self) -> None:
        """Sets all slots to zero: what peers would have written adds nothing."""
        self.memory[self.header_bytes :].zero_()


class Loopback(cuda.Device):
    """A device with such workspaces; a mixin that precedes the device's class among the bases."""

    def verdict(self, group: memory.Group) -> cuda.Verdict:
        """Assumes that everything works: there are no peers for the self-test."""
        return _WORKS

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
        return LoopbackWorkspace(group, self, channel, slot_bytes, graph=graph, verdict=verdict)

    def is_symmetric(self, tensor: torch.Tensor, group: memory.Group) -> bool:
        """Returns False: no other rank maps the tensor."""
        return False


class LoopbackGpu(Loopback, CudaDevice):
    """A GPU whose peers are itself."""


def forget_slots(group: memory.Group) -> None:
    """Sets the slots of all of a group's workspaces to zero, if its peers are itself."""
    for workspace in cuda.workspaces_of(group).all():
        if isinstance(workspace, LoopbackWorkspace):
            workspace.forget_slots()


class _Handle:
    """A handle of torch's symmetric memory, in which all ranks' buffers are one."""

    def __init__(self, world_size: int, nbytes: int, device: torch.device) -> None:
        self.rank, self.world_size = 0, world_size
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for nobody."""

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """Returns a tensor over memory of a rank."""
        numbers = self._memory.view(dtype)
        return numbers.as_strided(sizes, torch.empty(sizes, device="meta").stride(), storage_offset)


@contextmanager
def _torchs_pipelines(device: torch.device) -> Iterator[None]:
    """Inside, torch's own pipelines run over memory of this rank, without barriers."""
    handles: dict[str, _Handle] = {}

    def workspace(group_name: str, min_size: int) -> _Handle:
        nbytes = -(-min_size // 16) * 16
        if group_name not in handles or handles[group_name]._memory.numel() < nbytes:
            ranks = dist.distributed_c10d._resolve_process_group(group_name).size()
            handles[group_name] = _Handle(ranks, nbytes, device)
        return handles[group_name]

    stubs: dict[str, Callable[..., object]] = {
        "get_symm_mem_workspace": workspace,
        "rendezvous": lambda *_, **__: None,
        "_should_use_multimem_all_gather_matmul": lambda *_, **__: False,
    }
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch_symm_mem, name, stub, create=True))
        yield


@contextmanager
def timed(device: cuda.Device) -> Iterator[TimedDriver]:
    """Inside, ops on a device's tensors run over a driver that is timed; in loopback if it is."""
    place = place_of(device)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        driver = TimedDriver(folder, device.driver)
        device.driver = driver.path
        if isinstance(device, Loopback):
            stack.enter_context(answered())
            stack.enter_context(_torchs_pipelines(place))
        stack.enter_context(cuda.replaced(place, device))
        if place.type == "cuda":
            stack.enter_context(symm_cp.override_cuda_ops())
        yield driver
