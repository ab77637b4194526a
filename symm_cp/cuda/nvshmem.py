"""NVSHMEM: one-sided transfers between GPUs, even of different hosts, through nvshmem4py.

`init()` starts NVSHMEM on all ranks and allocates one piece of the symmetric heap, from which the
workspaces of groups are cut: allocating on that heap is collective over all ranks, making a group's
workspace only over the group. After `enable(group)` the group's ops on CUDA use NVSHMEM. Where all
peers' memory is mapped here, copies and signals are CUDA's (copy engines, stream signals);
otherwise, and on drivers whose streams cannot wait there, they are NVSHMEM's `get` and signal
operations, on the same streams.
"""

from __future__ import annotations

import ctypes
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import accelerators, native
from symm_cp.cuda.base import Device, DeviceWorkspace, Verdict
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.cuda.registry import choose
from symm_cp.cuda.workspaces import workspaces_of
from symm_cp.group.liveness import share_made
from symm_cp.group.memory import Group, GroupLike, pages, resolve
from symm_cp.native import wire


def library() -> tuple[Any, Any]:
    """Returns `nvshmem.core` and `nvshmem.bindings`; raises `RuntimeError` if they are missing."""
    try:
        return import_module("nvshmem.core"), import_module("nvshmem.bindings")
    except ImportError as error:
        raise RuntimeError(
            f"symm_cp.nvshmem: nvshmem4py is not usable here: {error}; on a machine with NVIDIA "
            "GPUs: pip install 'symm_cp[nvshmem]' (CUDA 12: nvshmem4py-cu12)"
        ) from error


@dataclass
class Heap:
    """A piece of the symmetric heap, of `memory.numel()` bytes on every rank."""

    core: Any
    bindings: Any
    memory: torch.Tensor
    #: The parts in use: (offset, bytes), in order of their offsets.
    taken: list[tuple[int, int]] = field(default_factory=list)

    def cut(self, nbytes: int) -> int:
        """Returns the offset of free bytes; raises `RuntimeError` when there are too few."""
        begin, wanted = 0, pages(nbytes)
        for place, (offset, size) in enumerate(self.taken):
            if offset - begin >= wanted:
                self.taken.insert(place, (begin, wanted))
                return begin
            begin = offset + size
        if self.memory.numel() - begin < wanted:
            raise RuntimeError(
                f"symm_cp.nvshmem: a workspace needs {wanted} bytes in a row, more than are free "
                f"in the heap of {self.memory.numel()} bytes: pass init() more heap_bytes"
            )
        self.taken.append((begin, wanted))
        return begin

    def give_back(self, offset: int) -> None:
        """Frees the bytes that `cut` reserved at an offset."""
        self.taken = [part for part in self.taken if part[0] != offset]


_heap: Heap | None = None


def init(heap_bytes: int = 1 << 30, *, device: torch.device | str | None = None) -> None:
    """Starts NVSHMEM on all ranks of the default process group. Collective.

    `heap_bytes` is the room for all workspaces of a rank; `device` is this rank's GPU, by default
    the current one. The unique id is exchanged through the process group's store. Raises
    `RuntimeError` when the package, the driver or the fabric is missing, or after an earlier
    `init()`.
    """
    global _heap
    if _heap is not None:
        raise RuntimeError("symm_cp.nvshmem: init() was called already; finalize() ends it")
    core, bindings = library()
    gpu = _torch_device(device)
    assert dist.group.WORLD is not None
    world = resolve(dist.group.WORLD)
    try:
        core.init(
            device=bind_gpu(gpu),
            uid=_unique_id(core, world),
            rank=world.rank,
            nranks=world.world_size,
            initializer_method="uid",
        )
        memory = core.bytetensor((heap_bytes,))
    except Exception as error:  # from nvshmem4py, cuda.core or the library's loader
        raise RuntimeError(
            f"symm_cp.nvshmem: NVSHMEM does not start: {type(error).__name__}: {error}; "
            "see symm-cp doctor"
        ) from error
    _heap = Heap(core, bindings, memory)


def _unique_id(core: Any, world: Group) -> Any:
    """Returns the id that rank 0 draws for this start of NVSHMEM. Collective."""

    def draw() -> str:
        return pickle.dumps(core.get_unique_id()).hex() if world.rank == 0 else ""

    return pickle.loads(bytes.fromhex(share_made(world, "nvshmem/id", draw)[0]))


def heap() -> Heap | None:
    """Returns the heap that `init()` allocated."""
    return _heap


def _torch_device(device: torch.device | str | None) -> torch.device:
    return accelerators.indexed(torch.device("cuda" if device is None else device))


def bind_gpu(device: torch.device) -> Any:
    """Makes a GPU current; returns its `cuda.core` device, which nvshmem4py takes."""
    gpu = import_module("cuda.core").Device(device.index)
    gpu.set_current()
    return gpu


def finalize() -> None:
    """Ends NVSHMEM; groups use torch's symmetric memory again. Collective."""
    global _heap
    if _heap is None:
        return
    for group in _enabled:
        choose(group, None)
        workspaces_of(group).current.clear()
    _enabled.clear()
    torch.cuda.synchronize()
    ended, _heap = _heap, None
    ended.core.free_tensor(ended.memory)
    ended.core.finalize()


_enabled: list[Group] = []


def enable(group: GroupLike, *, device: torch.device | str | None = None) -> None:
    """Makes the ops of a group on CUDA use NVSHMEM. Call it on all ranks of the group.

    `device` is this rank's GPU, which must be the GPU of `init()`. Raises `RuntimeError` before
    `init()`, and `ValueError` for another GPU.
    """
    if _heap is None:
        raise RuntimeError("symm_cp.nvshmem: enable() needs init() before it")
    gpu = _heap.memory.device
    if device is not None and _torch_device(device) != gpu:
        raise ValueError(
            f"symm_cp.nvshmem: enable() on {_torch_device(device)}, but init() was for {gpu}"
        )
    enabled = resolve(group)
    choose(enabled, NvshmemDevice(gpu, _heap))
    workspaces_of(enabled).current.clear()
    _enabled.append(enabled)


class NvshmemDevice(CudaDevice):
    """A CUDA device whose groups' workspaces lie on the symmetric heap."""

    captures = False
    spans_hosts = True

    def __init__(self, torch_device: torch.device, heap: Heap) -> None:
        super().__init__(torch_device)
        self._heap = heap

    def workspace(
        self, group: Group, channel: str, slot_bytes: int, *, graph: bool, verdict: Verdict
    ) -> DeviceWorkspace:
        """Makes a workspace; collective."""
        return NvshmemWorkspace(
            group, self, channel, slot_bytes, graph=graph, verdict=verdict, heap=self._heap
        )

    def verdict(self, group: Group) -> Verdict:
        """Returns that all features but graphs work: they do on NVSHMEM's heap without a test."""
        return Verdict(graphs=False)

    def is_symmetric(self, tensor: torch.Tensor, group: Group) -> bool:
        """Returns False: users' tensors do not lie on NVSHMEM's heap."""
        return False

    def capturing(self) -> bool:
        """Raises `NotImplementedError` while a CUDA graph is captured."""
        if torch.cuda.is_available() and super().capturing():
            raise NotImplementedError("symm_cp.nvshmem: ops are not captured into CUDA graphs")
        return False


class NvshmemWorkspace(DeviceWorkspace):
    """A workspace on the symmetric heap.

    `remote[r]` is the symmetric address of rank r's workspace, as passed to NVSHMEM.
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
        heap: Heap,
    ) -> None:
        self.heap = heap
        super().__init__(group, device, channel, slot_bytes, graph=graph, verdict=verdict)

    def allocate(self, group: Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Cuts this rank's memory from the heap; returns it, and each rank's address here."""
        heap = self.heap
        process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]
        # Offsets differ between ranks, which may be members of different groups.
        texts = share_made(group, f"nvshmem/{self.channel}", lambda: str(self._cut(nbytes)))
        offsets = [int(text) for text in texts]
        offset = offsets[group.rank]
        base = heap.memory.data_ptr()
        self.pes = [dist.get_global_rank(process_group, r) for r in range(group.world_size)]
        self.remote = [base + offset for offset in offsets]
        bases = [
            address if rank == group.rank else int(heap.bindings.ptr(address, pe))
            for rank, (address, pe) in enumerate(zip(self.remote, self.pes, strict=True))
        ]
        #: Every peer's memory is mapped here: copy engines reach it, and streams can wait there.
        self.direct = all(bases) and self.device.streams_can_wait()
        return heap.memory[offset : offset + nbytes], bases

    def _cut(self, nbytes: int) -> int:
        offset = self.heap.cut(nbytes)
        weakref.finalize(self, self.heap.give_back, offset).atexit = False
        return offset

    def issue(
        self,
        commands: ctypes.Array[wire.Command],
        operands: ctypes.Array[ctypes.c_void_p],
        lanes: ctypes.Array[ctypes.c_void_p],
        epoch: int,
        capturing: bool,
        call_name: bytes,
    ) -> None:
        """Puts commands on the streams of the lanes; NVSHMEM carries out commands to peers."""
        if self.direct:
            super().issue(commands, operands, lanes, epoch, capturing, call_name)
            return

        def issue_here(first: int, end: int) -> None:
            if first < end:
                part = (wire.Command * (end - first))(*commands[first:end])
                super(NvshmemWorkspace, self).issue(part, operands, lanes, epoch, False, call_name)

        first = 0
        for index, command in enumerate(commands):
            if not self._is_remote(command):
                continue
            issue_here(first, index)
            self._issue_remote(command, operands, lanes[command.lane] or 0, epoch, call_name)
            first = index + 1
        issue_here(first, len(commands))

    def _is_remote(self, command: wire.Command) -> bool:
        if command.kind in (wire.Kind.SIGNAL, wire.Kind.WAIT):
            return True
        return bool(command.kind == wire.Kind.COPY and command.remote)

    def _issue_remote(
        self,
        command: wire.Command,
        operands: ctypes.Array[ctypes.c_void_p],
        stream: int,
        epoch: int,
        call_name: bytes,
    ) -> None:
        bindings, peer = self.heap.bindings, command.peer
        if command.kind == wire.Kind.SIGNAL:
            place = wire.flag_offset(command.flag, self.rank, self.world_size)
            bindings.signal_op_on_stream(
                self.remote[peer] + place,
                epoch,
                self.heap.core.SignalOp.SIGNAL_SET,
                self.pes[peer],
                stream,
            )
        elif command.kind == wire.Kind.WAIT:
            place = wire.flag_offset(command.flag, peer, self.world_size)
            mine = self.remote[self.rank] + place
            at_least = self.heap.core.ComparisonType.CMP_GE
            needed = max(0, epoch - command.lag)
            expect = native.load().symm_cp_streams_expect
            expect(self.handle, peer, command.flag, needed, epoch, call_name)
            bindings.signal_wait_until_on_stream(mine, at_least, needed, stream)
        else:
            owner = command.source.index
            slot = self.layout.slot_offset(epoch) + command.source.offset
            to = (operands[command.to.index] or 0) + command.to.offset
            for row in range(command.rows):
                bindings.getmem_on_stream(
                    to + row * command.to_pitch,
                    self.remote[owner] + slot + row * command.from_pitch,
                    command.bytes,
                    self.pes[owner],
                    stream,
                )
