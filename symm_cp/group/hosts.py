"""Whether the ranks of a group work in each other's memory, or apart: over the process group.

Ranks are on one host when they run under the same boot of a kernel and in the same network
namespace: symmetric memory is passed over sockets of that namespace. Host names are not compared,
because containers and copied images repeat them. Ranks also work apart if their GPUs do not all
reach each other's memory (no peer access), or if the self-test finds no way for them to signal each
other.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import accelerators, env, native
from symm_cp.group import one_process
from symm_cp.group.liveness import host_identity, read, share, wait_limit
from symm_cp.group.memory import (
    Group,
    StateKey,
    is_fake,
    on_first_use,
    reported,
    resolve,
)
from symm_cp.group.stores import TimedStore
from symm_cp.native import wire

_CPU = torch.device("cpu")
#: The numbers of each rank.
Numbers: TypeAlias = "tuple[tuple[int, ...], ...]"

#: The prefix of the name of the exchange that decides whether an op reads its inputs in place.
QUESTION = b"inputs of "


class Apart(NamedTuple):
    """Why the ranks of a group work apart."""

    reason: str
    #: Whether the ranks can map each other's memory, but one of `checks` failed.
    failed_check: bool = False


@dataclass(frozen=True)
class HostPlace:
    """Where a rank is: its host and its GPU, and the GPUs whose memory it sees but cannot map."""

    host: str
    gpu: str = ""
    unreachable: tuple[str, ...] = ()


#: Returns the reason why ranks that map each other's memory on a device cannot work on it together;
#: "" if they can, None if no check is needed. Collective. Added by cuda/registry.
Check: TypeAlias = "Callable[[Group, torch.device], str | None]"
checks: list[Check] = []

#: Why ranks work apart, by type of device; None: they work together.
APART: StateKey[dict[str, Apart | None]] = StateKey("apart")


def _place(device: torch.device) -> HostPlace:
    if device.type == "cpu":
        return HostPlace(host_identity())
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
    return HostPlace(host_identity(), ids[own], unreachable)


def places_apart(places: Sequence[HostPlace]) -> str:
    """Returns why ranks at these places share no memory; "" if they do."""
    hosts = {place.host for place in places}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts, which share no memory"
    gpus = {place.gpu for place in places}
    if any(gpu in place.unreachable for place in places for gpu in gpus):
        return "its GPUs do not all reach each other's memory"
    return ""


def in_test_mode() -> bool:
    """Returns whether torch's `_test_mode()` asks for unfused ops: as if ranks worked apart."""
    return torch_symm_mem._is_test_mode


def apart_of(group: Group, device: torch.device) -> Apart | None:
    """Returns why a group's ranks work apart on tensors on `device`; None if they do not.

    Collective at the first call for a group and a kind of device. Rank 0 then warns if they do.
    """
    known, kind = group.state(APART, dict), device.type
    if kind not in known:
        apart = known[kind] = _find(group, device)
        if kind == "cpu":
            native.load().symm_cp_set_on_one_host(group.handle, apart is None)
        if apart is not None and group.rank == 0 and not is_fake(group.name):
            warnings.warn(
                f"symm_cp: ops of group {group.name!r} on {kind} run unfused, over the process "
                f"group: {apart.reason}",
                stacklevel=2,
            )
    return known[kind]


def no_common_memory(op: str, group: Group, device: torch.device) -> NotImplementedError:
    """Returns the error of an op on peers' memory in a group whose ranks work apart."""
    apart = apart_of(group, device)
    return NotImplementedError(
        f"{op}: not supported in group {group.name!r}: {apart.reason if apart else ''}: use the "
        "collectives of torch.distributed"
    )


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


def _place_of_text(text: str) -> HostPlace:
    host, gpu, unreachable = json.loads(text)
    return HostPlace(host, gpu, tuple(unreachable))


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


def _places(group: Group, device: torch.device) -> list[HostPlace]:
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


def has_epochs(group: Group) -> bool:
    """Whether it is known that ranks share memory for tensors on CPU, and so count their calls."""
    known = group.find(APART) or {}
    return known.get("cpu", "unknown") is None and not in_test_mode()


def _known_at_once(group: Group) -> bool:
    """Whether `apart_of` returns without waiting, for tensors on CPU."""
    known = group.find(APART) or {}
    return group.world_size == 1 or "cpu" in known or _met_on_this_host(group)


def _find(group: Group, device: torch.device) -> Apart | None:
    if group.world_size == 1 or (device.type == "cpu" and _met_on_this_host(group)):
        return None
    if is_fake(group.name):
        return Apart('its backend is "fake", which exchanges nothing')
    if reason := places_apart(_places(group, device)):
        return Apart(reason)
    reasons = [check(group, device) for check in checks]
    if all(reason is None for reason in reasons):
        return None
    answers = share(group, f"together/{device.type}", "; ".join(filter(None, reasons)))
    reason = next(filter(None, answers), "")
    return Apart(reason, failed_check=True) if reason else None


def numbers_of_all(group: Group, name: str, numbers: Sequence[int]) -> Numbers:
    """Returns the numbers of each rank, in rank order; all pass the same count. Collective.

    They travel through memory on one host, which takes some microseconds, and through the group's
    store between hosts, whatever device the op's tensors are on. `name` names the call in errors.
    Raises `RuntimeError` when a peer fails or makes another call.
    """
    if group.world_size == 1:
        return (tuple(numbers),)
    if apart_of(group, _CPU) is None:
        return numbers_on_host(group, name.encode(), numbers)
    if is_fake(group.name):
        if one_process.is_one_of_several():
            return tuple(one_process.all_values(group.name, tuple(numbers)))
        return (tuple(numbers),) * group.world_size
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
            apart_of(group, _CPU)
        library.symm_cp_group_known(group.handle)
    except BaseException as error:
        if isinstance(error, Exception):
            library.symm_cp_explain(str(error).encode())
        else:  # Ctrl-C
            library.symm_cp_explain_interruption(group and group.handle, id(type(error)))
        return -1
    return 0


# Ranks run different code in it: no frame may wait for other ranks to compile the same.
_frames = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(
    _find_by_name.__code__,
    _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP),
)
_callback = native.FindGroup(_find_by_name)  # C++ calls it as long as the process lives


def register() -> None:
    """Lets kernels in C++ look groups up by name (csrc/channel/groups.h)."""
    native.load().symm_cp_on_unknown_group(_callback)
