"""Groups that span hosts: who shares memory with whom.

Two ranks are on one host when they run under one boot of one kernel and in one network namespace,
in which the sockets are that symmetric memory is passed over. Host names say nothing: containers
and copied images repeat them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _resolve_process_group,
)

from symm_cp import env
from symm_cp.memory import Group, resolve

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


def spread(identities: list[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each host, given the identity of each rank's."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(identities):
        hosts.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def hosts_of(group: Group) -> Hosts | None:
    """Returns how a group is spread over hosts, or None when all of it is on one.

    Collective at the first call for a group. Raises `NotImplementedError` when hosts hold different
    numbers of its ranks.
    """
    if group.world_size == 1:
        return None
    if not group.spread_known:
        group.hosts = _find(group)
        group.spread_known = True
    found: Hosts | None = group.hosts
    return found


def _find(group: Group) -> Hosts | None:
    process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]
    store = _get_process_group_store(process_group)
    store.set(f"symm_cp/host/{group.rank}", identity())
    found = [store.get(f"symm_cp/host/{rank}").decode() for rank in range(group.world_size)]
    ranks = spread(found)
    if len(ranks) == 1:
        return None
    if len({len(there) for there in ranks}) > 1:
        raise NotImplementedError(
            f"symm_cp: the hosts of group {group.name!r} hold ranks {[list(r) for r in ranks]}: "
            "needs as many on each"
        )
    host = next(index for index, there in enumerate(ranks) if group.rank in there)
    place = ranks[host].index(group.rank)
    local = _local_group(process_group, f"{group.name}, host {host}", place, len(ranks[host]))
    return Hosts(ranks, host, place, resolve(local), local)


def _local_group(
    process_group: dist.ProcessGroup, name: str, place: int, size: int
) -> dist.ProcessGroup:
    """A group of those ranks of another that are on this host: for symmetric memory.

    `new_group` would ask ranks that are no members to take part, or depend on which other groups
    each of the members is in.
    """
    store = dist.PrefixStore(f"symm_cp/{name}", _get_process_group_store(process_group))
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
        store = _get_process_group_store(_resolve_process_group(group.name))  # type: ignore[arg-type]
        space = f"{identity()} {os.readlink('/proc/self/ns/pid')}"
        store.set(f"symm_cp/process/{group.rank}", f"{os.getpid()} {space}")
        found = [store.get(f"symm_cp/process/{rank}").decode() for rank in range(group.world_size)]
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


def wait_limit(group: Group) -> datetime.timedelta:
    """Returns how long ops of a group wait for a peer: `SYMM_CP_TIMEOUT_MS`, or its time-out."""
    if env.timeout_ms():
        return datetime.timedelta(milliseconds=env.timeout_ms())
    return timeout_of(_resolve_process_group(group.name))  # type: ignore[arg-type]


def timeout_of(process_group: dist.ProcessGroup) -> datetime.timedelta:
    """Returns how long a group waits for a peer."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return dist.default_pg_timeout
