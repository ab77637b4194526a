"""Worlds of the pool's ranks with another backend, for programs that use the default group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_GROUPS_OF_A_WORLD = 100


def _forget_meshes() -> None:
    """Clears DTensor's caches: a mesh of one world compares equal to a mesh of another world."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()


@contextmanager
def world(group: dist.ProcessGroup, backend: str) -> Iterator[dist.ProcessGroup]:
    """Makes the ranks of `group` the world, with another backend; `group` cannot be used inside."""
    outer = c10d._world
    rank, size, timeout = group.rank(), group.size(), c10d._get_default_timeout(backend)
    # This counter names groups; names must not be reused within the life of a process.
    outer.group_count += _GROUPS_OF_A_WORLD
    count, before = outer.group_count, outer.default_pg
    store = dist.PrefixStore(f"world {count} of {size}", c10d._get_default_store())
    state = {
        name: type(getattr(c10d, name))()
        for name in (
            "_pg_map",
            "_pg_names",
            "_pg_group_ranks",
            "_pg_backend_config",
            "_tags_to_pg",
            "_pg_to_tag",
        )
    }
    with (
        mock.patch.multiple(c10d, _group_count=count, **state),
        mock.patch.object(sys, "excepthook", sys.excepthook),
    ):
        outer.default_pg = None
        _forget_meshes()
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
            assert dist.group.WORLD is not None
            yield dist.group.WORLD
        finally:
            # Not destroy_process_group, which forgets the groups of all worlds.
            for made in reversed(list(c10d._pg_names)):
                made.shutdown()
                _unregister_process_group(made.group_name)
            _forget_meshes()
            c10d._update_default_pg(before)
