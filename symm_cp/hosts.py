"""Groups that span hosts: who shares memory with whom.

Two ranks are on one host when they run under one boot of one kernel and in one network namespace,
in which the sockets are that symmetric memory is passed over. Host names say nothing: containers
and copied images repeat them. GPUs that cannot map each other's memory (no peer access) count as on
several hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import env
from symm_cp.memory import Group, on_first_use, resolve, timeout_of

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identity() -> str:
    """Returns what is the same for processes that can share memory, and else differs."""
    chosen = env.host()
    if chosen is not None:
        return chosen
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"


@dataclass(frozen=True)
class Hosts:
    """How a group is spread over hosts; rank `ranks[h][i]` of the group is number i of host h.

    This rank is number `place` of host `host`, whose ranks are the group `local`.
    """

    ranks: tuple[tuple[int, ...], ...]
    host: int
    place: int
    local: Group
    #: That of `local`, kept alive with this object.
    process_group: dist.ProcessGroup


@dataclass(frozen=True)
class Place:
    """Where a rank is: its host and its GPU, and the GPUs whose memory it sees but cannot map."""

    host: str
    gpu: str = ""
    unreachable: tuple[str, ...] = ()


def _place(device: torch.device) -> Place:
    if device.type != "cuda":
        return Place(identity())
    own = torch.cuda.current_device() if device.index is None else device.index
    gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    unreachable = tuple(
        gpu
        for peer, gpu in enumerate(gpus)
        if peer != own and not torch.cuda.can_device_access_peer(own, peer)
    )
    return Place(identity(), gpus[own], unreachable)


def _islands(ranks: Sequence[int], places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The ranks of a host in parts that reach each other; each alone where there are none such."""

    def reaches(one: int, other: int) -> bool:
        return places[other].gpu not in places[one].unreachable

    around = {
        rank: tuple(peer for peer in ranks if reaches(rank, peer) and reaches(peer, rank))
        for rank in ranks
    }
    if all(around[peer] == around[rank] for rank in ranks for peer in around[rank]):
        return list(dict.fromkeys(around.values()))
    return [(rank,) for rank in ranks]


def spread(places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks that share memory, in parts, given the place of each rank."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    found = [island for ranks in hosts.values() for island in _islands(ranks, places)]
    if len(found) > len(hosts) and len({len(island) for island in found}) > 1:
        return tuple((rank,) for rank in range(len(places)))
    return tuple(found)


def hosts_of(group: Group, device: torch.device) -> Hosts | None:
    """Returns how a group is spread over hosts, or None when tensors on `device` are all on one.

    Collective at the first call for a group and a kind of device. Warns when GPUs of one host do
    not reach each other's memory. Raises `NotImplementedError` when hosts hold different numbers of
    the group's ranks.
    """
    if group.world_size == 1:
        return None
    if device.type not in group.hosts:
        group.hosts[device.type] = _find(group, device)
    found: Hosts | None = group.hosts[device.type]
    return found


def _publish(group: Group) -> None:
    """Says where this rank is, for ranks that ask for CPU tensors. Not collective.

    Once for the process, under its number in the world: ranks that meet in one group must not wait
    for each other because they first used different ones.
    """
    if group.world_size == 1 or group.name in _published:
        return
    world, _ = _keys_of_world(group)
    if world is not None:
        world.set(_key(dist.get_rank()), _text(torch.device("cpu")))
    else:
        group.store().set(f"symm_cp/host/cpu/{group.rank}", _text(torch.device("cpu")))
    _published.add(group.name)
    weakref.finalize(
        _resolve_process_group(group.name),  # type: ignore[arg-type]
        _published.discard,
        group.name,
    ).atexit = False


_published: set[str] = set()
on_first_use.append(_publish)


def _key(world_rank: int) -> str:
    return f"symm_cp/host/{world_rank}"


def _text(device: torch.device) -> str:
    return json.dumps(astuple(_place(device)))


def _keys_of_world(group: Group) -> tuple[dist.Store | None, list[str]]:
    """Where the processes of a group say where they are; no store for groups out of the world.

    Nor where the user chose what tells hosts apart: that may differ from group to group.
    """
    process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]
    world = dist.distributed_c10d._world
    if env.host() is not None or process_group not in world.pg_group_ranks:
        return None, []
    members = dist.get_process_group_ranks(process_group)
    return dist.distributed_c10d._get_default_store(), [_key(rank) for rank in members]


def _find(group: Group, device: torch.device) -> Hosts | None:
    process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]
    kind = device.type
    store, keys = _keys_of_world(group) if kind == "cpu" else (None, [])
    if store is not None:
        _publish(group)
        about = group.read(store, keys)
    else:
        about = group.share(f"host/{kind}", _text(device))
    found = [json.loads(text) for text in about]
    places = [Place(host, gpu, tuple(unreachable)) for host, gpu, unreachable in found]
    ranks = spread(places)
    if len(ranks) == 1:
        return None
    if len({len(there) for there in ranks}) > 1:
        raise NotImplementedError(
            f"symm_cp: the hosts of group {group.name!r} hold ranks {[list(r) for r in ranks]}; "
            "every host must hold the same number of ranks"
        )
    if group.rank == 0 and len(ranks) > len({place.host for place in places}):
        warnings.warn(
            f"symm_cp: no GPU of group {group.name!r} reaches the memory of all others: between "
            f"ranks {', '.join(str(list(r)) for r in ranks)} goes what goes between hosts, by the "
            "process group's own operations",
            stacklevel=2,
        )
    host = next(index for index, there in enumerate(ranks) if group.rank in there)
    place = ranks[host].index(group.rank)
    # In no keys of the store that an earlier group of that name may have left.
    tokens = group.share(f"local/{kind}", secrets.token_hex(8))
    prefix = f"symm_cp/local/{tokens[ranks[host][0]]}"
    store = dist.PrefixStore(prefix, group.store())
    name = f"{group.name}, {kind}, host {host}"
    local = _local_group(process_group, store, name, place, len(ranks[host]))
    return Hosts(ranks, host, place, resolve(local), local)


def _local_group(
    process_group: dist.ProcessGroup, store: dist.Store, name: str, place: int, size: int
) -> dist.ProcessGroup:
    """A group of those ranks of another that are on this host: for symmetric memory.

    `new_group` would ask ranks that are no members to take part, or depend on which other groups
    each of the members is in.
    """
    local, cpu = dist.ProcessGroup(store, place, size), torch.device("cpu")
    # A group has its name and its time-out from a backend. The loopback device is enough.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    # Longer than that of the links: a rank that has lost one says so to those that wait for it.
    options._timeout = timeout_of(process_group) * 1.5
    backend = dist.ProcessGroupGloo(store, place, size, options)
    local._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, backend)
    local._set_group_name(name)
    with contextlib.suppress(RuntimeError):
        _unregister_process_group(name)  # of an earlier group of that name
    _register_process_group(name, local)
    return local


def watched_processes(group: Group) -> list[int]:
    """Returns a descriptor of each rank's process that tells when it ends, or -1; own them.

    Collective at the first call for a group. -1 is for this process, and for those that this one
    cannot name: on other hosts, or in other name spaces of processes.
    """
    if group.processes is None:
        space = f"{identity()} {os.readlink('/proc/self/ns/pid')}"
        found = group.share("process", f"{os.getpid()} {space}")
        known = [text.split(" ", 1) for text in found]
        group.processes = [int(pid) if where == space else -1 for pid, where in known]
        group.processes[group.rank] = -1
    return [_descriptor(pid) for pid in group.processes]


def _descriptor(pid: int) -> int:
    if pid < 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # a kernel without them; that a process is gone shows at the next time-out
        return -1
