"""Records a rank's accesses to symmetric memory: see races.py."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HIDDEN = (
    *(torch.__path__[0], np.__path__[0]),
    *(str(Path(__file__).parent.parent), os.__file__[:-5]),
)


class RendezvousBuffer(NamedTuple):
    """A rank's buffer of a rendezvous: the `number`-th of a group."""

    group: str
    number: int
    owner: int  # in the world


class Bytes(NamedTuple):
    """Bytes of a region: where they begin, and the layout of the tensor that they hold."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.begin + (last + 1) * self.item

    @property
    def dense(self) -> bool:
        """Whether there are no gaps."""
        return self.end - self.begin == math.prod(self.shape) * self.item

    def marked(self, begin: int, end: int) -> torch.Tensor:
        """Returns a mask of the region's bytes from `begin` to `end`: True for these bytes."""
        marks = torch.zeros(end - begin, dtype=torch.bool)
        for byte in range(self.item):
            strides = [stride * self.item for stride in self.strides]
            marks.as_strided(self.shape, strides, self.begin - begin + byte).fill_(True)
        return marks

    def meets(self, other: Bytes) -> bool:
        """Whether the two have a byte in common."""
        if self.end <= other.begin or other.end <= self.begin:
            return False
        if self.dense and other.dense:
            return True
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        return bool((self.marked(begin, end) & other.marked(begin, end)).any())


class Access(NamedTuple):
    """A read or write of an op, or possible reads until the `loan` ends (0: no loan)."""

    region: RendezvousBuffer
    bytes: Bytes
    write: bool
    what: str  # the op, and where it was called
    loan: int = 0


class Return(NamedTuple):
    """The end of a loan: another library's object that shared the memory is gone."""

    loan: int


class Meeting(NamedTuple):
    """Ranks wait for each other; with a root, all wait for it or (`to_root`) it waits for all."""

    key: tuple[object, ...]
    members: tuple[int, ...]
    root: int | None = None
    to_root: bool = False


class Put(NamedTuple):
    """A rank signals another; signals with a `value` count up, others end one wait each."""

    to: int
    key: tuple[object, ...]
    value: int | None = None
    slot: bool = False  # one signal at a time: the next one waits until this one was taken


class Wait(NamedTuple):
    """A rank waits for a signal of another."""

    source: int  # -1: any rank
    key: tuple[object, ...]
    value: int | None = None


Event = Access | Return | Meeting | Put | Wait
Log = list[Event]


# --- a rank's notes ----------------------------------------------------------------------------


def _place() -> str:
    """Returns the program's current line, outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _members(group_name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(_resolve_process_group(group_name)))


@dataclass
class _Memory:
    """A region, mapped into this process."""

    region: RendezvousBuffer
    address: int
    size: int


@dataclass
class _Notes:
    """The notes of this rank."""

    log: Log = field(default_factory=list)
    memory: list[_Memory] = field(default_factory=list)
    groups: dict[int, tuple[str, int]] = field(default_factory=dict)  # by id of the handle
    met: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # rendezvous by group
    handles: list[Any] = field(default_factory=list)  # kept alive, so that their ids stay unique
    loans: list[weakref.finalize] = field(default_factory=list)
    pads: list[tuple[range, str]] = field(default_factory=list)  # addresses, groups

    def learn(self, handle: Any, group_name: str) -> None:
        """Records the buffers of a rendezvous."""
        number = self.met[group_name]
        known = {(m.address, m.size, m.region.owner) for m in self.memory}
        pointers = list(zip(_members(group_name), handle.buffer_ptrs, strict=True))
        self.handles.append(handle)
        size = handle.signal_pad_size
        self.pads += [(range(p, p + size), group_name) for p in handle.signal_pad_ptrs]
        if all((p, handle.buffer_size, owner) in known for owner, p in pointers):
            found = next(m.region for m in self.memory if m.address == pointers[0][1])
            self.groups[id(handle)] = group_name, found.number
            return
        self.met[group_name] += 1
        self.groups[id(handle)] = group_name, number
        for owner, pointer in pointers:
            # Freed memory may be allocated again.
            self.memory = [m for m in self.memory if m.address != pointer]
            region = RendezvousBuffer(group_name, number, owner)
            self.memory.append(_Memory(region, pointer, handle.buffer_size))

    def find(self, tensor: torch.Tensor) -> tuple[RendezvousBuffer, Bytes] | None:
        """Returns the region that a tensor lies in, if any."""
        if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        for memory in self.memory:
            if memory.address <= address < memory.address + memory.size:
                strides, item = tuple(tensor.stride()), tensor.element_size()
                begin = address - memory.address
                return memory.region, Bytes(begin, tuple(tensor.shape), strides, item)
        return None

    def access(self, tensor: torch.Tensor, write: bool, what: str, owner: int = -1) -> None:
        """Notes an access to a tensor, or to the same bytes of the buffer of another rank."""
        found = self.find(tensor)
        if found is not None:
            region, part = found
            region = region if owner < 0 else region._replace(owner=owner)
            self.log.append(Access(region, part, write, what))

    def lend(self, tensor: torch.Tensor, what: str, borrower: Any) -> None:
        """Notes that a tensor may be read until `borrower`, which shares its memory, is freed."""
        found = self.find(tensor)
        if found is not None:
            number = len(self.loans) + 1
            self.log.append(Access(*found, False, what, number))
            self.loans.append(weakref.finalize(borrower, self.log.append, Return(number)))

    def of_group(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        """Returns the group that a tensor in symmetric memory, or a pad, was rendezvoused with."""
        found = self.find(tensor)
        address = tensor.data_ptr()
        of_pads = [group for pad, group in self.pads if address in pad]
        if found is not None:
            name = found[0].group
        elif of_pads:
            name = of_pads[-1]
        elif len(self.met) == 1:
            (name,) = self.met
        else:
            name = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        return name, _members(name)


# One-sided ops: True if they write the peer's bytes, False if they write this rank's.
_ONE_SIDED = {
    "nvshmem_put": True, "nvshmem_put_with_signal": True, "nvshmem_get": False,
    "nccl_put": True, "nccl_put_with_signal": True, "nccl_get": False,
}  # fmt: skip
_ROOTED = {"broadcast_": False, "scatter_": False, "reduce_": True, "gather_": True}
# Ops that read only the shape, dtype or place of a tensor.
_KINDS = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_READ_NOTHING = {
    *(f"{kind}_like" for kind in _KINDS),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("is_pinned", "_is_pinned", "is_same_size"),
}


class _Noting(TorchDispatchMode):
    """Notes what every op reads and writes, and which ops synchronise."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = (torch.Tensor, torch.nn.Parameter)
        if any(kind not in plain for kind in types):
            return NotImplemented  # the ops that a subclass calls are noted
        schema = func._schema
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        what = f"{func.namespace}.{schema.name.rpartition('::')[2]} at {_place()}"
        if func.namespace == "aten" and func._schema.name[6:] in _READ_NOTHING:
            return func(*args, **kwargs)
        if func.namespace == "symm_mem" and self._one_sided(func, given, what):
            return func(*args, **kwargs)
        meeting = self._meeting(func, given)
        is_view = bool(schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        if not is_view:
            self._note(schema, given, what, write=False)
        if meeting is not None:
            self.notes.log.append(meeting)
        if not is_view:
            self._note(schema, given, what, write=True)
        return func(*args, **kwargs)

    def _note(self, schema: Any, given: dict[str, Any], what: str, *, write: bool) -> None:
        for argument in schema.arguments:
            alias = argument.alias_info
            if (alias is not None and alias.is_write) != write:
                continue
            for tensor in tree_leaves(given.get(argument.name)):
                if isinstance(tensor, torch.Tensor):
                    self.notes.access(tensor, write, what)

    def _one_sided(self, func: Any, given: dict[str, Any], what: str) -> bool:
        name = func._schema.name.rpartition("::")[2]
        notes = self.notes
        if name in _ONE_SIDED:
            group, members = notes.of_group(given["tensor"])
            peer = members[given["peer"]]
            notes.access(given["tensor"], not _ONE_SIDED[name], what)
            notes.access(given["tensor"], _ONE_SIDED[name], what, peer)
            if "signal" in given:
                notes.log.append(Put(peer, ("value", group), given["signal"]))
            return True
        if name in ("nvshmem_wait_for_signal", "nccl_wait_for_signal"):
            group, members = notes.of_group(given["sigpad"])
            source = members[given["peer"]] if "peer" in given else -1
            notes.log.append(Wait(source, ("value", group), given["signal"]))
            return True
        if name in ("nccl_put_signal", "nccl_wait_signal"):  # ops on a handle, which is opaque here
            group, members = notes.of_group(given.get("src", torch.empty(0)))
            peer, key = members[given["peer"]], ("count", group)
            notes.log.append(Put(peer, key) if name == "nccl_put_signal" else Wait(peer, key))
            return True
        return False

    def _meeting(self, func: Any, given: dict[str, Any]) -> Event | None:
        name = func._schema.name.rpartition("::")[2]
        group = given.get("process_group", given.get("group_name"))
        if group is None or func.namespace not in ("c10d", "_c10d_functional", "symm_mem"):
            return None
        if not isinstance(group, str):
            group = str(dist.ProcessGroup.unbox(group).group_name)
        members = _members(group)
        if name in ("send", "recv_"):
            peer = members[given["dst" if name == "send" else "src"]]
            key = ("message", group, given["tag"])
            return Put(peer, key) if name == "send" else Wait(peer, key)
        if name == "recv_any_source_":
            return Wait(-1, ("message", group, given["tag"]))
        root = members[given["root_rank"]] if name in _ROOTED else None
        return Meeting(("collective", group), members, root, _ROOTED.get(name, False))


def _patched_handles(notes: _Notes) -> Iterator[Any]:
    """Yields patches that note calls of handles, which no dispatcher sees."""
    kind = torch_symm_mem._SymmetricMemory

    def patch(name: str, make: Callable[[Any], Any], static: bool = False) -> Any:
        made = make(getattr(kind, name))
        return mock.patch.object(kind, name, staticmethod(made) if static else made)

    def rendezvous(original: Any) -> Any:
        def call(tensor: torch.Tensor, group_name: Any = None) -> Any:
            handle = original(tensor, group_name)
            if handle is not None:
                notes.log.append(Meeting(("collective", str(group_name)), _members(group_name)))
                notes.learn(handle, str(group_name))
            return handle

        return call

    def barrier(original: Any) -> Any:
        def call(self: Any, channel: int = 0, timeout_ms: int = 0) -> None:
            group, number = notes.groups[id(self)]
            notes.log.append(Meeting(("barrier", group, number, channel), _members(group)))
            original(self, channel, timeout_ms)

        return call

    def put_signal(original: Any) -> Any:
        def call(self: Any, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
            group, number = notes.groups[id(self)]
            key = ("signal", group, number, channel)
            notes.log.append(Put(_members(group)[dst_rank], key, slot=True))
            original(self, dst_rank, channel, timeout_ms)

        return call

    def wait_signal(original: Any) -> Any:
        def call(self: Any, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
            group, number = notes.groups[id(self)]
            notes.log.append(Wait(_members(group)[src_rank], ("signal", group, number, channel)))
            original(self, src_rank, channel, timeout_ms)

        return call

    yield patch("rendezvous", rendezvous, static=True)
    yield patch("barrier", barrier)
    yield patch("put_signal", put_signal)
    yield patch("wait_signal", wait_signal)


def _printed(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the parts that a tensor's `repr` shows: if it is large, both ends of each axis."""
    options = torch._tensor_str.PRINT_OPTS
    parts, shown = [tensor], options.edgeitems
    if tensor.numel() > options.threshold:
        for axis, length in enumerate(tensor.shape):
            if length > 2 * shown:
                begins = [part.narrow(axis, 0, shown) for part in parts]
                parts = begins + [part.narrow(axis, length - shown, shown) for part in parts]
    return parts


def _patched_reads(notes: _Notes) -> Iterator[Any]:
    """Yields patches that note reads of tensors' memory that no dispatcher sees."""
    kind = torch.Tensor
    plain = (torch.Tensor, torch.nn.Parameter)

    def patch(name: str, make: Callable[[Any], Any]) -> Any:
        original = getattr(kind, name)
        made = make(original)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Subclasses read their data through plain tensors.
            return (made if type(self) in plain else original)(self, *args, **kwargs)

        return mock.patch.object(kind, name, functools.wraps(original)(call))

    def tolist(original: Any) -> Any:
        def call(self: Any) -> Any:
            notes.access(self, False, f"Tensor.tolist at {_place()}")
            return original(self)

        return call

    def to_text(original: Any) -> Any:
        def call(self: Any, **kwargs: Any) -> Any:
            for part in _printed(self.detach()) if notes.find(self) else []:
                notes.access(part, False, f"Tensor.__repr__ at {_place()}")
            return original(self, **kwargs)

        return call

    def numpy(original: Any) -> Any:  # Tensor.__array__ calls it
        def call(self: Any, **kwargs: Any) -> Any:
            array = original(self, **kwargs)
            what = f"Tensor.numpy at {_place()}"
            if array.__array_interface__["data"][0] == self.data_ptr():
                notes.lend(self, what, array)
            else:
                notes.access(self, False, what)  # copied (`force=True`)
            return array

        return call

    def dlpack(original: Any) -> Any:
        def call(self: Any, **kwargs: Any) -> Any:
            if self.requires_grad or notes.find(self) is None:
                return original(self, **kwargs)
            borrower = self.detach()  # kept alive by the capsule or its consumer
            capsule = original(borrower, **kwargs)
            notes.lend(self, f"Tensor.__dlpack__ at {_place()}", borrower)
            return capsule

        return call

    yield patch("tolist", tolist)
    yield patch("__repr__", to_text)
    yield patch("numpy", numpy)
    yield patch("__dlpack__", dlpack)


@contextmanager
def noting_accesses() -> Iterator[Log]:
    """Inside, notes this rank's accesses to symmetric memory: see `find_races`."""
    notes = _Notes()
    with contextlib.ExitStack() as stack:
        for patch in (*_patched_handles(notes), *_patched_reads(notes)):
            stack.enter_context(patch)
        stack.enter_context(_Noting(notes))
        stack.callback(lambda: [loan.detach() for loan in notes.loans])
        yield notes.log
