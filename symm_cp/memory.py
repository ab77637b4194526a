"""Groups and their workspaces: the only place that knows how bytes are laid out.

A group has up to two workspaces, each a *channel* with calls of its own: `"sync"` for ops that run
in the calling thread, `"async"` for those that a copy engine carries out, so that both kinds may be
in flight at once. The calls of a channel are numbered 1, 2, 3, ... alike on every rank (the
*epoch*); call e uses slot e % 2. A workspace takes

    4096 * ceil((4 * 64 * W + 2 * 128) / 4096) + 2 * 4096 * ceil(slot / 4096)   bytes a rank

for a slot of `slot` bytes and W ranks: flags (a cache line for each name and writer), records (what
each of the two calls under way is), then the two slots. The slot is as large as the largest call so
far; a larger one replaces the workspace, which is collective but happens inside an op that is
collective anyway, on sizes that all ranks know. So does the call after `LAST_EPOCH`. Nothing is
collective when memory is returned.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group

from . import env, native
from .modes import ordinary_tensors

#: The names of the flags; a flag's number is its place here (mirrored in csrc/channel.cpp).
FLAGS = ("ready", "reduced", "taken", "done")
#: The channels of a group.
CHANNELS = ("sync", "async")

#: A flag has a cache line of its own.
FLAG_BYTES = 64

#: The calls of a workspace. A wait compares 32-bit numbers by their difference: a flag that few ops
#: raise would, 2^31 calls later, look as if it had been raised (tests/model/protocol.pml, WRAP).
LAST_EPOCH = (1 << 31) - 1

_SLOTS = 2
_RECORD_BYTES = 128
_PAGE = 4096
_MAX_VIEWS = 1024
_MAX_PLANS = 512

GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | str"


def pages(nbytes: int) -> int:
    """Returns a number of bytes, rounded up to whole pages."""
    return math.ceil(nbytes / _PAGE) * _PAGE


def workspace_bytes(world_size: int, slot_bytes: int) -> int:
    """Returns the bytes that a workspace takes on each rank (the formula above)."""
    header = len(FLAGS) * FLAG_BYTES * world_size + _SLOTS * _RECORD_BYTES
    return pages(header) + _SLOTS * pages(slot_bytes)


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
    raise TypeError(
        "group must be a ProcessGroup, a 1-D DeviceMesh or a group name, "
        f"not {type(group).__name__}"
    )


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a contiguous tensor over memory that somebody else keeps alive."""
    count = math.prod(shape)
    with ordinary_tensors():
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(tuple(shape))


class Calls:
    """The calls of a workspace, one after the other, and the room that they have."""

    slot_bytes: int
    epoch = 0

    def next_epoch(self) -> int:
        """Begins a call: every rank does so in the same order."""
        self.epoch += 1
        return self.epoch

    def serves(self, slot_bytes: int) -> bool:
        """Whether a call with a slot of so many bytes can be made."""
        return self.slot_bytes >= slot_bytes and self.epoch < LAST_EPOCH


class Workspace(Calls):
    """Symmetric memory of one channel of a group, with two slots that its calls take in turn.

    Not for several threads at once: `Group.lock` serialises them.
    """

    def __init__(self, group: Group, slot_bytes: int) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.slot_bytes = pages(slot_bytes)
        self.nbytes = workspace_bytes(group.world_size, slot_bytes)
        self._library = native.load()
        try:
            self._memory = _SymmetricMemory.empty_strided_p2p(
                (self.nbytes,), [1], torch.uint8, torch.device("cpu"), group.name
            )
        except RuntimeError as error:
            # The others are on their way to the rendezvous.
            if self._library.symm_cp_decline(group.name.encode(), str(error).encode()) < 0:
                raise RuntimeError(native.error()) from error
            raise
        _SymmetricMemory.rendezvous(self._memory, group.name)
        header = self.nbytes - _SLOTS * self.slot_bytes
        layout = native.Layout(
            flags=0,
            flag_count=len(FLAGS),
            records=len(FLAGS) * FLAG_BYTES * group.world_size,
            slots=header,
            slot_bytes=self.slot_bytes,
            slot_count=_SLOTS,
        )
        self.handle: int = self._library.symm_cp_open(
            self._memory.data_ptr(), group.name.encode(), ctypes.byref(layout), env.timeout_ms()
        )
        if not self.handle:
            raise RuntimeError(native.error())
        # Freed with this object, not before: work in flight holds it. Not at exit, when torch's
        # own memory may be gone already and the kernel frees everything anyway.
        weakref.finalize(self, self._library.symm_cp_close, self.handle).atexit = False
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a cached tensor over workspace or peer memory; never hand it to the user."""
        key = (address, tuple(shape), dtype)
        tensor = self._views.get(key)
        if tensor is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            tensor = self._views[key] = tensor_at(*key)
        return tensor

    def slot(self, epoch: int) -> int:
        """Returns the address of this rank's slot in call `epoch`."""
        address: int = self._library.symm_cp_slot(self.handle, self.rank, epoch)
        return address

    def shard(self, peer: int, epoch: int, what: bytes) -> int:
        """Returns where the shard of `peer` lies, after its ready flag was waited for.

        Raises `RuntimeError` when the peer's call is not `what`.
        """
        address: int | None = self._library.symm_cp_shard(self.handle, peer, epoch, what)
        if address is None:
            raise RuntimeError(native.error())
        return address

    def abort(self, reason: str) -> None:
        """Tells the peers that this rank gives up, so that none waits for it in vain."""
        self._library.symm_cp_abort(self.handle, reason.encode())


class Group:
    """The workspaces of one process group."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.name = str(process_group.group_name)
        self.rank: int = process_group.rank()
        self.world_size: int = process_group.size()
        # Ops of several threads on one group take turns; each group has its own lock.
        self.lock = threading.RLock()
        #: What ops keep from call to call, by a key of theirs.
        self.plans: dict[Hashable, Any] = {}
        self._workspaces: dict[str, Workspace] = {}
        self._reserved = 0
        #: Kept for device.py: workspaces by device and channel, and those that graphs still use.
        self.device_workspaces: dict[Hashable, Any] = {}
        self.retained: list[Any] = []
        #: Kept for nvshmem.py: what moves bytes instead of torch's symmetric memory, and how many
        #: workspaces the group had there.
        self.engine: Any = None
        self.engine_workspaces = 0
        #: Kept for tuning.py: what the ranks choose by.
        self.tuning: Any = None
        #: Kept for hosts.py: how the group is spread over hosts, by kind of device.
        self.hosts: dict[str, Any] = {}
        #: Kept for hosts.py, too: the numbers of the ranks' processes.
        self.processes: list[int] | None = None
        #: Kept for runtime/agreement.py: how many calls the ranks have compared.
        self.compared_calls = 0

    def store(self) -> dist.Store:
        """Returns the group's key-value store."""
        return _get_process_group_store(_resolve_process_group(self.name))  # type: ignore[arg-type]

    def share(self, key: str, text: str) -> list[str]:
        """Returns what each rank says under a key of the store. Collective."""
        store = self.store()
        store.set(f"symm_cp/{key}/{self.rank}", text)
        return [store.get(f"symm_cp/{key}/{rank}").decode() for rank in range(self.world_size)]

    def workspace(self, channel: str, slot_bytes: int) -> Workspace:
        """Returns the workspace of a channel with slots of at least `slot_bytes`.

        Collective when it has to be made or to grow; every rank must ask for the same size.
        """
        known = self._workspaces.get(channel)
        if known is not None and known.serves(slot_bytes):
            return known
        wanted = max(slot_bytes, self._reserved, known.slot_bytes if known is not None else 0)
        if known is not None:
            # Whatever failed there was told to whom it concerned, and ends with that workspace.
            native.load().symm_cp_lane_drain(known.handle)
        with ordinary_tensors():
            fresh = self._workspaces[channel] = Workspace(self, wanted)
        return fresh

    def known(self, channel: str) -> Workspace | None:
        """Returns the workspace of a channel as it is now."""
        return self._workspaces.get(channel)

    def remember(self, key: Hashable, plan: Any) -> Any:
        """Keeps a plan for later calls, and few enough of them."""
        if len(self.plans) >= _MAX_PLANS:
            self.plans.clear()
        self.plans[key] = plan
        return plan

    def reserve(self, slot_bytes: int) -> None:
        """Sizes both workspaces for calls of up to `slot_bytes`. Collective."""
        self._reserved = max(self._reserved, slot_bytes)
        for channel in CHANNELS:
            self.workspace(channel, slot_bytes)

    @contextmanager
    def call(self, channel: str, slot_bytes: int) -> Iterator[tuple[Workspace, int]]:
        """Begins a call of the channel: gives its workspace and epoch.

        An exception inside ends the workspace, here and - through its abort mark - at the peers,
        where every wait then raises; the next call makes a new one, collectively.
        """
        with self.lock:
            workspace = self.workspace(channel, slot_bytes)
            epoch = workspace.next_epoch()
            try:
                yield workspace, epoch
            except BaseException as error:
                workspace.abort(f"{type(error).__name__}: {error}")
                self.discard(channel)
                raise

    def discard(self, channel: str, workspace: Workspace | None = None) -> None:
        """Lets go of the workspace of a channel, or of just that one if it still is the current.

        It is freed once no work in flight holds it.
        """
        if workspace is None or self._workspaces.get(channel) is workspace:
            self._workspaces.pop(channel, None)

    def close(self) -> None:
        """Closes all workspaces; runs when the process group is gone."""
        for channel in CHANNELS:
            self.discard(channel)
        self.device_workspaces.clear()
        self.retained.clear()
        self.hosts.clear()
        native.load().symm_cp_release_groups()


_groups: dict[str, tuple[weakref.ref[dist.ProcessGroup], Group]] = {}


def _forget(name: str, group: Group) -> None:
    known = _groups.get(name)
    if known is not None and known[1] is group:
        del _groups[name]
    group.close()


def unknown_group(name: str) -> ValueError:
    """The error for a name that no process group has."""
    return ValueError(f"group: there is no process group named {name!r}")


def resolve(group: GroupLike) -> Group:
    """Returns the `Group` of a process group, 1-D mesh or group name.

    Not collective. Raises `ValueError` when no process group has that name.
    """
    name = group if isinstance(group, str) else group_name(group)
    known = _groups.get(name)
    try:
        process_group = _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise unknown_group(name) from error
    # Names are used again after a group was destroyed, so the object decides.
    if known is not None and known[0]() is process_group:
        return known[1]
    native.load()
    made = Group(process_group)
    _groups[name] = (weakref.ref(process_group), made)
    weakref.finalize(process_group, _forget, name, made).atexit = False
    return made


def get_workspace(group: GroupLike, nbytes: int, *, channel: str = "sync") -> Workspace:
    """Returns the group's workspace of a channel, with slots of at least `nbytes` bytes.

    Collective when the workspace has to grow: call it with the same size on every rank. It is
    released with the group. Raises `ValueError` for an unknown channel or a negative size.
    """
    if channel not in CHANNELS:
        raise ValueError(f"get_workspace: {channel=} must be one of {CHANNELS}")
    if nbytes < 0:
        raise ValueError(f"get_workspace: {nbytes=} must not be negative")
    state = resolve(group)
    with state.lock:
        return state.workspace(channel, nbytes)


def is_symmetric(tensor: torch.Tensor, group: Group) -> bool:
    """Tells whether a tensor lies in symmetric memory that was rendezvoused with the group."""
    library = native.load()
    return bool(library.symm_cp_is_symmetric(tensor.data_ptr(), group.name.encode()))
