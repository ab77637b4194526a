"""Groups of the pool whose ranks take each other for ranks of several hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from symm_cp import native
from symm_cp.group import hosts, memory

CPU = torch.device("cpu")

#: Facts found about the pool's groups, which outlive a test; by group name and the ranks' hosts.
_found: dict[tuple[str, str], dict[str, hosts.Apart | None]] = {}


def forget(group: dist.ProcessGroup) -> None:
    """Deletes the ranks' places from the store; they change in these tests only. Collective."""
    dist.barrier(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    store.delete_key(f"symm_cp/host/cpu/{group.rank()}")
    dist.distributed_c10d._get_default_store().delete_key(f"symm_cp/host/{dist.get_rank()}")
    dist.barrier(group)


@contextmanager
def on_hosts(group: dist.ProcessGroup, of_ranks: str) -> Iterator[None]:
    """Groups created inside have ranks on these hosts: "001" puts two ranks on one host."""
    with mock.patch.dict(os.environ, SYMM_CP_HOST=f"host {of_ranks[group.rank()]}"):
        yield


@contextmanager
def spread_out(group: dist.ProcessGroup, of_ranks: str) -> Iterator[dist.ProcessGroup]:
    """Inside, the ranks of a group are on these hosts."""
    state, key = memory.resolve(group), (group.group_name, of_ranks)
    before = state.state(hosts.APART, dict)
    state.put(hosts.APART, _found.setdefault(key, {}))
    set_on_one_host = native.load().symm_cp_set_on_one_host
    set_on_one_host(state.handle, 0)
    try:
        with on_hosts(group, of_ranks):
            forget(group)
            yield group
    finally:
        set_on_one_host(state.handle, 1)
        state.put(hosts.APART, before)
        forget(group)


def run_apart(
    group: dist.ProcessGroup, of_ranks: str, function: Callable[..., Any], *args: Any
) -> Any:
    """Calls `function(group, *args)` on ranks that are on these hosts."""
    with spread_out(group, of_ranks) as wide:
        found = hosts.apart_of(memory.resolve(wide), CPU)
        assert found == hosts.Apart(
            f"its ranks are on {len(set(of_ranks))} hosts, which share no memory"
        )
        return function(wide, *args)
