"""With `SYMM_CP_DEBUG=1`: ranks compare their calls on a device before any data moves.

On CPU each call carries a record of what it is (csrc/channel/channel.h). Streams compare nothing
but flags: ranks that disagree would wait for each other, or mix their bytes. In debug mode they
compare their calls through the group's store, which takes a round trip for each call.
"""

from __future__ import annotations

import itertools

from symm_cp import env
from symm_cp.group.liveness import generation, wait_limit
from symm_cp.group.memory import Group, StateKey, reported

# The numbers of the calls that a group's ranks have compared.
_NUMBERS: StateKey[itertools.count[int]] = StateKey("compared calls")


def agree(group: Group, call_name: bytes) -> None:
    """Raises `RuntimeError` on every rank unless all ranks make this call now; only in debug mode.

    Also when a rank makes no call within the time-out.
    """
    if not env.debug() or group.world_size == 1:
        return
    store, begin = group.store(), f"symm_cp/{generation(group)}/call"
    numbers = group.state(_NUMBERS, _numbers)
    number = next(numbers)
    store.set(f"{begin}/{number}/{group.rank}", call_name)
    limit = wait_limit(group)
    calls = []
    for rank in range(group.world_size):
        try:
            store.wait([f"{begin}/{number}/{rank}"], limit)
        except RuntimeError as error:
            raise reported(
                RuntimeError(
                    f"symm_cp: {call_name.decode()}: rank {rank} has not made its call number "
                    f"{number} of group {group.name!r} within {limit.total_seconds():g} s"
                )
            ) from error
        calls.append(store.get(f"{begin}/{number}/{rank}").decode())
    # Every rank has made this call, so every rank has read the keys of the last one.
    store.delete_key(f"{begin}/{number - 1}/{group.rank}")
    if len(set(calls)) > 1:
        by_rank = ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
        raise reported(RuntimeError(f"symm_cp: ranks disagree: {by_rank}"))


def _numbers() -> itertools.count[int]:
    return itertools.count(1)
