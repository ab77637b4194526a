"""Calls that consist of calls over several groups, as those of the rows and columns of a mesh.

A rank that fails has peers in its row and in its column, whom it must tell: they fail as well and
tell theirs, and so all ranks of the mesh hear of it. Nobody is out of step afterwards, and the mesh
stays usable: every rank takes part in, or refuses, as many calls of a group as its peers there. For
that a rank refuses the next call of each group but the one whose call has failed on it, which has
told the ranks of that group itself. The group of all ranks takes no part in this.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.group.hosts import on_this_host
from symm_cp.group.memory import is_reported, reported, resolve
from symm_cp.ops.common import END_OF_RECOMPUTATION

_RANK = re.compile(r"(?<!global )\brank (\d+)\b")


@contextlib.contextmanager
def propagates_failure(
    *groups: str, calling: str | None = None, mesh: bool = False
) -> Iterator[None]:
    """Tells the ranks of groups when the body raises; without groups does nothing.

    The body makes calls of the group `calling`, and of the others none: its ranks are told only if
    no call of it did. Over a mesh errors of its calls name global ranks.
    """
    try:
        yield
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except (Exception, KeyboardInterrupt) as error:
        if calling is not None:
            if not is_reported(error):
                groups = (calling, *groups)
            elif mesh and not _is_told(error):
                _name_global_ranks(calling, error)
        if groups:
            give_up(groups, error)
        raise


def give_up(groups: tuple[str, ...], error: BaseException) -> None:
    """Tells the ranks of groups of a mesh that this rank does not make its next call there.

    Does nothing if this error was told to the ranks of the mesh before.
    """
    if _is_told(error):
        return
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    for name in groups:
        with contextlib.suppress(Exception):  # no group, nobody to tell
            # The error itself may have been reported already, but to other ranks.
            told = RuntimeError(f"{kind}{error}")
            on_this_host(resolve(name), "cpu").refuse("sync", told)
    with contextlib.suppress(AttributeError):  # a type whose objects take no attributes
        error._symm_cp_told_mesh = True  # type: ignore[attr-defined]
    reported(error)


def _is_told(error: BaseException) -> bool:
    return getattr(error, "_symm_cp_told_mesh", False)


def _name_global_ranks(name: str, error: BaseException) -> None:
    """Has an error of a call over a row or a column name ranks as users know them."""
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    members = dist.get_process_group_ranks(group)

    def globally(found: re.Match[str]) -> str:
        rank = int(found[1])
        return f"global rank {members[rank]}" if rank < len(members) else found[0]

    text, count = _RANK.subn(globally, str(error))
    if count == 0:
        return
    # torch describes the groups of a DeviceMesh so.
    dim = group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else ""
    along = f"along mesh dimension {dim!r}, " if dim else ""
    error.args = (f"{text} ({along}ranks {members})",)
