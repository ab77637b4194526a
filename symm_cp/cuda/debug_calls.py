"""Compares the calls of ranks before any data moves, with `SYMM_CP_DEBUG=1`.

On CPU each call carries a record of itself (csrc/channel/channel.h). Streams compare nothing but
flags: ranks that disagree would wait for each other, or mix their bytes. In debug mode they compare
their calls through the group's store, which takes a round trip for each call.
"""

from __future__ import annotations

import datetime

from symm_cp import env
from symm_cp.group.liveness import generation, wait_limit
from symm_cp.group.memory import Group, StateKey, reported


class _Compared:
    """The calls that a group's ranks have compared, numbered identically on all ranks.

    For each number, either all ranks make the call, or one stops waiting for a rank, which then
    skips that number. The first rank that records the outcome decides it for all.
    """

    def __init__(self) -> None:
        self.number, self.met = 1, 0

    def agree(self, group: Group, call_name: bytes, limit: datetime.timedelta) -> None:
        """Raises `RuntimeError` on every rank unless all ranks make this call now."""
        store, begin = group.store(), f"symm_cp/{generation(group)}/call"

        def key(number: int, what: object) -> str:
            return f"{begin}/{number}/{what}"

        while store.check([key(self.number, "end")]):  # ended without this rank
            self.number += 1
        number = self.number
        self.number += 1
        store.set(key(number, group.rank), call_name)
        end, missing = _MET, None
        for rank in range(group.world_size):
            try:
                store.wait([key(number, rank)], limit)
            except RuntimeError as error:
                end, missing = f"rank {group.rank} gave up", error
                break
        end = store.compare_set(key(number, "end"), "", end).decode()
        if end != _MET:
            raise reported(
                RuntimeError(
                    f"symm_cp: {call_name.decode()}: rank {rank} has not made its call number "
                    f"{number} of group {group.name!r} within {limit.total_seconds():g} s"
                    if missing is not None
                    else f"symm_cp: {call_name.decode()}: {end} waiting for call number {number} "
                    f"of group {group.name!r}"
                )
            ) from missing
        calls = [store.get(key(number, rank)).decode() for rank in range(group.world_size)]
        # Every rank has reached this call: no rank needs the keys of earlier calls.
        for before in range(self.met, number):
            store.delete_key(key(before, group.rank))
            if group.rank == 0:
                store.delete_key(key(before, "end"))
        self.met = number
        if len(set(calls)) > 1:
            by_rank = ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            raise reported(RuntimeError(f"symm_cp: ranks disagree: {by_rank}"))


_MET = "met"
_COMPARED: StateKey[_Compared] = StateKey("compared calls")


def agree(group: Group, call_name: bytes) -> None:
    """Raises `RuntimeError` on every rank unless all ranks make this call now; only in debug mode.

    Also raises when a rank makes no call within the time-out.
    """
    if env.debug() and group.world_size > 1:
        group.state(_COMPARED, _Compared).agree(group, call_name, wait_limit(group))
