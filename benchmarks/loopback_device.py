"""A device on which each peer is this rank, with real streams, kernels and calls of the driver.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch._C._distributed_c10d import _SymmetricMemory

import symm_cp
from benchmarks.one_rank import AloneDevice, answered, build_driver, driver_functions
from symm_cp import cuda
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import memory
from symm_cp.native import wire

#: The value that growing flags are raised to: waits for calls 1 to 2^30 pass.
PASSED = 1 << 30

# Each function of the driver, timed. All parameters are numbers or pointers, and no function has
# more than nine: nine words are passed on, and a function ignores any beyond its own.
_SOURCE = """
#include <atomic>
#include <chrono>
#include <cstdint>
#include <dlfcn.h>
namespace {
using Word = uintptr_t;
using Function = int (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word);
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
  extern "C" int name(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i) { \\
    if (!timing.load(std::memory_order_relaxed)) \\
      return timed_##name.function(a, b, c, d, e, f, g, h, i); \\
    const int64_t begin = now(); \\
    const int result = timed_##name.function(a, b, c, d, e, f, g, h, i); \\
    timed_##name.nanoseconds += now() - begin; \\
    ++timed_##name.calls; \\
    return result; \\
  }
extern "C" void set_timing(int on) { timing = on != 0; }
"""


class TimedDriver:
    """A library that forwards to the driver, and times each call when asked to."""

    def __init__(self, folder: Path, real: str) -> None:
        present = ctypes.CDLL(real)
        self._names = [name for name in driver_functions() if hasattr(present, name)]
        forwards = [f"FORWARD({name})" for name in self._names]
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


class LoopbackWorkspace(cuda.DeviceWorkspace):
    """A workspace that every rank has at the same address, and whose waits pass."""

    def allocate(self, group: memory.Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Allocates as symmetric memory does, of which streams may treat flags differently."""
        device = self.device.torch_device
        memory = _SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, device)
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


class Loopback(AloneDevice):
    """A device with such workspaces; a mixin that precedes the device's class among the bases."""

    workspaces = LoopbackWorkspace


class LoopbackGpu(Loopback, CudaDevice):
    """A GPU whose peers are itself."""


def forget_slots(group: memory.Group) -> None:
    """Sets the slots of all of a group's workspaces to zero."""
    for workspace in cuda.workspaces_of(group).all():
        assert isinstance(workspace, LoopbackWorkspace)
        workspace.forget_slots()


@contextmanager
def loopback(device: Loopback) -> Iterator[TimedDriver]:
    """Inside, ops on a device's tensors run in loopback, over a driver that is timed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        driver = TimedDriver(folder, device.driver)
        device.driver = driver.path
        stack.enter_context(answered())
        stack.enter_context(cuda.replaced(device.torch_device, device))
        if device.torch_device.type == "cuda":
            stack.enter_context(symm_cp.override_cuda_ops())
        yield driver
