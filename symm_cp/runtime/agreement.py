"""With `SYMM_CP_DEBUG=1`: ranks whose calls on a device differ are told so, before anything moves.

On CPU each call carries a record of what it is (csrc/channel.h). Streams look at nothing but flags:
ranks that disagree on a device would wait for each other, or mix their bytes. In debug mode they
compare what they call by way of the group's store. That takes a round trip for each call.
"""

from __future__ import annotations

from symm_cp import env
from symm_cp.memory import Group, reported


def agree(group: Group, what: bytes) -> None:
    """Raises `RuntimeError` on every rank unless all ranks make this call now; only in debug mode.

    Also when a rank makes no call within the time-out.
    """
    if not env.debug() or group.world_size == 1:
        return
    store = group.store()
    with group.lock:
        group.compared_calls += 1
        number = group.compared_calls
    store.set(_key(number, group.rank), what)
    limit = group.wait_limit()
    found = []
    for rank in range(group.world_size):
        try:
            store.wait([_key(number, rank)], limit)
        except RuntimeError as error:
            raise reported(
                RuntimeError(
                    f"symm_cp: {what.decode()}: rank {rank} has not made its call number {number} "
                    f"of group {group.name!r} within {limit.total_seconds():g} s"
                )
            ) from error
        found.append(store.get(_key(number, rank)))
    # All have come here, so all have read what there was before.
    store.delete_key(_key(number - 1, group.rank))
    if len(set(found)) > 1:
        calls = ", ".join(f"rank {rank} calls {text.decode()}" for rank, text in enumerate(found))
        raise reported(RuntimeError(f"symm_cp: ranks disagree: {calls}"))


def _key(number: int, rank: int) -> str:
    return f"symm_cp/call/{number}/{rank}"
