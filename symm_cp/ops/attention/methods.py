"""The methods by which attention is split over ranks, and their mix over a mesh of two dimensions.

`allgather`
    Each rank attends with its queries, all heads, to the keys of all ranks, in place or as they
    arrive.
`ulysses`
    Ranks exchange parts of the sequence for heads: each attends with some heads to the whole
    sequence, and the results are exchanged back.
`auto`
    The one of the two that is likely faster (choice.py).

Over a mesh of two dimensions, ranks exchange heads along one, and gather keys along the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import native
from symm_cp.group.memory import GroupLike, group_name, unknown_group
from symm_cp.ops.attention.options import ScoreOptions
from symm_cp.ops.error_reports import reports_to_peers
from symm_cp.schedule.layout import SequenceLayout, among, pooled

MethodName: TypeAlias = Literal["allgather", "ulysses", "auto"]
#: One method, or one for each dimension of a mesh.
MethodLike: TypeAlias = "MethodName | tuple[MethodName, MethodName]"

METHODS: tuple[MethodName, ...] = ("allgather", "ulysses", "auto")
ROTATE_METHODS = ("allgather", "alltoall", "ulysses")
_rotate_method = ROTATE_METHODS[0]


def set_rotate_method(rotate_method: str) -> None:
    """Chooses how parts of the sequence travel: "allgather" (the default), "alltoall" or "ulysses".

    "allgather" and "alltoall" set how many remote shards the ops keep at a time: all or one. On CPU
    the ops read keys and values in place and keep none. The two differ in the gradients of keys and
    values: "allgather" stores the gradients from all ranks and adds them in rank order, "alltoall"
    passes them on in a ring and stores two; few tokens' gradients are added in rank order in any
    case, and on GPUs gradients of 1 GiB or more, of all ranks, travel in a ring in any case. Both
    apply to backward passes that run afterwards. With "ulysses", later attention calls, contexts
    and styles without a `method` exchange heads, and gradients travel as with "allgather". Must be
    set identically on all ranks. Raises `ValueError` for another name. Source: torch's
    `set_rotate_method`.
    """
    global _rotate_method
    if rotate_method not in ROTATE_METHODS:
        raise ValueError(f"set_rotate_method: {rotate_method=} must be one of {ROTATE_METHODS}")
    if rotate_method != _rotate_method:
        native.drop_plans()  # plans of attention follow the method
    _rotate_method = rotate_method


def rotate_method() -> str:
    """Returns how gradients of keys and values travel: "allgather" or "alltoall"."""
    return "alltoall" if _rotate_method == "alltoall" else "allgather"


def default_method() -> MethodName:
    """Returns the method of attention calls without a `method`."""
    return "ulysses" if _rotate_method == "ulysses" else "allgather"


@dataclass(frozen=True)
class Grid:
    """Ranks of a group in rows and columns: a column exchanges heads, a row gathers keys.

    `heads` and `keys` are the names of the groups of this rank's column and row, `columns[k][h]` is
    the rank in the whole group of rank h of column k.
    """

    heads: str
    keys: str
    columns: tuple[tuple[int, ...], ...]

    def column_of(self, rank: int) -> int:
        """Returns the column of a rank of the whole group, its rank in the group of keys."""
        return next(k for k, column in enumerate(self.columns) if rank in column)

    def of_heads(self, layout: SequenceLayout, rank: int) -> SequenceLayout:
        """Returns the layout of the positions of a rank's column, counted within the column."""
        return _among(layout, self.columns[self.column_of(rank)])

    def of_keys(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns the layout of the sequence over columns, each in the order of the sequence."""
        return _pooled(layout, self.columns)


_among, _pooled = lru_cache(maxsize=512)(among), lru_cache(maxsize=512)(pooled)


@dataclass(frozen=True)
class Method:
    """A method with the groups that it needs; `grid` only for a mix of two methods."""

    name: MethodName
    grid: Grid | None = None

    def __str__(self) -> str:
        return self.name if self.grid is None else "a mix of ulysses and allgather"

    def peers(self, group: str) -> str | tuple[str, ...]:
        """Returns the groups whose ranks wait for this one: one group, or two of a mesh."""
        return group if self.grid is None else (self.grid.heads, self.grid.keys)

    def as_options(self) -> dict[str, Any]:
        """Returns the method as ops take it, without options that have their default."""
        options: dict[str, Any] = {} if self.name == METHODS[0] else {"method": self.name}
        if self.grid is not None:
            columns = self.grid.columns
            options["method_groups"] = [self.grid.heads, self.grid.keys]
            options["method_columns"] = [len(columns), *itertools.chain(*columns)]
        return options

    @staticmethod
    def of(op: str, options: ScoreOptions) -> Method:
        """Returns the method of an op's options; raises `ValueError` for invalid ones."""
        groups, columns = options.method_groups, options.method_columns
        return _method(op, options.method, *(tuple(t) if t else () for t in (groups, columns)))


@lru_cache(maxsize=64)
def _method(op: str, name: str, groups: tuple[str, ...], columns: tuple[int, ...]) -> Method:
    if name not in METHODS:
        raise ValueError(f"{op}: unknown method={name!r}; choose one of {METHODS}")
    if not groups and not columns:
        return Method(name)
    ranks = columns[1:]
    if name != "ulysses" or len(groups) != 2 or not ranks or len(ranks) % max(1, columns[0]):
        raise ValueError(
            f"{op}: method={name!r} with method_groups={list(groups)} and method_columns="
            f"{list(columns)} is not a mix of methods"
        )
    each = len(ranks) // columns[0]
    grid = Grid(*groups, tuple(ranks[k : k + each] for k in range(0, len(ranks), each)))
    return Method(name, grid)


#: The methods of one group.
OF_NAME = {name: Method(name) for name in METHODS}
#: Each rank attends with its queries to all keys.
ALLGATHER = OF_NAME["allgather"]


def split_by(
    op: str, mesh: GroupLike, method: MethodLike | Method | None, *, argument: str = "mesh"
) -> tuple[str, Method]:
    """Returns the name of the group of all ranks of a mesh, and the method with its groups.

    Collective at the first call for a mesh of two dimensions. Raises `ValueError` and `TypeError`
    for a method that does not exist or does not fit the mesh; `argument` names the mesh in errors.
    """
    if isinstance(method, Method):  # as in each layer of a model
        return mesh if isinstance(mesh, str) else group_name(mesh), method
    return _split_by(op, mesh, method, argument)


def group_by(
    op: str, mesh: GroupLike, method: MethodLike | None, *, argument: str = "mesh"
) -> dist.ProcessGroup:
    """Returns the group of all ranks of a mesh; see `split_by`."""
    name, _ = split_by(op, mesh, method, argument=argument)
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise unknown_group(mesh) from error


@partial(reports_to_peers, group="mesh")
def _split_by(
    op: str, mesh: GroupLike, method: MethodLike | None, argument: str
) -> tuple[str, Method]:
    dims = mesh.ndim if isinstance(mesh, DeviceMesh) else 1
    if isinstance(method, tuple | list):
        if tuple(method) not in (("ulysses", "allgather"), ("allgather", "ulysses")):
            raise ValueError(
                f"{op}: {method=} of two dimensions must be ('ulysses', 'allgather') or "
                "('allgather', 'ulysses')"
            )
        if not isinstance(mesh, DeviceMesh) or dims != 2:
            of = f"{dims} dimension(s)" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise ValueError(
                f"{op}: {method=} requires {argument} to be a DeviceMesh of 2 dimensions, one for "
                f"each, got {of}"
            )
        return _of_mesh(op, mesh, method.index("ulysses"), argument)
    name: MethodName = default_method() if method is None else method
    if name not in METHODS:
        raise ValueError(
            f"{op}: unknown {method=}; choose one of {METHODS}, or for a mesh of two dimensions "
            "('ulysses', 'allgather') or ('allgather', 'ulysses')"
        )
    if dims == 2:
        assert isinstance(mesh, DeviceMesh)
        raise ValueError(
            f"{op}: {argument} has 2 dimensions, method={name!r} requires one: pick one, as in "
            f"mesh['{(mesh.mesh_dim_names or ('cp',))[-1]}'], or pass method=('ulysses', "
            "'allgather')"
        )
    return group_name(mesh), OF_NAME[name]


def _of_mesh(op: str, mesh: DeviceMesh, heads: int, argument: str) -> tuple[str, Method]:
    """Returns the result of `split_by` for a mesh whose dimension `heads` exchanges heads."""
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"{op}: {argument} has no dimension names: pass mesh_dim_names to init_device_mesh"
        )
    ranks = mesh.mesh.transpose(0, heads)  # (heads, keys)
    for dim in range(2):
        if not bool((ranks.diff(dim=dim) > 0).all()):
            raise ValueError(
                f"{op}: {argument} has ranks {mesh.mesh.tolist()}, which must ascend along both "
                "dimensions"
            )
    group = mesh._flatten().get_group()
    members = dist.get_process_group_ranks(group)
    columns = tuple(tuple(members.index(rank) for rank in column) for column in ranks.T.tolist())
    grid = Grid(
        str(mesh.get_group(heads).group_name), str(mesh.get_group(1 - heads).group_name), columns
    )
    return str(group.group_name), Method("ulysses", grid)
