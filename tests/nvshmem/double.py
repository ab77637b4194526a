"""A stand-in for nvshmem4py that works: the heap is shared memory, streams are simulated ones.

It has the calls that symm_cp makes, with the arguments of nvshmem4py 0.4, records them, and checks
what NVSHMEM would: that addresses lie on the heap. `mapped` says which PEs' memory `ptr` gives.
"""

from __future__ import annotations

import ctypes
import enum
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.cuda.simulated import SimulatedDevice


class SignalOp(enum.IntEnum):
    """As `nvshmem.core.SignalOp`."""

    SIGNAL_SET = 9
    SIGNAL_ADD = 10


class ComparisonType(enum.IntEnum):
    """As `nvshmem.core.ComparisonType`."""

    CMP_EQ = 0
    CMP_GE = 5


#: The unique ids of all starts in this process.
_used: list[Any] = []


class Double:
    """Both `nvshmem.core` and `nvshmem.bindings`."""

    SignalOp, ComparisonType = SignalOp, ComparisonType

    def __init__(self, device: SimulatedDevice, mapped: Callable[[int, int], bool]) -> None:
        self.device, self.mapped = device, mapped
        self.calls: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()

    # --- nvshmem.core

    def get_unique_id(self) -> dict[str, str]:
        """Returns an id that can be pickled, a new one for each start."""
        return {"id": secrets.token_hex(8)}

    def init(
        self, *, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str
    ) -> None:
        """As `nvshmem.core.init`, for a unique id."""
        drawn: list[Any] = [None] * nranks
        dist.all_gather_object(drawn, uid)  # NVSHMEM would wait for all ranks with this id
        assert drawn == [uid] * nranks
        assert uid not in _used, "the id of an earlier start"
        _used.append(uid)
        assert initializer_method == "uid"
        self.rank, self.ranks = rank, nranks
        self.calls.append(("init", rank, nranks))

    def bytetensor(self, shape: tuple[int]) -> torch.Tensor:
        """The heap; collective over all PEs."""
        self.heap = symm_mem.empty(shape[0], dtype=torch.uint8, device="cpu")
        handle = symm_mem.rendezvous(self.heap, dist.group.WORLD)
        mine = handle.buffer_ptrs[self.rank]
        self.bases = [p + self.heap.data_ptr() - mine for p in handle.buffer_ptrs]
        return self.heap

    def free_tensor(self, tensor: torch.Tensor) -> None:
        """Frees the heap."""
        assert tensor is self.heap
        self.calls.append(("free",))

    def finalize(self) -> None:
        """Ends it."""
        self.calls.append(("finalize",))

    # --- nvshmem.bindings

    def _at(self, address: int, pe: int) -> int:
        offset = address - self.bases[self.rank]
        assert 0 <= offset < self.heap.numel(), "not a symmetric address"
        return self.bases[pe] + offset

    def _on(self, stream: int, work: Callable[[], None], *call: Any) -> None:
        with self.lock:
            self.calls.append((*call, "side" if stream else "current"))
        self.device.call(stream, work)

    def ptr(self, dest: int, pe: int) -> int:
        """The address here of a peer's memory, or 0."""
        return self._at(dest, pe) if self.mapped(self.rank, pe) else 0

    def getmem_on_stream(self, dest: int, source: int, nbytes: int, pe: int, stream: int) -> None:
        """Copies from a peer's heap."""
        there = self._at(source, pe)
        self._on(stream, lambda: ctypes.memmove(dest, there, nbytes) and None, "get", pe, nbytes)

    def signal_op_on_stream(self, at: int, value: int, op: int, pe: int, stream: int) -> None:
        """Sets a peer's 64-bit signal."""
        assert op == SignalOp.SIGNAL_SET
        word = ctypes.c_uint64.from_address(self._at(at, pe))

        def write() -> None:
            word.value = value

        self._on(stream, write, "signal", pe, value)

    def signal_wait_until_on_stream(self, at: int, cmp: int, value: int, stream: int) -> None:
        """Waits until a signal here is large enough."""
        assert cmp == ComparisonType.CMP_GE
        word = ctypes.c_uint64.from_address(self._at(at, self.rank))

        def wait() -> None:
            end = time.monotonic() + 30
            while word.value < value:
                assert time.monotonic() < end, "a signal was not there after 30 s"
                time.sleep(2e-5)

        self._on(stream, wait, "wait", value)
