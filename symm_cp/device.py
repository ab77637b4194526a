"""Devices with streams, and the workspaces of groups on them.

A workspace here is memory of torch's own symmetric memory for the device, of

    4096 * ceil(7 * 64 * W / 4096) + slots * 4096 * ceil(slot / 4096)   bytes a rank:

flags, then slots, as in memory.py. A group has one for each channel and device:

    "sync"   ops in the caller's stream. Two slots; flags grow from call to call.
    "async"  low-contention collectives, which outlive the call. Likewise.

and each of them twice: a second one is for calls that are captured into a CUDA graph, in which no
number can change. It has one slot, and flags that the waiter takes back. Each of its calls is
complete in itself, so graphs may be replayed in any order and any number, as long as all ranks do
it alike.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from symm_cp import env, native, wire
from symm_cp.alignment import debug_offset
from symm_cp.hosts import hosts_of, watched_processes
from symm_cp.memory import Calls, Group, GroupLike, pages, resolve
from symm_cp.modes import ordinary_tensors

#: Lanes of schedules: the caller's stream, and the one that drives the copy engines.
LANES = ("compute", "copy")

#: Gives a time in nanoseconds of the monotonic clock, once the device was synchronized.
Mark: TypeAlias = Callable[[], int]


class Device:
    """The streams of one CUDA device. Tests put a simulated driver in its place."""

    driver = "libcuda.so.1"
    #: Whether calls can be captured into CUDA graphs.
    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copy: dict[str, torch.cuda.Stream] = {}
        self._origin: tuple[torch.cuda.Event, int] | None = None

    def __repr__(self) -> str:
        return f"Device({self.device})"

    def copy_stream(self, channel: str) -> torch.cuda.Stream:
        """The stream of lane "copy": of high priority, so that it does not wait behind kernels.

        Each channel has its own: what is in the background does not hold up what is not.
        """
        if channel not in self._copy:
            self._copy[channel] = torch.cuda.Stream(self.device, priority=-1)
        return self._copy[channel]

    def streams(self, channel: str) -> tuple[int, int]:
        """The driver's handles of the streams of `LANES`."""
        current: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return current, self.copy_stream(channel).cuda_stream

    def launch(self, lane: str, channel: str, kernel: Callable[[], object]) -> None:
        """Calls a function whose kernels go to the stream of a lane."""
        if lane == "compute":
            kernel()
        else:
            with torch.cuda.stream(self.copy_stream(channel)):
                kernel()

    def mark(self, lane: str, channel: str) -> Mark:
        """Notes the time at which a lane comes here."""
        stream = self.copy_stream(channel) if lane != "compute" else torch.cuda.current_stream()
        if self._origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(stream)
            origin.synchronize()
            self._origin = origin, time.monotonic_ns()
        origin, zero = self._origin
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return lambda: zero + int(origin.elapsed_time(event) * 1e6)

    def guard(self) -> AbstractContextManager[Any]:
        """The device is the current one inside."""
        if torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Returns when all work has ended."""
        torch.cuda.synchronize(self.device)

    def used_by_copies(self, channel: str, *tensors: torch.Tensor) -> None:
        """Keeps the memory of tensors until the copy stream is done with what it has so far."""
        for tensor in tensors:
            tensor.record_stream(self.copy_stream(channel))

    def copies_ended(self, channel: str) -> Any:
        """Returns an event: its `wait()` makes the current stream wait for the copies so far."""
        event = torch.cuda.Event()
        event.record(self.copy_stream(channel))
        return event

    def signals_by_stream(self) -> bool:
        """Whether streams signal and wait by themselves; otherwise torch's kernels do."""
        return env.signals() == "stream"

    def workspace(
        self, group: Group, channel: str, slot_bytes: int, *, graph: bool
    ) -> DeviceWorkspace:
        """Makes a workspace; collective."""
        return DeviceWorkspace(group, self, channel, slot_bytes, graph=graph)

    def is_symmetric(self, tensor: torch.Tensor, group: Group) -> bool:
        """Whether a tensor was allocated as symmetric memory."""
        known = getattr(_SymmetricMemory, "is_symm_mem_tensor", None)
        return known is None or bool(known(tensor))


_devices: dict[torch.device, Device] = {}


def device_of(device: torch.device) -> Device:
    """Returns the `Device` of a torch device."""
    found = _devices.get(device)
    if found is None:
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        found = _devices.setdefault(device, Device(device))
    return found


def device_for(group: Group, device: torch.device) -> Device:
    """Returns the `Device` on which a group's ops run."""
    engine: Device | None = group.engine
    return engine if engine is not None and device.type != "cpu" else device_of(device)


class DeviceWorkspace(Calls):
    """Symmetric memory of one channel of a group on a device. Not for several threads at once."""

    def __init__(
        self, group: Group, device: Device, channel: str, slot_bytes: int, *, graph: bool
    ) -> None:
        self.device, self.channel = device, channel
        self.rank, self.world_size = group.rank, group.world_size
        self.slots = 1 if graph else wire.SLOTS
        offset = debug_offset("slots", slot_bytes)
        self.slot_bytes = pages(slot_bytes) + offset
        self._header = pages(wire.flag_offset(len(wire.DEVICE_FLAGS), 0, self.world_size)) + offset
        self.last_stream: int | None = None
        self.limit_ms = int(group.wait_limit().total_seconds() * 1000)
        self.given_up = False
        with ordinary_tensors():
            self.memory, bases = self._allocate(group, self._header + self.slots * self.slot_bytes)
        self.handle = self._open(group, graph, bases)
        weakref.finalize(self, native.load().symm_cp_streams_close, self.handle).atexit = False
        self._clear(group, graph)

    def _allocate(self, group: Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns this rank's memory, and where that of each rank is mapped."""
        memory = _SymmetricMemory.empty_strided_p2p(
            (nbytes,), [1], torch.uint8, self.device.device, group.name
        )
        self.torch_handle = _SymmetricMemory.rendezvous(memory, group.name)
        return memory, addresses_of(self.torch_handle, memory, self.rank)

    def _open(self, group: Group, graph: bool, bases: Sequence[int]) -> int:
        self.layout = wire.WorkspaceLayout(
            flags=0,
            flag_count=len(wire.DEVICE_FLAGS),
            records=0,  # of CPU workspaces only
            slots=self._header,
            slot_bytes=self.slot_bytes,
            slot_count=self.slots,
        )
        handle: int | None = native.load().symm_cp_streams_open(
            self.device.driver.encode(),
            (ctypes.c_void_p * self.world_size)(*bases),
            self.world_size,
            self.rank,
            ctypes.byref(self.layout),
            int(graph),
            events_needed(self.world_size),
            group.name.encode(),
            self.limit_ms,
            (ctypes.c_int * self.world_size)(*watched_processes(group)),
        )
        if not handle:
            raise RuntimeError(native.error())
        return handle

    def _clear(self, group: Group, graph: bool) -> None:
        self.memory[: self._header].zero_()
        done = wire.DEVICE_FLAGS.index("done")
        if graph and self.device.signals_by_stream():
            # Nobody has read this rank's slot before the first call.
            self.flags("done").fill_(1)
        # No peer signals before all have come here.
        self.torch_handle.barrier(timeout_ms=self.limit_ms)
        if graph and not self.device.signals_by_stream():
            for peer in range(self.world_size):
                if peer != self.rank:
                    self.torch_handle.put_signal(peer, done)
        self.device.synchronize()

    def issue(
        self,
        commands: ctypes.Array[wire.StreamCommand],
        operands: ctypes.Array[ctypes.c_void_p],
        lanes: ctypes.Array[ctypes.c_void_p],
        epoch: int,
        *,
        capturing: bool,
        what: bytes,
    ) -> None:
        """Puts commands on the streams of the lanes; raises `RuntimeError` when that fails."""
        run, count = native.load().symm_cp_streams_run, len(commands)
        if run(self.handle, commands, count, operands, lanes, epoch, int(capturing), what) < 0:
            raise RuntimeError(f"symm_cp: {native.error()}")

    def signal(self, flag: str, peer: int) -> None:
        """Signals a peer by a kernel of torch's, in the current stream."""
        self.torch_handle.put_signal(peer, wire.DEVICE_FLAGS.index(flag))

    def wait(self, flag: str, peer: int) -> None:
        """Waits for a peer's signal by a kernel of torch's, and takes it back."""
        self.torch_handle.wait_signal(peer, wire.DEVICE_FLAGS.index(flag), self.limit_ms)

    def give_up(self) -> None:
        """After an error in the middle of a call: tells the peers, and serves no other call."""
        if self.slots == 1:  # a graph's: nothing runs before it is replayed
            return
        native.load().symm_cp_streams_give_up(self.handle)
        self.given_up = True

    def serves(self, slot_bytes: int) -> bool:
        """Whether a call with a slot of so many bytes can be made."""
        return super().serves(slot_bytes) and not self.given_up

    def flags(self, name: str) -> torch.Tensor:
        """Returns a flag of each rank here, as int32."""
        flag = wire.DEVICE_FLAGS.index(name)
        first, end = (wire.flag_offset(f, 0, self.world_size) for f in (flag, flag + 1))
        return self.memory[first:end].view(torch.int32)[:: wire.FLAG_BYTES // 4]

    def slot(self, epoch: int, offset: int, nbytes: int) -> torch.Tensor:
        """Returns bytes of this rank's slot in call `epoch`."""
        begin = self.layout.slot_offset(epoch) + offset
        return self.memory[begin : begin + nbytes]


def events_needed(world_size: int) -> int:
    """The events of a call: begin and end, and those of the flags to oneself."""
    return 3 + 4 * world_size


def addresses_of(handle: Any, tensor: torch.Tensor, rank: int) -> list[int]:
    """Returns where the peers' counterparts of a rendezvoused tensor are mapped here."""
    bases: Sequence[int] = handle.buffer_ptrs
    offset = tensor.data_ptr() - bases[rank]
    return [base + offset for base in bases]


def is_whole(device: Device, tensor: torch.Tensor, group: Group) -> bool:
    """Whether a tensor is a whole allocation of symmetric memory, as far as this rank can tell.

    Of a part of one nothing tells whether it lies at the same place on all ranks.
    """
    return (
        tensor.is_contiguous()
        and device.is_symmetric(tensor, group)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def symmetric_addresses(tensor: torch.Tensor, group: Group) -> tuple[int, ...] | None:
    """Returns where the peers' counterparts of a tensor that `is_whole` are; None when none are.

    Collective when its memory was not rendezvoused with the group yet.
    """
    handle = _SymmetricMemory.rendezvous(tensor, group.name)
    return None if handle is None else tuple(addresses_of(handle, tensor, group.rank))


def workspace(group: Group, device: Device, channel: str, slot_bytes: int) -> DeviceWorkspace:
    """Returns the group's workspace of a channel, with slots of at least `slot_bytes`.

    Collective when it has to be made or to grow; every rank must ask for the same size. Raises
    `RuntimeError` when that would be in the middle of a capture.
    """
    capturing = device.capturing()
    return _workspace(group, device, channel, slot_bytes, graph=capturing, capturing=capturing)


def _workspace(
    group: Group, device: Device, channel: str, slot_bytes: int, *, graph: bool, capturing: bool
) -> DeviceWorkspace:
    key = (device.device, channel, graph, device.signals_by_stream())
    known: DeviceWorkspace | None = group.device_workspaces.get(key)
    if known is not None and known.serves(slot_bytes):
        return known
    if capturing:
        room = 0 if known is None else known.slot_bytes
        raise RuntimeError(
            f"symm_cp: this call needs a workspace of {slot_bytes} bytes and there is one of "
            f"{room}; none can be made while a CUDA graph is captured: call "
            f"symm_cp.reserve(group, {slot_bytes}, device={str(device.device)!r}) before"
        )
    wanted = max(slot_bytes, known.slot_bytes if known is not None else 0)
    if known is not None and (graph or known.given_up):
        # Graphs that were captured go on using it, or streams in the middle of a call.
        group.retained.append(known)
    fresh = device.workspace(group, channel, wanted, graph=graph)
    group.device_workspaces[key] = fresh
    return fresh


def reserve_on(group: Group, device: Device, slot_bytes: int) -> None:
    """Makes room in all workspaces for calls of up to `slot_bytes`. Collective."""
    with group.lock, device.guard():
        for channel in wire.CHANNELS:
            for graph in (False, True) if device.captures else (False,):
                _workspace(group, device, channel, slot_bytes, graph=graph, capturing=False)


def reserve(group: GroupLike, nbytes: int, *, device: torch.device | str = "cpu") -> None:
    """Makes room for ops whose shard takes up to `nbytes` bytes, so that none has to grow it later.

    `device` is that of the ops' tensors. On CUDA it also makes the workspaces that ops take while a
    CUDA graph is captured, which cannot be made then. Collective: call it with the same size on
    every rank of the group. Raises `ValueError` for a negative size.
    """
    if nbytes < 0:
        raise ValueError(f"reserve: {nbytes=} must not be negative")
    where, state = torch.device(device), resolve(group)
    if state.engine is None or where.type == "cpu":
        spread = hosts_of(state, where)
        state = state if spread is None else spread.local
    if where.type == "cpu":
        state.reserve(nbytes)
    else:
        reserve_on(state, device_for(state, where), nbytes)
