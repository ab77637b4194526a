"""How a failure before an op reaches the peers, over a group or over a mesh.

Calls over a mesh consist of calls over its rows and columns. A rank that fails reports the error to
the peers in its row and its column; these fail as well and report to theirs, until the error has
reached all ranks of the mesh. Afterwards all ranks are in step and the mesh stays usable: the ranks
of a group have run or refused the same number of calls. To get there, a rank refuses the next call
of each group except the group whose call failed on it: that call has already reported the error to
its group. The group of all ranks takes no part in this.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.group.memory import is_reported, reported, resolve
from symm_cp.ops.error_reports import END_OF_RECOMPUTATION, report

P = ParamSpec("P")
R = TypeVar("R")

_RANK = re.compile(r"(?<!global )\brank (\d+)\b")


def reporting_to_peers(
    group: str | tuple[str, ...], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Calls a function; reports its error to the group's other ranks, which may wait for this one.

    A tuple of groups belongs to a mesh over which ranks attend. Does not wait for peers.
    """
    # torch.compiler.is_compiling(), inlined to one call: this runs in each layer.
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return function(*args, **kwargs)
    if not isinstance(group, str):
        with propagates_failure(*group):
            return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except Exception as error:
        report(lambda *_: group, "sync", error, args, kwargs)
        raise


@contextlib.contextmanager
def propagates_failure(
    *groups: str, calling: str | None = None, mesh: bool = False
) -> Iterator[None]:
    """Reports to the ranks of groups when the body raises; without groups does nothing.

    The body calls ops over the group `calling` only; that group gets a report only if none of these
    calls reported the error. Over a mesh, errors of these calls name global ranks.
    """
    try:
        yield
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except (Exception, KeyboardInterrupt) as error:
        if calling is not None:
            if not is_reported(error):
                groups = (calling, *groups)
            elif mesh and not _is_reported(error):
                _name_global_ranks(calling, error)
        if groups:
            give_up(groups, error)
        raise


def give_up(groups: tuple[str, ...], error: BaseException) -> None:
    """Reports to groups of a mesh that this rank will not make its next call there.

    Does nothing if this error was reported to the ranks of the mesh before.
    """
    if _is_reported(error):
        return
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    for name in groups:
        with contextlib.suppress(Exception):  # no group, no ranks to report to
            # The error itself may have been reported already, but to other ranks.
            told = RuntimeError(f"{kind}{error}")
            resolve(name).refuse("sync", told)
    with contextlib.suppress(AttributeError):  # a type whose objects take no attributes
        error._symm_cp_reported_to_mesh = True  # type: ignore[attr-defined]
    reported(error)


def _is_reported(error: BaseException) -> bool:
    return getattr(error, "_symm_cp_reported_to_mesh", False)


def _name_global_ranks(name: str, error: BaseException) -> None:
    """Rewrites ranks in an error of a call over a row or a column as global ranks."""
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    members = dist.get_process_group_ranks(group)

    def globally(found: re.Match[str]) -> str:
        rank = int(found[1])
        return f"global rank {members[rank]}" if rank < len(members) else found[0]

    text, count = _RANK.subn(globally, str(error))
    if count == 0:
        return
    # torch describes the groups of a DeviceMesh as mesh_<dimension>.
    dim = group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else ""
    along = f"along mesh dimension {dim!r}, " if dim else ""
    error.args = (f"{text} ({along}ranks {members})",)
