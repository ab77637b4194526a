"""Calls over a mesh of two dimensions, which consist of calls over its rows and its columns.

A rank that fails in one of them has peers in others, whom it must tell there: each tells its row
and its column, and so all ranks of the mesh hear of it. They may have come further in some groups
than in others, and could not go on together: afterwards the mesh is not used any more. The group
of all its ranks takes no part in this, and stays usable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from symm_cp.hosts import on_this_host
from symm_cp.memory import StateKey, reported, resolve
from symm_cp.ops.common import END_OF_RECOMPUTATION

_FAILURES = StateKey[list[str]]("failures on a mesh")
_SHOWN = 200  # characters of the first failure in later errors


@contextlib.contextmanager
def telling(*groups: str) -> Iterator[None]:
    """Tells the ranks of groups of a mesh when the body raises; without groups does nothing.

    Raises `RuntimeError` if a call over the mesh has failed before.
    """
    for name in groups:
        if failures := resolve(name).state(_FAILURES, list):
            raise reported(
                RuntimeError(
                    "attention over a mesh of two dimensions: an earlier call failed "
                    f"({failures[0][:_SHOWN]}): make a new DeviceMesh on all ranks"
                )
            )
    try:
        yield
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except (Exception, KeyboardInterrupt) as error:
        give_up(groups, error)
        raise


def give_up(groups: tuple[str, ...], error: BaseException) -> None:
    """Tells the ranks of groups of a mesh that this rank makes no more calls there."""
    for name in groups:
        with contextlib.suppress(Exception):  # no group, nobody to tell
            group = resolve(name)
            failures = group.state(_FAILURES, list)
            failures.append(f"{type(error).__name__}: {error}")
            if len(failures) == 1:
                # The error itself may have been reported already, but to other ranks.
                on_this_host(group, "cpu").refuse("sync", RuntimeError(str(error)))
    if groups:
        reported(error)
