"""Whether the ranks of a group are alive, and how long to wait for them.

Ranks exchange facts through the group's store before they share memory. Reading there ends when
the group's time-out has elapsed, or when a rank is lost: the native part keeps a link to each rank
from `init_process_group` on (csrc/channel/group.h), which breaks when that rank's process exits.

A store may hold keys of an earlier group of the same name, perhaps of processes that are gone.
So the ranks of a group first agree on its *generation*, a random text in all their keys.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import env, native
from symm_cp.group.memory import Group, StateKey, before_call
from symm_cp.group.stores import TimedStore, wait_limit_of

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Seconds between two reads of the store, doubling from the first to the second number: short
# for ranks that come together, long so that hundreds of waiting ranks do not flood the store.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class PeerLostError(RuntimeError):
    """A rank exited, or wrote nothing to the store in time, before the group shared memory."""


def wait_limit(group: Group) -> datetime.timedelta:
    """Returns how long ops of a group wait for a peer."""
    return wait_limit_of(_resolve_process_group(group.name))  # type: ignore[arg-type]


@dataclass
class _Keys:
    """The prefix of a group's keys in the store, and how often each key was shared."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    #: The text that this rank drew, kept after a failed call: peers may have read it.
    drawn: str = field(default_factory=lambda: secrets.token_hex(8))
    generation: str = ""
    shared: Counter[str] = field(default_factory=Counter)


_KEYS: StateKey[_Keys] = StateKey("keys in the store")


def generation(group: Group) -> str:
    """Returns a text that a group's ranks share; earlier groups of the same name had other texts.

    Collective at the first call for a group. Raises `PeerLostError` when a rank exits first, or the
    time-out elapses.
    """
    keys = group.state(_KEYS, _Keys)
    with keys.lock:
        if not keys.generation:
            keys.generation = _agree_on_generation(group, keys.drawn)
        return keys.generation


def _agree_on_generation(group: Group, own: str) -> str:
    """Each rank writes the text that it has drawn, and the peers' texts that it has read.

    A record that contains a rank's own text was written after the rank drew the text, so a rank of
    this group wrote it; records of earlier groups never contain the text. Counting
    arriving ranks instead would fail where a rank of an earlier group died or never used that
    group.
    """
    store, rank = group.store(), group.rank
    keys = [f"symm_cp/generation/{group.world_size}/{r}" for r in range(group.world_size)]
    drawn = [""] * group.world_size
    drawn[rank] = own
    unsettled = set(range(group.world_size)) - {rank}

    def answers(peer: int) -> bool:
        if not store.check([keys[peer]]):
            return False
        record: list[str] = json.loads(store.get(keys[peer]))
        if drawn[peer] != record[peer]:
            drawn[peer] = record[peer]
            store.set(keys[rank], json.dumps(drawn))
        return record[rank] == own

    store.set(keys[rank], json.dumps(drawn))
    with _patience(group) as wait_for:
        while unsettled:
            # Reads all peers before it waits for one: each may need this rank's answer.
            unsettled = {peer for peer in unsettled if not answers(peer)}
            if unsettled:
                peer = min(unsettled)
                if wait_for(peer, keys[peer], lambda: answers(peer)):  # noqa: B023 (called now)
                    unsettled.discard(peer)
    return drawn[0]


def share(group: Group, key: str, text: str, *, seconds: float | None = None) -> list[str]:
    """Returns the text that each rank passes for a key. Collective; a key may be used again.

    Raises `PeerLostError` when a rank exits first, or writes nothing within `seconds`, or within
    the group's time-out.
    """
    if group.world_size == 1:
        return [text]
    begin, keys = generation(group), group.state(_KEYS, _Keys)
    with keys.lock:
        keys.shared[key] += 1
        number = keys.shared[key]
    store = group.store()
    by_rank = [f"symm_cp/{begin}/{key}/{number}/{rank}" for rank in range(group.world_size)]
    store.set(by_rank[group.rank], text)
    return read(group, store, by_rank, seconds=seconds)


def share_made(
    group: Group, key: str, make: Callable[[], str], *, seconds: float | None = None
) -> list[str]:
    """Returns the text that each rank makes for a key. Collective, like `share`.

    An exception of `make` is raised on this rank, and reported by a `RuntimeError` on the others.
    """
    try:
        text = make()
    except Exception as error:
        message = json.dumps({"error": f"{type(error).__name__}: {error}"})
        share(group, key, message, seconds=seconds)
        raise
    said_by_all = share(group, key, json.dumps({"text": text}), seconds=seconds)
    answers = [json.loads(said) for said in said_by_all]
    for rank, said in enumerate(answers):
        if "error" in said:
            raise RuntimeError(f"rank {rank} of group {group.name!r} failed: {said['error']}")
    return [said["text"] for said in answers]


def read(
    group: Group, store: TimedStore, keys: Sequence[str], *, seconds: float | None = None
) -> list[str]:
    """Returns the store's value under the key of each rank, when all have written theirs.

    Raises `PeerLostError` when a rank exits first, or the time-out elapses (see `share`).
    """
    wait_for_keys(group, store, keys, seconds=seconds)
    return [store.get(key).decode() for key in keys]


def wait_for_keys(
    group: Group, store: TimedStore, keys: Sequence[str], *, seconds: float | None = None
) -> None:
    """Returns when a store has the key of each rank; raises like `read`."""
    with _patience(group, seconds) as wait_for:
        for rank, key in enumerate(keys):
            while not store.check([key]):
                if wait_for(rank, key, lambda: store.check([key])):  # noqa: B023 (called now)
                    break


@contextmanager
def _patience(
    group: Group, seconds: float | None = None
) -> Iterator[Callable[[int, str, Callable[[], bool]], bool]]:
    """Yields a function that waits a little for the value that a rank writes under a key.

    When the rank is lost or the time-out has elapsed, it calls `is_there` once more, as the rank
    may have written just before it exited. Then it returns True, or raises `PeerLostError`.
    """
    limit = wait_limit(group).total_seconds()
    if seconds is not None:
        limit = min(limit, seconds)
    begin = time.monotonic()
    deadline = begin + limit
    say_at = begin + native.load().symm_cp_say_waits_after(-1) / 1000
    pauses: dict[str, float] = {}
    with _links(group) as lost:

        def wait_for(rank: int, key: str, is_there: Callable[[], bool]) -> bool:
            late, gone = time.monotonic() > deadline, lost(rank)
            if late or gone is not None:
                if is_there():
                    return True
                if gone is None:
                    reason = f"wrote nothing to the store within {limit:g} s"
                elif gone == rank:
                    reason = "died or left before its first call"
                else:
                    reason = f"died (noticed by rank {rank})"
                why = (
                    f"rank {rank if gone is None else gone} of group {group.name!r} {reason} (rank "
                    f"{group.rank} waited for {key!r})"
                )
                if gone is None and seconds is None:
                    group.timed_out(why)
                raise PeerLostError(why)
            nonlocal say_at
            if time.monotonic() > say_at:
                say_at = deadline  # once
                native.say(
                    f"still waiting, group {group.name!r}: rank {group.rank} waiting for rank "
                    f"{rank} to write {key!r}: {time.monotonic() - begin:.0f} s so far, time-out "
                    f"after {limit:g} s"
                )
            pause = pauses.get(key, _SHORTEST_PAUSE)
            time.sleep(pause)
            pauses[key] = min(2 * pause, _LONGEST_PAUSE)
            return False

        try:
            yield wait_for
        except KeyboardInterrupt as error:
            raise before_call(error) from None


@contextmanager
def _links(group: Group) -> Iterator[Callable[[int], int | None]]:
    """Yields a function that returns the lost rank that may keep a given rank from answering.

    This is the given rank itself if the link to it is broken, or a dead rank whose message it
    missed; None if no loss is known. Opens links lazily.
    """
    library = native.load()
    links: list[int] = []

    def lost(rank: int) -> int | None:
        if rank == group.rank:
            return None
        if not links:
            links.append(library.symm_cp_probe_links(group.name.encode()))
        gone = library.symm_cp_link_lost(links[0], rank) if links[0] else -1
        return None if gone < 0 else gone

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


# The process ids of a group's ranks; -1 for ranks whose ids are unknown here, and for this rank.
_PROCESSES: StateKey[list[int]] = StateKey("processes")


def watched_processes(group: Group) -> list[int]:
    """Returns a pidfd of each rank's process, which the caller must close, or -1.

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
    except OSError:  # an old kernel; the next time-out shows that a process has exited
        return -1
