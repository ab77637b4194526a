"""Groups that span hosts: which ranks share memory.

Two ranks are on one host when they run under the same boot of a kernel and in the same network
namespace: symmetric memory is passed over sockets of that namespace. Host names are not compared,
because containers and copied images repeat them. GPUs that cannot map each other's memory (no peer
access) count as on different hosts. Every rank counts as on a host of its own where the self-test
finds no way for the ranks of a group to signal each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import accelerators, env, native
from symm_cp.group.liveness import host_identity, read, share, wait_limit
from symm_cp.group.memory import Group, StateKey, on_first_use, reported, resolve
from symm_cp.group.stores import TimedStore, timeout_of
from symm_cp.native import wire

_CPU = torch.device("cpu")
#: The numbers of each rank.
Numbers: TypeAlias = "tuple[tuple[int, ...], ...]"

#: The prefix of the name of the exchange that decides whether an op reads its inputs in place.
QUESTION = b"inputs of "


@dataclass(frozen=True)
class Hosts:
    """How a group is spread over hosts; rank `ranks[h][i]` of the group is number i of host h.

    This rank is number `place` of host `host`, whose ranks are the group `local`.
    """

    ranks: tuple[tuple[int, ...], ...]
    host: int
    place: int
    local: Group
    #: The process group of `local`, kept alive with this object.
    process_group: dist.ProcessGroup
    #: Why ranks that share memory are treated as if on different hosts, if they are.
    reason: str = ""


@dataclass(frozen=True)
class Place:
    """Where a rank is: its host and its GPU, and the GPUs whose memory it sees but cannot map."""

    host: str
    gpu: str = ""
    unreachable: tuple[str, ...] = ()


#: Returns the reason why ranks that map each other's memory on a device cannot work on it together;
#: "" if they can, None if no check is needed. Collective. Added by cuda/registry.
Check: TypeAlias = "Callable[[Group, torch.device], str | None]"
checks: list[Check] = []

#: How a group is spread over hosts, by type of device; None: all ranks are on one host.
SPREADS: StateKey[dict[str, Hosts | None]] = StateKey("hosts")


def _place(device: torch.device) -> Place:
    if device.type == "cpu":
        return Place(host_identity())
    own = accelerators.index_of(device)
    ids = [
        accelerators.uuid_of(torch.device(device.type, index))
        for index in range(accelerators.count(device))
    ]
    unreachable = tuple(
        gpu
        for peer, gpu in enumerate(ids)
        if peer != own and not accelerators.reaches(device, peer)
    )
    return Place(host_identity(), ids[own], unreachable)


def _islands(ranks: Sequence[int], places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Splits the ranks of a host into parts whose GPUs all reach each other.

    Where the GPUs do not form such parts, each rank is a part of its own.
    """

    def reaches(rank: int, peer: int) -> bool:
        return places[peer].gpu not in places[rank].unreachable

    reachable = {
        rank: tuple(peer for peer in ranks if reaches(rank, peer) and reaches(peer, rank))
        for rank in ranks
    }
    if all(reachable[peer] == reachable[rank] for rank in ranks for peer in reachable[rank]):
        return list(dict.fromkeys(reachable.values()))
    return [(rank,) for rank in ranks]


def spread(places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    """Returns the parts of a group whose ranks share memory, given the place of each rank."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    islands = [island for ranks in hosts.values() for island in _islands(ranks, places)]
    if len(islands) > len(hosts) and len({len(island) for island in islands}) > 1:
        return tuple((rank,) for rank in range(len(places)))
    return tuple(islands)


def hosts_of(group: Group, device: torch.device) -> Hosts | None:
    """Returns how a group is spread over hosts; None if all tensors on `device` are on one host.

    Collective at the first call for a group and a kind of device. Warns when GPUs of one host do
    not reach each other's memory, or cannot signal each other: they then count as on different
    hosts. Raises `NotImplementedError` when hosts hold different numbers of the group's ranks.
    """
    if group.world_size == 1:
        return None
    spreads, kind = group.state(SPREADS, dict), device.type
    if kind not in spreads:
        spreads[kind] = _find(group, device)
    return spreads[kind]


def no_common_memory(op: str, group: Group, device: torch.device) -> NotImplementedError:
    """Returns the error of an op on peers' memory in a group that spans hosts."""
    hosts = hosts_of(group, device)
    count = len(hosts.ranks) if hosts is not None else 1
    return NotImplementedError(
        f"{op}: the ranks of group {group.name!r} are on {count} hosts, which share no memory: use "
        "the collectives of torch.distributed"
    )


def on_this_host(group: Group, kind: str) -> Group:
    """Returns the part of a group on this host, for a kind of device.

    Never waits: before the first call of `hosts_of` it returns the whole group.
    """
    known = (group.find(SPREADS) or {}).get(kind)
    return group if known is None else known.local


def _publish(group: Group) -> None:
    """Writes the place of this rank's CPU tensors to the store. Not collective.

    The key contains the process's rank in the world, not the group: ranks that use different groups
    first must not wait for each other. For the same reason it contains no generation, on which a
    group's ranks would have to agree. So this world may read places that an earlier world left in
    the store, which are right unless its processes were on other hosts.
    """
    if group.world_size > 1:
        store, keys = _keys(group)
        store.set(keys[group.rank], _place_as_text(_CPU))


on_first_use.append(_publish)


def _place_as_text(device: torch.device) -> str:
    return json.dumps(astuple(_place(device)))


def _place_of_text(text: str) -> Place:
    host, gpu, unreachable = json.loads(text)
    return Place(host, gpu, tuple(unreachable))


def _keys(group: Group) -> tuple[TimedStore, list[str]]:
    """Returns the store and the keys of each rank's place for CPU tensors.

    The keys are the group's own when its ranks are not in the world, or when the user names the
    hosts: a rank may then be on different hosts for different groups.
    """
    process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]
    world = dist.distributed_c10d._world
    if env.host() is not None or process_group not in world.pg_group_ranks:
        return group.store(), [f"symm_cp/host/cpu/{rank}" for rank in range(group.world_size)]
    members = dist.get_process_group_ranks(process_group)
    store = TimedStore(dist.distributed_c10d._get_default_store(), wait_limit(group))
    return store, [f"symm_cp/host/{rank}" for rank in members]


def _places(group: Group, device: torch.device) -> list[Place]:
    """Returns the place of each rank of a group. Collective."""
    if device.type == "cpu":
        _publish(group)
        texts = read(group, *_keys(group))
    else:
        texts = share(group, f"host/{device.type}", _place_as_text(device))
    return [_place_of_text(text) for text in texts]


def _met_on_this_host(group: Group) -> bool:
    """Whether the group's backend found all ranks on this host when the group was made.

    Then the group's first call waits only for the group's own peers, with its own time-out.
    """
    return bool(native.load().symm_cp_met_on_this_host(group.name.encode()))


def _known_at_once(group: Group) -> bool:
    """Whether `hosts_of` returns without waiting, for tensors on CPU."""
    known = group.find(SPREADS) or {}
    return group.world_size == 1 or "cpu" in known or _met_on_this_host(group)


def _find(group: Group, device: torch.device) -> Hosts | None:
    if device.type == "cpu" and _met_on_this_host(group):
        return None
    places = _places(group, device)
    ranks = spread(places)
    if len({len(on_host) for on_host in ranks}) > 1:
        raise NotImplementedError(
            f"symm_cp: the hosts of group {group.name!r} hold ranks {[list(r) for r in ranks]}; "
            "every host must hold the same number of ranks"
        )
    if group.rank == 0 and len(ranks) > len({place.host for place in places}):
        warnings.warn(
            f"symm_cp: no GPU of group {group.name!r} reaches the memory of all others: ranks "
            f"{', '.join(str(list(r)) for r in ranks)} exchange data as if on different hosts, "
            "with the process group's own operations",
            stacklevel=2,
        )
    hosts = _part_of(group, device, ranks) if len(ranks) > 1 else None
    reason = _why_not_together(group, group if hosts is None else hosts.local, device)
    if not reason:
        return hosts
    alone = tuple((rank,) for rank in range(group.world_size))
    return _part_of(group, device, alone, reason)


def _why_not_together(group: Group, part: Group, device: torch.device) -> str:
    """Returns why the ranks of some part of a group cannot work on a device together. Collective.

    The check that finds a reason (cuda/selftest.py) warns.
    """
    reasons = [check(part, device) for check in checks]
    if all(reason is None for reason in reasons):
        return ""
    answers = share(group, f"together/{device.type}", "; ".join(filter(None, reasons)))
    return next(filter(None, answers), "")


def _part_of(
    group: Group, device: torch.device, ranks: tuple[tuple[int, ...], ...], reason: str = ""
) -> Hosts:
    """Makes the group of this rank's part. Collective."""
    host = next(index for index, on_host in enumerate(ranks) if group.rank in on_host)
    place = ranks[host].index(group.rank)
    # A fresh prefix: an earlier group of that name may have left keys in the store.
    tokens = share(group, f"local/{device.type}", secrets.token_hex(8))
    store = group.store().under(f"symm_cp/local/{tokens[ranks[host][0]]}").untimed
    process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]
    name = f"{group.name}, {device.type}, host {host}"
    local = local_group(store, name, place, len(ranks[host]), timeout_of(process_group))
    return Hosts(ranks, host, place, resolve(local), local, reason)


def local_group(
    store: dist.Store, name: str, place: int, size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Makes a group of the ranks of a group that are on this host, for symmetric memory.

    `new_group` would need non-members to take part, or would depend on the other groups of each
    member.
    """
    local, cpu = dist.ProcessGroup(store, place, size), torch.device("cpu")
    # A group gets its name and its time-out from a backend; the loopback device suffices.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    # Longer than the time-out of links between hosts: a rank that loses a link notifies the ranks
    # on this host that wait for it.
    options._timeout = timeout * 1.5
    backend = dist.ProcessGroupGloo(store, place, size, options)
    local._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, backend)
    local._set_group_name(name)
    with contextlib.suppress(RuntimeError):
        _unregister_process_group(name)  # of an earlier group of that name
    _register_process_group(name, local)
    alone: dict[str, Hosts | None] = {"cpu": None}  # its ranks are on one host
    resolve(local).put(SPREADS, alone)
    return local


def numbers_of_all(group: Group, name: str, numbers: Sequence[int]) -> Numbers:
    """Returns the numbers of each rank, in rank order; all pass the same count. Collective.

    They travel through memory on one host, which takes some microseconds, and through the group's
    store between hosts, whatever device the op's tensors are on. `name` names the call in errors.
    Raises `RuntimeError` when a peer fails or makes another call.
    """
    if group.world_size == 1:
        return (tuple(numbers),)
    if hosts_of(group, _CPU) is None:
        return numbers_on_host(group, name.encode(), numbers)
    texts = share(group, name, " ".join(map(str, numbers)))
    return tuple(tuple(map(int, text.split())) for text in texts)


def numbers_on_host(group: Group, name: bytes, numbers: Sequence[int]) -> Numbers:
    """Like `numbers_of_all`, in a group of several ranks that are all on this host."""
    ranks, count = group.world_size, len(numbers)
    given = (ctypes.c_int64 * count)(*numbers)
    taken = (ctypes.c_int64 * (count * ranks))()
    nbytes, begin = count * 8, ctypes.addressof(taken)
    done = native.load().symm_cp_exchange(
        group.handle,
        wire.CHANNELS.index("sync"),
        wire.ExchangeKind.ALL_GATHER,
        False,
        name,
        (ctypes.c_void_p * 1)(ctypes.addressof(given)),
        (ctypes.c_int64 * 1)(nbytes),
        1,
        (ctypes.c_void_p * ranks)(*(begin + rank * nbytes for rank in range(ranks))),
        (ctypes.c_int64 * ranks)(*(nbytes,) * ranks),
        ranks,
        wire.DType.UINT8,
        0,
    )
    if done < 0:
        raise reported(RuntimeError(native.error()))
    return tuple(tuple(taken[at : at + count]) for at in range(0, count * ranks, count))


def _find_by_name(name: bytes, ask: int) -> int:
    """For csrc/channel/groups.h; with `ask` collective at the first call for a group."""
    library, group = native.load(), None
    try:
        group = resolve(name.decode())
        if ask or _known_at_once(group):
            try:
                together = hosts_of(group, _CPU) is None
            except NotImplementedError:
                together = False  # the op raises the reason
            library.symm_cp_set_on_one_host(group.handle, together)
        library.symm_cp_group_known(group.handle)
    except BaseException as error:
        if isinstance(error, Exception):
            library.symm_cp_explain(str(error).encode())
        else:  # Ctrl-C
            library.symm_cp_explain_interruption(group and group.handle, id(type(error)))
        return -1
    return 0


_callback = native.FindGroup(_find_by_name)  # C++ calls it as long as the process lives


def register() -> None:
    """Lets kernels in C++ look groups up by name (csrc/channel/groups.h)."""
    native.load().symm_cp_on_unknown_group(_callback)
