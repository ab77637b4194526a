"""Groups and their workspaces: the only place that defines how bytes are laid out.

A group has up to two workspaces for CPU tensors, one for each *channel*: `"sync"` for ops that run
in the calling thread, `"async"` for ops of a copy engine, so that both kinds may be in flight at
once. The calls of a channel are numbered 1, 2, 3, ... identically on every rank; refused calls
count as well. The calls of a workspace are also numbered from 1 (the *epoch*); call e uses slot
e % 2. A workspace takes

    4096 * ceil((5 * 64 * W + 2 * 192 + 8 * 256 + 2 * 64 * ceil(W / 8)) / 4096)
        + 2 * 4096 * ceil(slot / 4096)

bytes on each rank for a slot of `slot` bytes and W ranks: flags (a cache line for each name and
writer), records (the identity of each of the two calls in flight), the reasons of the last failed
calls, the bytes that the rank gives to each rank in the two calls, then the two slots. The slot is
as large as the largest call so far; a larger call replaces the workspace, which is collective but
happens inside an op that is collective anyway, with sizes that are equal on all ranks. The call
after `wire.LAST_CPU_EPOCH` replaces it, too. Returning memory is not collective.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group

from symm_cp import env, native
from symm_cp.group import one_process
from symm_cp.group.stores import TimedStore, wait_limit_of
from symm_cp.modes import ordinary_tensors
from symm_cp.native import wire
from symm_cp.tensors.alignment import debug_offset

T = TypeVar("T")
GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | str"


def pages(nbytes: int) -> int:
    """Returns a number of bytes, rounded up to whole pages."""
    return math.ceil(nbytes / wire.PAGE_BYTES) * wire.PAGE_BYTES


def workspace_bytes(world_size: int, slot_bytes: int) -> int:
    """Returns the bytes that a workspace takes on each rank (the formula above)."""
    nbytes: int = native.load().symm_cp_bytes_for(world_size, slot_bytes)
    return nbytes


def group_name(group: GroupLike) -> str:
    """Returns the name of a process group, of a 1-D device mesh's group, or of a group name.

    Raises `TypeError` for anything else and `ValueError` for a mesh of several dimensions.
    """
    if isinstance(group, str):
        return group
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: a device mesh must have one dimension, this one has {group.ndim}: "
                f"pick one, as in mesh['{(group.mesh_dim_names or ('tp',))[-1]}']"
            )
        return str(group.get_group().group_name)
    if group is None and not dist.is_initialized():  # as dist.group.WORLD is until then
        raise TypeError(
            "group is None, as dist.group.WORLD is before process groups exist: call "
            "torch.distributed.init_process_group first"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "group is GroupMember.NON_GROUP_MEMBER, as dist.new_group returns it on ranks that are "
            "no members: they must not call ops of the group"
        )
    raise TypeError(
        "group must be a ProcessGroup, a 1-D DeviceMesh or a group name, "
        f"not {type(group).__name__}"
    )


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a contiguous tensor over memory that its owner keeps alive."""
    count = math.prod(shape)
    with ordinary_tensors():
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(tuple(shape))


class Calls:
    """The calls of a workspace, one after the other, and the size of their slots."""

    slot_bytes: int
    epoch = 0

    def next_epoch(self) -> int:
        """Begins a call; every rank begins its calls in the same order."""
        self.epoch += 1
        return self.epoch

    def serves(self, slot_bytes: int) -> bool:
        """Whether a call with a slot of `slot_bytes` can be made."""
        return self.slot_bytes >= slot_bytes and self.epoch < wire.LAST_EPOCH


class Workspace:
    """Symmetric memory of one channel of a group, with two slots that its calls take in turn.

    The first call allocates the memory, and a call that needs more replaces it
    (csrc/channel/group.h). Not thread-safe: `Group.lock` serialises calls.
    """

    def __init__(self, group: Group, channel: str) -> None:
        self.handle = group.handle
        self._index = wire.CHANNELS.index(channel)
        self._library = native.load()

    @property
    def slot_bytes(self) -> int:
        """The size of a slot; 0 before the first call."""
        size: int = self._library.symm_cp_slot_bytes(self.handle, self._index)
        return size

    @property
    def nbytes(self) -> int:
        """The bytes of the workspace on each rank; 0 before the first call."""
        size: int = self._library.symm_cp_workspace_bytes(self.handle, self._index)
        return size

    @property
    def epoch(self) -> int:
        """The number of the last call that began in the present memory."""
        epoch: int = self._library.symm_cp_epoch(self.handle, self._index)
        return epoch

    def skip(self, calls: int) -> None:
        """Skips a number of calls as if they had been made. Collective. For tests."""
        self._library.symm_cp_skip(self.handle, self._index, calls)

    def renew(self) -> None:
        """Releases the memory; the next call allocates it anew. Collective. For tests."""
        self._library.symm_cp_move(self.handle, self._index, debug_offset("slots"))


E = TypeVar("E", bound=BaseException)


def reported(error: E) -> E:
    """Marks an error as already reported to the peers, and returns it."""
    with contextlib.suppress(AttributeError):  # a type whose objects take no attributes
        error._symm_cp_reported = True  # type: ignore[attr-defined]
    return error


def before_call(error: E) -> E:
    """Marks an interruption that comes before a call, which peers may be making; returns it."""
    error._symm_cp_before_call = True  # type: ignore[attr-defined]
    return error


def is_reported(error: BaseException) -> bool:
    """Whether an error was already reported to the peers."""
    return getattr(error, "_symm_cp_reported", False)


@dataclass(frozen=True, eq=False)
class StateKey(Generic[T]):
    """Names the state that one module has with each group; that module owns the key.

    `close` is called with the state when it is dropped, or when the process group is gone.
    """

    name: str
    close: Callable[[T], object] | None = None


class _CallLock:
    """The lock of a group's calls, which native calls take as well. Reentrant."""

    def __init__(self, group: Group) -> None:
        self._library = library = native.load()
        self._lock, self._unlock = library.symm_cp_lock, library.symm_cp_unlock
        self._handle = group.handle

    def __enter__(self) -> None:
        if self._lock(self._handle) < 0:
            raise reported(RuntimeError(native.error()))

    def enter_if_free(self) -> bool:
        """Takes the lock unless another thread has it; returns whether it did."""
        return bool(self._library.symm_cp_try_lock(self._handle))

    def __exit__(self, *_: object) -> None:
        self._unlock(self._handle)


class Group:
    """One process group: its workspaces for CPU tensors, and the states of other modules."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.name = str(process_group.group_name)
        self.rank: int = process_group.rank()
        self.world_size: int = process_group.size()
        self._process = os.getpid()
        self._library = native.load()
        # These raise for bad values; the native part treats a value that is no number as unset.
        env.read_messages()
        self.handle: int = self._library.symm_cp_group_open(
            self.name.encode(),
            self.rank,
            self.world_size,
            env.timeout_ms(),
            debug_offset("slots"),
        )
        if not self.handle:
            raise RuntimeError(native.error())
        # Freed with this object, not before: work in flight uses it. Not at exit: torch's own
        # memory may be gone by then, and the kernel frees everything anyway.
        weakref.finalize(self, self._library.symm_cp_group_close, self.handle).atexit = False
        # Ops of several threads on one group take turns; each group has its own lock.
        self.lock = _CallLock(self)
        self._workspaces = {channel: Workspace(self, channel) for channel in wire.CHANNELS}
        self._states: dict[StateKey[Any], Any] = {}
        for prepare in on_creation:
            prepare(self)

    def state(self, key: StateKey[T], make: Callable[[], T]) -> T:
        """Returns the state under a key; makes it at the first call. Not collective."""
        state: T | None = self._states.get(key)
        return self._states.setdefault(key, make()) if state is None else state

    def find(self, key: StateKey[T]) -> T | None:
        """Returns the state under a key, or None."""
        return self._states.get(key)

    def put(self, key: StateKey[T], state: T) -> None:
        """Sets the state under a key. Does not close the previous one."""
        self._states[key] = state

    def drop(self, key: StateKey[T]) -> None:
        """Closes and forgets the state under a key, if any."""
        state = self._states.pop(key, None)
        if state is not None and key.close is not None:
            key.close(state)

    def own_lock(self) -> _CallLock:
        """Returns the lock of the group's calls.

        Raises `RuntimeError` in a process that was forked from this rank.
        """
        if os.getpid() != self._process:
            raise reported(
                RuntimeError(
                    f"symm_cp: this process was forked from rank {self.rank} of group "
                    f"{self.name!r} and is no rank of it: call ops of the group in the parent "
                    "process only"
                )
            )
        return self.lock

    def store(self) -> TimedStore:
        """Returns the group's key-value store."""
        process_group = _resolve_process_group(self.name)  # type: ignore[arg-type]
        return TimedStore(_get_process_group_store(process_group), wait_limit_of(process_group))

    def set_timeout(self, milliseconds: int) -> None:
        """Sets how long later calls wait for their peers. For tests."""
        self._library.symm_cp_set_timeout(self.handle, milliseconds)

    def timed_out(self, why: str) -> None:
        """Makes the group refuse later calls, on this rank and its peers."""
        self._library.symm_cp_timed_out(self.handle, why.encode())

    def workspace(self, channel: str) -> Workspace:
        """Returns the workspace of a channel."""
        return self._workspaces[channel]

    def reserve(self, slot_bytes: int, channels: Sequence[str] = wire.CHANNELS) -> None:
        """Sizes workspaces for calls of up to `slot_bytes`. Collective where they have to grow."""
        with self.own_lock():
            for channel in channels:
                index = wire.CHANNELS.index(channel)
                if self._library.symm_cp_reserve(self.handle, index, slot_bytes) < 0:
                    raise reported(RuntimeError(native.error()))

    def refuse(self, channel: str, error: BaseException) -> None:
        """Reports to the peers that this rank does not make the call that they may be making now.

        Does nothing when the error was already reported to them. Never waits.
        """
        if is_reported(error) or self.world_size == 1:
            return
        with self.own_lock():
            self._library.symm_cp_refuse(
                self.handle, wire.CHANNELS.index(channel), _reason(self, error)
            )

    def close(self) -> None:
        """Drops all states, the latest first; runs when the process group is gone."""
        for key in reversed(list(self._states)):
            self.drop(key)
        self._library.symm_cp_release_groups()


class _FakeGroup(Group):
    """A group of torch's backend "fake", which exchanges nothing, or whose ranks are threads."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = weakref.ref(process_group)
        super().__init__(process_group)

    @property  # type: ignore[override]
    def rank(self) -> int:
        """The rank of this process, or of this thread."""
        process_group = self._process_group()
        assert process_group is not None
        return one_process.rank_of(process_group)

    @rank.setter
    def rank(self, rank: int) -> None:
        pass

    @property  # type: ignore[override]
    def lock(self) -> contextlib.AbstractContextManager[None]:
        """No lock: threads that are ranks wait for each other."""
        return contextlib.nullcontext()

    @lock.setter
    def lock(self, lock: object) -> None:
        pass

    def refuse(self, channel: str, error: BaseException) -> None:
        """Does nothing: no peer waits, or all have ended."""


def _reason(group: Group, error: BaseException) -> bytes:
    """Returns the text of an error on this rank for its peers."""
    return f"{type(error).__name__} on rank {group.rank}: {error}".encode()


#: Called with every new group; not collective.
on_creation: list[Callable[[Group], object]] = []

#: Called when a group is first used, by any op; not collective. These functions write facts about
#: this rank that peers may need to the group's store.
on_first_use: list[Callable[[Group], object]] = []

_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], Group]] = {}
_making = threading.RLock()  # threads that use a group first at once must make one object


def _forget(name: str, group: Group) -> None:
    known = _groups.get(name)
    if known is not None and known[1] is group:
        del _groups[name]
    group.close()


@contextlib.contextmanager
def calls_paused(groups: Sequence[Group]) -> Iterator[bool]:
    """Holds the locks of groups, so that no other thread begins a call of them.

    Yields False, and holds none, if another thread is in a call. Never waits.
    """
    with contextlib.ExitStack() as held:
        for group in groups:
            if isinstance(group.lock, _CallLock):
                if not group.lock.enter_if_free():
                    held.close()
                    yield False
                    return
                held.push(group.lock)
        yield True


def unknown_group(group: GroupLike) -> ValueError:
    """Returns the error for a group that was destroyed, or a name that no process group has."""
    if isinstance(group, str):
        return ValueError(f"group: there is no process group named {group!r}")
    return ValueError(f"group: process group {group_name(group)!r} was destroyed")


def resolve(group: GroupLike) -> Group:
    """Returns the `Group` of a process group, 1-D mesh or group name.

    Not collective. Raises `ValueError` when no process group has that name.
    """
    name = group if isinstance(group, str) else group_name(group)
    known = _groups.get(name)
    try:
        process_group = _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise unknown_group(group) from error
    # Another group may have had the same name before, so the objects are compared.
    if known is not None and known[0]() is process_group:
        return known[1]
    with _making:
        known = _groups.get(name)
        if known is not None and known[0]() is process_group:
            return known[1]
        new_group = (_FakeGroup if is_fake(name) else Group)(process_group)
        _groups[name] = (weakref.ref(process_group), new_group)
    try:
        # If torch made the group, it has a store.
        if process_group in dist.distributed_c10d._world.pg_map and not is_fake(name):
            for publish in on_first_use:
                publish(new_group)
    except BaseException:
        _forget(name, new_group)
        raise
    weakref.finalize(process_group, _forget, name, new_group).atexit = False
    return new_group


def is_fake(group_name: str) -> bool:
    """Whether a group exchanges nothing: torch's backend "fake", of one process."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return dist.distributed_c10d._world.pg_map.get(group, ("",))[0] == "fake"


def get_workspace(group: GroupLike, nbytes: int, *, channel: str = "sync") -> Workspace:
    """Returns the group's workspace of a channel, with slots of at least `nbytes` bytes.

    Collective when the workspace has to grow: call it with the same size on every rank. It is
    released with the group. Raises `ValueError` for an unknown channel or a negative size.
    """
    if channel not in wire.CHANNELS:
        raise ValueError(f"get_workspace: {channel=} must be one of {wire.CHANNELS}")
    if nbytes < 0:
        raise ValueError(f"get_workspace: {nbytes=} must not be negative")
    resolved = resolve(group)
    resolved.reserve(nbytes, (channel,))
    return resolved.workspace(channel)


def symmetric_place(tensor: torch.Tensor, group: Group) -> tuple[int, int] | None:
    """Returns where a tensor lies in symmetric memory that was rendezvoused with the group.

    This is the number of the rendezvous and the offset in that memory; None for other memory.
    """
    place = (ctypes.c_int64 * 2)()
    found = native.load().symm_cp_symmetric_place(tensor.data_ptr(), group.name.encode(), place)
    return (place[0], place[1]) if found else None


def symmetric_tensor(
    group: Group, rank: int, place: tuple[int, int], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns a contiguous tensor over a rank's symmetric memory, after a call of the group.

    Raises `RuntimeError` if this rank has freed its part of that memory.
    """
    address: int | None = native.load().symm_cp_symmetric_address(group.handle, rank, *place)
    if address is None:
        raise RuntimeError(native.error())
    return tensor_at(address, shape, dtype)


def has_symmetric(group: Group) -> bool:
    """Returns whether tensors were ever rendezvoused with the group; the same on all ranks."""
    return bool(native.load().symm_cp_rendezvous_begun(group.name.encode()))
