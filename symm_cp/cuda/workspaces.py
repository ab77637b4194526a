"""The workspaces of groups on devices: made when a call needs one, and replaced by larger ones.

Graphs that share a memory pool of torch's (`torch.cuda.graph(..., pool=...)`) are replayed one
after the other, so they share a workspace. Others may be replayed at the same time, on different
streams, so each has a workspace of its own. `reserve` makes these, since none can be made during a
capture. They come back when the graphs of a pool have died on all ranks.

The graphs of `torch.compile(mode="reduce-overhead")` share one pool. Calls before the captures make
their workspaces.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import threading
import weakref
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

import torch

from symm_cp import native
from symm_cp.cuda.base import Device, DeviceWorkspace, Verdict
from symm_cp.cuda.registry import device_for, spans_hosts
from symm_cp.group.hosts import apart_of
from symm_cp.group.liveness import share
from symm_cp.group.memory import Group, GroupLike, StateKey, calls_paused, resolve
from symm_cp.native import wire

#: A device, its driver, and a channel.
_Key = tuple[torch.device, str, str]
#: The pool of all graphs of torch.compile.
_COMPILED = "torch.compile"


def _key(device: Device, channel: str) -> _Key:
    return device.torch_device, device.driver, channel


@dataclass
class _GraphWorkspaces:
    """Workspaces of one kind for calls in captures."""

    free: list[DeviceWorkspace] = field(default_factory=list)
    #: Those of each memory pool, the largest last; graphs may still use the others. All ranks have
    #: their pools in the same order.
    by_pool: dict[Hashable, list[DeviceWorkspace]] = field(default_factory=dict)

    def of(self, pool: Hashable, slot_bytes: int) -> DeviceWorkspace | None:
        """Returns a pool's workspace with slots of that size, perhaps a free one; None: none."""
        for taken in self.by_pool.get(pool, [])[-1:]:
            if taken.serves(slot_bytes):
                return taken
        free = next((made for made in self.free if made.serves(slot_bytes)), None)
        if free is not None:
            self.free.remove(free)
            self.by_pool.setdefault(pool, []).append(free)
        return free

    def take_back(self, group: Group, pools: Collection[Hashable]) -> None:
        """Takes back the workspaces of pools that are not in `pools` on any rank. Collective."""
        gone = [place for place, pool in enumerate(self.by_pool) if pool not in (*pools, _COMPILED)]
        texts = share(group, "graphs that died", json.dumps(gone))
        on_all = set(gone).intersection(*map(json.loads, texts))
        for pool in [pool for place, pool in enumerate(self.by_pool) if place in on_all]:
            self.free += self.by_pool.pop(pool)


@dataclass
class Workspaces:
    """A group's workspaces by their kinds."""

    current: dict[_Key, DeviceWorkspace] = field(default_factory=dict)
    graphs: dict[_Key, _GraphWorkspaces] = field(default_factory=dict)

    def all(self) -> Iterator[DeviceWorkspace]:
        """Yields all workspaces."""
        yield from self.current.values()
        for of_graphs in self.graphs.values():
            yield from of_graphs.free
            yield from itertools.chain(*of_graphs.by_pool.values())

    def clear(self) -> None:
        """Frees all workspaces, as soon as that is possible."""
        retired = list(self.all())
        self.current.clear()
        self.graphs.clear()
        retire(*retired)


_WORKSPACES = StateKey("workspaces on devices", Workspaces.clear)

# Workspaces that are no longer in use, but not freed yet: freeing symmetric memory waits for the
# device, which is wrong while its streams may wait forever, and during a capture; and after an
# error from which the device does not recover, torch's destructors end the process.
_retired: list[DeviceWorkspace] = []
# Workspaces with memory that streams of a failed call may still use.
_holding: weakref.WeakSet[DeviceWorkspace] = weakref.WeakSet()
_all: weakref.WeakSet[DeviceWorkspace] = weakref.WeakSet()
# Groups whose calls may be on streams, and the lock for adding one, held while memory is freed.
_groups: weakref.WeakSet[Group] = weakref.WeakSet()
_adding = threading.Lock()


def retire(*workspaces: DeviceWorkspace) -> None:
    """Frees workspaces as soon as that is possible."""
    native.drop_plans()  # plans keep workspaces
    _retired.extend(workspaces)
    _free_retired()


def _free_retired() -> None:
    for workspace in [w for w in _holding if w.ended()]:
        workspace.held.clear()
        _holding.discard(workspace)
    # Freeing waits for all work on the device: by now none waits for peers, and none may begin to,
    # since these might wait for this rank meanwhile.
    if _retired and _adding.acquire(blocking=False):  # else another thread frees them
        try:
            with calls_paused(list(_groups)) as paused:
                for workspace in [w for w in _retired if not _must_stay(w)] if paused else ():
                    _retired.remove(workspace)
                    _holding.discard(workspace)
                    workspace.free()
        finally:
            _adding.release()


def admit(group: Group) -> None:
    """Notes a group before its first work on streams that may wait for peers."""
    if group not in _groups:
        with _adding:
            _groups.add(group)


def _must_stay(workspace: DeviceWorkspace) -> bool:
    device = workspace.device
    return device.capturing() or not workspace.ended() or device.failed() or _waits(device)


def _waits(device: Device) -> bool:
    """Whether calls are under way, which may wait for peers that wait for this rank."""
    users = {other.user for other in list(_all) if other.device is device}
    return not all(device.ended(s) for user in users for s in device.streams(user)[1:])


def hold(workspace: DeviceWorkspace, *tensors: torch.Tensor) -> None:
    """Keeps a failed call's tensors until the streams of its workspace have ended."""
    workspace.held += tensors
    _holding.add(workspace)


@atexit.register
def _keep_all() -> None:
    # Leaves freeing to the operating system: streams may wait for peers that have gone, and the
    # device may have failed.
    for workspace in _all:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspace))


def workspaces_of(group: Group) -> Workspaces:
    """Returns a group's workspaces on all devices. Not collective."""
    return group.state(_WORKSPACES, Workspaces)


def workspace(group: Group, device: Device, channel: str, slot_bytes: int) -> DeviceWorkspace:
    """Returns the group's workspace of a channel, with slots of at least `slot_bytes`.

    Collective when it has to be made or to grow; every rank must ask for the same size. Raises
    `RuntimeError` when that would happen during a capture, or when the group's self-test
    found that calls cannot be captured.
    """
    capturing, verdict = device.capturing(), device.verdict(group)
    if not capturing:
        if _holding or _retired:
            _free_retired()
        if device.captures and verdict.graphs and device.in_graph_tree():
            _make_shared(group, device, channel, slot_bytes, verdict)
        return _workspace(group, device, channel, slot_bytes, verdict)
    if not verdict.graphs:
        raise RuntimeError(
            f"symm_cp: calls of group {group.name!r} on {device} cannot be captured into a graph: "
            f"{verdict.reason}"
        )
    kind = workspaces_of(group).graphs.setdefault(_key(device, channel), _GraphWorkspaces())
    pool = _COMPILED if device.in_graph_tree() else device.graph_pool()
    present = kind.of(pool, slot_bytes)
    if present is None and kind.by_pool.keys() - {_COMPILED}:
        kind.take_back(group, device.graph_pools())
        present = kind.of(pool, slot_bytes)
    if present is not None:
        return present
    there_is, sizes = "there is none", [made.slot_bytes for made in kind.free]
    if sizes:
        there_is = f"there is one of {max(sizes)}"
    elif pools := len(kind.by_pool.keys() - {_COMPILED}):
        there_is = f"all belong to graphs of {pools} other memory pools"
    raise RuntimeError(
        f"symm_cp: this call needs a workspace of {slot_bytes} bytes, {there_is}; none can be made "
        "while a graph is captured: before the captures, call "
        f"symm_cp.reserve(group, {slot_bytes}, device={str(device.torch_device)!r}, graphs=n) for "
        "n more graphs, or capture graphs that are replayed one after the other with one `pool`"
    )


def _workspace(
    group: Group, device: Device, channel: str, slot_bytes: int, verdict: Verdict
) -> DeviceWorkspace:
    workspaces, key = workspaces_of(group), _key(device, channel)
    present = workspaces.current.get(key)
    if present is not None and present.serves(slot_bytes):
        return present
    needed = slot_bytes if present is None else max(slot_bytes, present.slot_bytes)
    workspaces.current[key] = _make(group, device, channel, needed, verdict, graph=False)
    if present is not None:
        retire(present)
    return workspaces.current[key]


def _make(
    group: Group,
    device: Device,
    channel: str,
    slot_bytes: int,
    verdict: Verdict,
    *,
    graph: bool,
) -> DeviceWorkspace:
    native.drop_plans()
    admit(group)
    made = device.workspace(group, channel, slot_bytes, graph=graph, verdict=verdict)
    _all.add(made)
    return made


def _make_for_graphs(
    group: Group, device: Device, channel: str, slot_bytes: int, verdict: Verdict, count: int
) -> None:
    """Makes workspaces until `count` of that size are not used by a graph."""
    key = _key(device, channel)
    kind = workspaces_of(group).graphs.setdefault(key, _GraphWorkspaces())
    for place in range(count):
        present = kind.free[place] if place < len(kind.free) else None
        if present is not None and present.serves(slot_bytes):
            continue
        needed = slot_bytes if present is None else max(slot_bytes, present.slot_bytes)
        kind.free[place : place + 1] = [_make(group, device, channel, needed, verdict, graph=True)]
        if present is not None:
            retire(present)


def _make_shared(
    group: Group, device: Device, channel: str, slot_bytes: int, verdict: Verdict
) -> None:
    """Makes a workspace for captures of torch.compile, unless there is one of that size."""
    key = _key(device, channel)
    kind = workspaces_of(group).graphs.setdefault(key, _GraphWorkspaces())
    shared = kind.by_pool.setdefault(_COMPILED, [])
    if not shared or not shared[-1].serves(slot_bytes):
        needed = max([slot_bytes, *(made.slot_bytes for made in shared)])
        shared.append(_make(group, device, channel, needed, verdict, graph=True))


def give_up_on(workspace: DeviceWorkspace, error: BaseException) -> None:
    """Gives a workspace up because of an error; adds a note to it if peers cannot be notified."""
    native.drop_plans()
    try:
        workspace.give_up()
    except RuntimeError as further:
        error.add_note(str(further))


def reserve_on(group: Group, device: Device, slot_bytes: int, graphs: int = 1) -> None:
    """Sizes all workspaces on a device for calls of up to `slot_bytes`. Collective."""
    with group.lock, device.guard():
        verdict = device.verdict(group)
        for channel in wire.CHANNELS:
            _workspace(group, device, channel, slot_bytes, verdict)
            if device.captures and verdict.graphs:
                _make_for_graphs(group, device, channel, slot_bytes, verdict, graphs)


def reserve(
    group: GroupLike, nbytes: int, *, device: torch.device | str = "cpu", graphs: int = 1
) -> None:
    """Sizes workspaces for ops whose shard takes up to `nbytes` bytes, so that none grows later.

    `device` holds the ops' tensors. On CUDA, `reserve` also makes workspaces for ops that are
    captured into graphs, which cannot be made during a capture. Graphs with the same memory pool
    (`torch.cuda.graph(..., pool=...)`) share one, as they are not replayed at the same time; any
    other graph takes one until it dies. This makes room for `graphs` more. Ranks capture their
    graphs in the same order. Collective: call it with the same numbers on every rank of the
    group. Raises `ValueError` for negative numbers.
    """
    if nbytes < 0:
        raise ValueError(f"reserve: {nbytes=} must not be negative")
    if graphs < 0:
        raise ValueError(f"reserve: {graphs=} must not be negative")
    torch_device, resolved = torch.device(device), resolve(group)
    if not spans_hosts(resolved, torch_device) and apart_of(resolved, torch_device) is not None:
        return  # ops go over the process group, which needs no workspaces
    if torch_device.type == "cpu":
        resolved.reserve(nbytes)
    else:
        reserve_on(resolved, device_for(resolved, torch_device), nbytes, graphs)
