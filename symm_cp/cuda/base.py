"""Devices: streams, memory that peers can reach, and signals between ranks.

`Device` and `DeviceWorkspace` are abstract; README.md says what a new kind of device implements.

A workspace takes

    4096 * ceil(9 * 64 * W / 4096) + slots * 4096 * ceil(slot / 4096)   bytes per rank:

flags, then slots, as in memory.py. A group has one for each channel and device:

    "sync"   ops in the caller's stream. Two slots; flags grow from call to call.
    "async"  low-contention collectives, which outlive the call. Slots and flags as in "sync".

Calls captured into graphs, where epochs cannot change from replay to replay, use separate
workspaces: one for all graphs that share a memory pool of torch's, which are never replayed at the
same time. These have one slot, and flags that the waiter resets. Each captured call is
self-contained, so graphs may be replayed any number of times and in any order, as long as all ranks
replay dependent graphs in the same order.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from symm_cp import native
from symm_cp.group.liveness import share, wait_limit, watched_processes
from symm_cp.group.memory import Calls, Group, pages
from symm_cp.modes import ordinary_tensors
from symm_cp.native import wire
from symm_cp.runtime.recorder import Mark
from symm_cp.tensors.alignment import debug_offset

T = TypeVar("T")

#: The channel of the self-test's workspaces; the self-test itself limits their streams' waits.
TRIAL = "self-test"
#: Seconds for which a rank waits for its peers while they make such a workspace: less than for a
#: step of the self-test, so that ranks whose peer failed learn it within the step.
TRIAL_SECONDS = 20.0

_POLL = 1e-4  # seconds between polls of a stream; more delays the first call, less costs CPU


@dataclass(frozen=True)
class Verdict:
    """The features that a group may use on a device because they work on all of its ranks."""

    #: Whether streams copy to and from peers, signal them, and wait for their signals. If not, the
    #: ranks are treated as if they were on different hosts, and torch's kernels run for its ops.
    passed: bool = True
    #: Whether copies may be issued in batches; otherwise one after the other.
    batches: bool = True
    #: Whether calls may be captured into graphs.
    graphs: bool = True
    #: The features that do not work, and why; empty if all work.
    reason: str = ""
    #: The duration of the self-test, in seconds.
    seconds: float = 0.0


class Pending(Protocol):
    """Work on a stream that has not ended yet."""

    def wait(self) -> object:
        """Makes the current stream wait for it."""

    def query(self) -> bool:
        """Whether it has ended. Not in a capture."""


class Device(ABC):
    """The streams of one device, and the memory on it that peers can reach."""

    #: The type of its torch devices, and the key by which torch dispatches to kernels on them.
    torch_type: ClassVar[str]
    dispatch_key: ClassVar[str]
    #: A library that exports the functions listed in csrc/cuda/driver.h.
    driver: str
    #: Whether torch has kernels of its own for the ops of `torch.ops.symm_mem`.
    torch_has_kernels: ClassVar[bool] = False
    #: Whether Triton compiles the kernels of symm_cp/cuda/kernels for it.
    triton: ClassVar[bool] = False
    #: Whether calls can be captured into graphs.
    captures: ClassVar[bool] = False
    #: Whether it reaches ranks on other hosts, so that groups there need no process group.
    spans_hosts: ClassVar[bool] = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._idle_streams: list[int] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.torch_device})"

    @abstractmethod
    def streams(self, user: str) -> tuple[int, ...]:
        """The driver's handles of the streams of `lowering.LANES`: the caller's current one first.

        Each `user_of_streams` has its own other streams: background transfers delay nothing, and
        ranks may call two groups in different orders from two streams or threads.
        """

    @abstractmethod
    def launch(self, lane: str, user: str, kernel: Callable[[], object]) -> None:
        """Calls a function whose kernels go to the stream of a lane."""

    def launch_on(self, stream: int, kernel: Callable[[], object]) -> None:
        """Calls a function whose kernels go to a stream, given by the driver's handle."""
        with self.using(stream):
            kernel()

    @abstractmethod
    def mark(self, lane: str, user: str) -> Mark:
        """Records the time at which the stream of a lane reaches this point."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work on the device has ended."""

    @abstractmethod
    def copies_ended(self, user: str) -> Pending:
        """Returns the copies issued so far, as pending work."""

    @abstractmethod
    def workspace(
        self, group: Group, channel: str, slot_bytes: int, *, graph: bool, verdict: Verdict
    ) -> DeviceWorkspace:
        """Makes a workspace that uses the features that `verdict` allows. Collective."""

    @abstractmethod
    def is_symmetric(self, tensor: torch.Tensor, group: Group) -> bool:
        """Whether peers may be able to read a tensor where it lies."""

    def guard(self) -> AbstractContextManager[object]:
        """Makes this device the current one inside the `with` block."""
        return nullcontext()

    def attach(self) -> None:
        """Makes its context current in a thread that has none, before calls of the driver."""
        return

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    def user_of_streams(self, user: str) -> tuple[str, int]:
        """The key of the other lanes' streams; while it captures, a thread has its own streams."""
        return user, threading.get_ident() if self.capturing() else 0

    def capture_id(self) -> int:
        """Returns the number of the capture that the current stream is in; 0: not known."""
        stream = self.streams("sync")[0]
        number: int = native.load().symm_cp_capture_id(self.driver.encode(), stream)
        if number < 0:
            raise RuntimeError(f"symm_cp: {native.error()}")
        return number

    def graph_pool(self) -> Hashable:
        """Returns the memory pool of the graph that the current stream captures."""
        raise NotImplementedError(f"{self}: calls cannot be captured")

    def graph_pools(self) -> Collection[Hashable]:
        """Returns the memory pools in use; a pool leaves after its graphs and their memory."""
        raise NotImplementedError(f"{self}: calls cannot be captured")

    def failed(self) -> bool:
        """Whether an error has left the device unusable; freeing memory then ends the process."""
        stream = self.streams("sync")[1]
        return bool(native.load().symm_cp_stream_ended(self.driver.encode(), stream) < 0)

    def capture(self, stream: int, function: Callable[[], object]) -> Callable[[], object]:
        """Captures the work that a function puts on a stream into a graph; returns its replay."""
        raise NotImplementedError(f"{self}: calls cannot be captured")

    def borrow_stream(self) -> int:
        """Returns the driver's handle of a stream without other users; see `return_stream`."""
        if self._idle_streams:
            return self._idle_streams.pop()
        return self._open_stream()

    def return_stream(self, stream: int) -> None:
        """Takes back a stream of `borrow_stream` on which all work has ended.

        It stays open for the next borrower: when pinned memory is freed, torch records events on
        the streams that have used it, which on a destroyed stream crashes in the driver.
        """
        self._idle_streams.append(stream)

    def _open_stream(self) -> int:
        stream: int | None = native.load().symm_cp_stream_open(self.driver.encode())
        if not stream:
            raise RuntimeError(native.error())
        return stream

    def ended(self, stream: int) -> bool:
        """Whether all work on a stream has ended. Never waits; raises when the work failed."""
        state: int = native.load().symm_cp_stream_ended(self.driver.encode(), stream)
        if state < 0:
            raise RuntimeError(native.error())
        return state == 1

    def settle(self, seconds: float) -> None:
        """Waits until the current stream's work has ended; `RuntimeError` after `seconds`."""
        stream = self.streams("sync")[0]
        deadline = time.monotonic() + seconds
        while not self.ended(stream):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"symm_cp: the current stream of {self} has not come to an end within "
                    f"{seconds:g} s: something before this call hangs"
                )
            time.sleep(_POLL)

    def in_graph_tree(self) -> bool:
        """Whether `torch.compile(mode="reduce-overhead")` is warming up or capturing a graph."""
        return False

    def using(self, stream: int) -> AbstractContextManager[object]:
        """Makes a stream the current one inside the `with` block, by the driver's handle."""
        raise NotImplementedError(f"{self}: has no self-test, and no graphs of torch.compile")

    def keep(self, make: Callable[[], T]) -> T:
        """Returns the result of `make` for later calls: ordinary tensors, in no graph's memory.

        While torch warms a graph up, nothing that this thread allocates may survive the call.
        """
        if not self.in_graph_tree() or self.capturing():
            with ordinary_tensors():
                return make()
        stream = self.streams("sync")[0]

        def made() -> T:
            with self.guard(), self.using(stream), ordinary_tensors():
                return make()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self.in_this_context(made)).result()

    def in_this_context(self, function: Callable[[], T]) -> Callable[[], T]:
        """Returns a function that calls `function` in this thread's context from any thread.

        A new thread has no context, even if torch considers this device its current one.
        """
        library, driver = native.load(), self.driver.encode()
        context = library.symm_cp_context(driver)

        def call() -> T:
            if library.symm_cp_set_context(driver, context) < 0:
                raise RuntimeError(native.error())
            return function()

        return call

    def streams_can_wait(self) -> bool:
        """Whether its driver lets streams wait in symmetric memory (csrc/cuda/driver.h).

        Raises `RuntimeError` when the driver does not load.
        """
        library = native.load()
        version: int = library.symm_cp_driver_version(self.driver.encode())
        if version < 0:
            raise RuntimeError(f"symm_cp: {native.error()}")
        return version >= int(library.symm_cp_stream_signals_version())

    def polls(self) -> bool:
        """Whether the device has kernels that wait for streams, or that streams wait for."""
        return False

    def multiprocessors(self) -> int:
        """The number of tiles of a matmul that it computes at a time."""
        return 1

    def check_ranks(self, group: Group) -> None:
        """Raises `RuntimeError` on every rank if ranks share a device by mistake. Collective."""
        del group  # ranks may share other devices

    def verdict(self, group: Group) -> Verdict:
        """Returns the features that a group may use. Collective at the first call for a group."""
        return Verdict()


class DeviceWorkspace(Calls, ABC):
    """Memory of one channel of a group on a device. Not thread-safe: `Group.lock` serialises calls.

    `graph`: for calls that are captured.
    """

    def __init__(
        self,
        group: Group,
        device: Device,
        channel: str,
        slot_bytes: int,
        *,
        graph: bool,
        verdict: Verdict,
    ) -> None:
        self.device, self.channel = device, channel
        #: Whose streams the lanes of its calls are.
        self.user = f"{channel} {group.name}"
        self.rank, self.world_size = group.rank, group.world_size
        self.slots = 1 if graph else wire.SLOTS
        offset = debug_offset("slots", slot_bytes)
        self.slot_bytes = pages(slot_bytes) + offset
        flag_bytes = wire.flag_offset(len(wire.DEVICE_FLAGS), 0, self.world_size)
        self.header_bytes = pages(flag_bytes) + offset
        trial, seconds = channel == TRIAL, wait_limit(group).total_seconds()
        self.limit_ms = 0 if trial else int(seconds * 1000)
        #: Seconds for which ranks wait for each other while they make it.
        self.patience = min(seconds, TRIAL_SECONDS) if trial else seconds
        self.given_up = False
        #: Tensors of failed calls, whose streams may still use them.
        self.held: list[torch.Tensor] = []
        #: Transfers in the background that have not ended, or whose end was not noticed yet.
        self.transfers: deque[Any] = deque()
        # A function without declared types: checking types would take as long as the call.
        self._run = native.load()["symm_cp_streams_run"]
        nbytes = self.header_bytes + self.slots * self.slot_bytes
        self.memory, addresses = device.keep(lambda: self.allocate(group, nbytes))
        device.attach()
        self.handle = self._open(group, graph, addresses)
        self._close = weakref.finalize(self, native.load().symm_cp_streams_close, self.handle)
        self._close.atexit = False
        self.set_single_copies(single=not verdict.batches)
        self.memory[: self.header_bytes].zero_()
        one = wire.sent_offset(wire.CONSTANT_ONE, self.rank, self.world_size)
        self.memory[one : one + 4].view(torch.int32).fill_(1)
        if graph:
            # No peer has read this rank's slot before the first call.
            self.flags("done").fill_(1)
        device.settle(self.patience)
        # After this, all ranks have cleared their flags and peers may signal. Uses the store, since
        # it may not be known yet whether kernels of this device reach a peer.
        key = f"cleared/{device.torch_type}/{channel}/{int(graph)}"
        share(group, key, "", seconds=self.patience if trial else None)

    def free(self) -> None:
        """Frees the memory; may wait for all work on the device. No other call can follow."""
        self._close()
        self.handle = 0
        self.held.clear()
        del self.memory

    @abstractmethod
    def allocate(self, group: Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns this rank's memory, and the address here of each rank's. Collective.

        An address is 0 where a rank's memory is not mapped here.
        """

    def _open(self, group: Group, graph: bool, addresses: Sequence[int]) -> int:
        self.layout = wire.WorkspaceLayout(
            flags=0,
            flag_count=len(wire.DEVICE_FLAGS),
            records=0,  # only CPU workspaces have records
            slots=self.header_bytes,
            slot_bytes=self.slot_bytes,
            slot_count=self.slots,
        )
        handle: int | None = native.load().symm_cp_streams_open(
            self.device.driver.encode(),
            (ctypes.c_void_p * self.world_size)(*addresses),
            self.world_size,
            self.rank,
            ctypes.byref(self.layout),
            int(graph),
            events_needed(self.world_size, graph),
            group.name.encode(),
            self.limit_ms,
            (ctypes.c_int * self.world_size)(*watched_processes(group)),
        )
        if not handle:
            raise RuntimeError(native.error())
        return handle

    def issue(
        self,
        commands: ctypes.Array[wire.Command],
        operands: ctypes.Array[ctypes.c_void_p],
        lanes: ctypes.Array[ctypes.c_void_p],
        epoch: int,
        capturing: bool,
        call_name: bytes,
    ) -> None:
        """Puts commands on the streams of the lanes; raises `RuntimeError` when that fails."""
        here, count = ctypes.c_void_p(self.handle), len(commands)
        if self._run(here, commands, count, operands, lanes, epoch, capturing, call_name):
            raise RuntimeError(f"symm_cp: {native.error()}")

    @property
    def epoch(self) -> int:
        """The number of the last call."""
        number: int = native.load().symm_cp_streams_epoch(self.handle)
        return number

    @epoch.setter
    def epoch(self, number: int) -> None:
        native.load().symm_cp_streams_set_epoch(self.handle, number)

    def next_epoch(self) -> int:
        """Begins a call; every rank begins its calls in the same order."""
        number: int = native.load().symm_cp_streams_next_epoch(self.handle)
        return number

    def moved_to(self, stream: int) -> bool:
        """Whether the last call's caller stream was not `stream`; false before the first call."""
        return bool(native.load().symm_cp_streams_moved(self.handle, stream))

    def set_single_copies(self, *, single: bool) -> None:
        """Sets whether copies are issued one after the other from now on, or in batches."""
        native.load().symm_cp_streams_set_single_copies(self.handle, int(single))

    def give_up(self) -> None:
        """Notifies the peers after an error in the middle of a call; no other call can follow.

        Raises `RuntimeError` if it cannot notify them: then only their time-outs end their waits.
        """
        if self.slots == 1:  # for a graph: nothing runs before a replay
            return
        self.given_up = True
        if native.load().symm_cp_streams_give_up(self.handle) < 0:
            raise RuntimeError(f"symm_cp: the peers cannot be notified: {native.error()}")

    def ended(self) -> bool:
        """Whether streams no longer use the workspace; true if it was not given up."""
        return not self.given_up or native.load().symm_cp_streams_ended(self.handle) == 1

    def serves(self, slot_bytes: int) -> bool:
        """Whether a call with a slot of `slot_bytes` can be made."""
        return super().serves(slot_bytes) and not self.given_up

    def flags(self, name: str) -> torch.Tensor:
        """Returns each rank's flag `name` in this rank's memory, as int32."""
        flag = wire.DEVICE_FLAGS.index(name)
        first, end = (wire.flag_offset(f, 0, self.world_size) for f in (flag, flag + 1))
        return self.memory[first:end].view(torch.int32)[:: wire.FLAG_BYTES // 4]


def events_needed(world_size: int, graph: bool) -> int:
    """Returns the number of events of a call: begin, join, end, one for each flag to oneself.

    In a graph also one for each signal that steps of other lanes must not overtake.
    """
    return 3 + (6 if graph else 4) * world_size
