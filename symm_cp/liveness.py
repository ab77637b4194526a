"""Whether the ranks of a group are alive, and how long to wait for them.

Ranks tell each other things in the group's store before they share memory. Reading there ends when
the group's time-out has elapsed, or when a rank is lost: the native part keeps a link to each rank
from `init_process_group` on (csrc/group.h), which breaks when that rank's process exits.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import env, native
from symm_cp.memory import Group, StateKey

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class PeerLostError(RuntimeError):
    """A rank exited, or wrote nothing to the store in time, before the group shared memory."""


def timeout_of(process_group: dist.ProcessGroup) -> datetime.timedelta:
    """Returns the time-out of a process group's collectives."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return dist.default_pg_timeout


def wait_limit(group: Group) -> datetime.timedelta:
    """Returns how long ops wait for a peer: `SYMM_CP_TIMEOUT_MS`, or the group's time-out."""
    if env.timeout_ms():
        return datetime.timedelta(milliseconds=env.timeout_ms())
    return timeout_of(_resolve_process_group(group.name))  # type: ignore[arg-type]


def share(group: Group, key: str, text: str, *, seconds: float | None = None) -> list[str]:
    """Returns the text that each rank passes for a key. Collective.

    Raises `PeerLostError` when a rank exits first, or writes nothing within `seconds`, or within
    the group's time-out.
    """
    store = group.store()
    keys = [f"symm_cp/{key}/{rank}" for rank in range(group.world_size)]
    store.set(keys[group.rank], text)
    return read(group, store, keys, seconds=seconds)


def read(
    group: Group, store: dist.Store, keys: Sequence[str], *, seconds: float | None = None
) -> list[str]:
    """Returns what a store has under the key of each rank, when all have written theirs.

    Raises `PeerLostError` when a rank exits first, or the time-out elapses (see `share`).
    """
    limit = wait_limit(group).total_seconds()
    if seconds is not None:
        limit = min(limit, seconds)
    deadline = time.monotonic() + limit
    with _links(group) as lost:
        for rank, key in enumerate(keys):
            pause = _SHORTEST_PAUSE
            while not store.check([key]):
                late = time.monotonic() > deadline
                # A rank may have written its text just before it exited.
                if (late or lost(rank)) and not store.check([key]):
                    reason = (
                        f"wrote nothing to the store within {limit:g} s"
                        if late
                        else "died or left before its first call"
                    )
                    raise PeerLostError(
                        f"rank {rank} of group {group.name!r} {reason} (rank {group.rank} waited "
                        f"for {key!r})"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
    return [store.get(key).decode() for key in keys]


@contextmanager
def _links(group: Group) -> Iterator[Callable[[int], bool]]:
    """Yields a function that tells whether the link to a rank is broken; opens links lazily."""
    library = native.load()
    links: list[int] = []

    def lost(rank: int) -> bool:
        if rank == group.rank:
            return False
        if not links:
            links.append(library.symm_cp_probe_links(group.name.encode()))
        return bool(links[0] and library.symm_cp_link_lost(links[0], rank))

    try:
        yield lost
    finally:
        if links and links[0]:
            library.symm_cp_links_close(links[0])


def host_identity() -> str:
    """Returns a text that is the same for processes that can share memory, and differs otherwise.

    `SYMM_CP_HOST`, or the boot of the kernel and the network namespace.
    """
    chosen = env.host()
    if chosen is not None:
        return chosen
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"


# The process ids of a group's ranks; -1 for those that have no name here, and for this one.
_PROCESSES: StateKey[list[int]] = StateKey("processes")


def watched_processes(group: Group) -> list[int]:
    """Returns a pidfd of each rank's process, which the caller has to close, or -1.

    -1 stands for this process, and for processes on other hosts or in other pid namespaces.
    Collective at the first call for a group.
    """
    pids = group.find(_PROCESSES)
    if pids is None:
        pids = _process_ids(group)
        group.put(_PROCESSES, pids)
    return [_pidfd(pid) for pid in pids]


def _process_ids(group: Group) -> list[int]:
    namespace = f"{host_identity()} {os.readlink('/proc/self/ns/pid')}"
    texts = share(group, "process", f"{os.getpid()} {namespace}")
    processes = [text.split(" ", 1) for text in texts]
    pids = [int(pid) if place == namespace else -1 for pid, place in processes]
    pids[group.rank] = -1
    return pids


def _pidfd(pid: int) -> int:
    if pid < 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel; that a process has exited shows at the next time-out
        return -1
