"""`symm-cp doctor` beside running ranks: where their memory lies, by first touch and by policy."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp import cores
from symm_cp.commands.doctor import memory_of_ranks, owned
from symm_cp.testing import Ranks

_MIB = 1 << 20
#: The number of set_mempolicy on x86-64 and elsewhere; the policy that binds memory to nodes.
_SET_MEMPOLICY, _MPOL_BIND = 238 if platform.machine() == "x86_64" else 237, 2
#: As Linux 6.1 writes it on a machine with two nodes, partly under `numactl --membind 1`.
NUMA_MAPS = r"""
7f00 default file=/memfd:symm_cp:41:group\0400\040(deleted) N0=512 N1=256 kernelpagesize_kB=4
7f04 default file=/memfd:symm_cp:41:group\0400\040(deleted) N1=1 kernelpagesize_kB=2048
7f0000800000 default file=/memfd:symm_cp:42:tensors\040(deleted) N0=1024 kernelpagesize_kB=4
7f0000c00000 bind:1 file=/memfd:symm_cp:41:tensors\040(deleted) N1=1024 kernelpagesize_kB=4
7f0001000000 default file=/memfd:symm_cp-board\040(deleted) dirty=1 N0=1 kernelpagesize_kB=4
7f0001400000 default heap anon=12 dirty=12 N0=12 kernelpagesize_kB=4
"""


def test_what_a_process_owns() -> None:
    assert owned(41, NUMA_MAPS) == {
        "group 0": {0: 2 * _MIB, 1: 3 * _MIB},
        "tensors": {1: 4 * _MIB},
    }


def processes(folder: Path, process: int, numa_maps: str) -> Path:
    own = folder / str(process)
    own.mkdir()
    (own / "maps").write_text(numa_maps)
    (own / "numa_maps").write_text(numa_maps)
    return folder


@pytest.mark.parametrize(("node", "state"), [(0, "info"), (1, "missing")])
def test_memory_of_another_node_is_reported_with_advice(
    tmp_path: Path, node: int, state: str
) -> None:
    """This process may use CPUs of node 0 only."""
    system = tmp_path / "system"
    for number, cpus in ((0, cores.ranges(os.sched_getaffinity(0))), (1, "4090-4095")):
        folder = system / f"node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    line = f"7f00 default file=/memfd:symm_cp:{os.getpid()}:tensors N{node}=1 kernelpagesize_kB=4\n"
    folder = tmp_path / "proc"
    folder.mkdir()
    (found,) = memory_of_ranks(processes(folder, os.getpid(), line), system)
    assert (found.state, found.detail) == (state, f"0.0 MiB on node {node}")
    assert ("symm-cp run --numa" in found.advice) is (state == "missing")


def report(group: dist.ProcessGroup) -> tuple[int, list[str]]:
    own = dist.new_group(list(range(group.size())), backend="symm_cp")
    x = symm_mem.empty((_MIB,), device="cpu")
    symm_mem.rendezvous(x, own)
    dist.all_reduce(torch.ones(_MIB), group=own)
    lines = [f"{found.name}: {found.detail}" for found in memory_of_ranks()]
    dist.barrier(group)
    return os.getpid(), lines


def test_running_ranks_are_seen_from_any_process(ranks: Ranks) -> None:
    for _, lines in (reports := ranks.run(2, report)):
        for rank, (process, _) in enumerate(reports):
            of_process = [line for line in lines if line.startswith(f"process {process}, ")]
            assert any(
                re.search(rf"group .*, rank {rank}: [\d.]+ MiB", each) for each in of_process
            )
            assert any(re.search(r"tensors: [\d.]+ MiB on node", each) for each in of_process)


def under_a_policy(group: dist.ProcessGroup) -> list[str]:
    """Binds memory to node 0 before it is taken, as `numactl --membind 0` does."""
    libc, nodes = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1)
    if libc.syscall(_SET_MEMPOLICY, _MPOL_BIND, ctypes.byref(nodes), ctypes.c_ulong(64)):
        return [os.strerror(ctypes.get_errno())]
    x = symm_mem.empty((_MIB,), device="cpu")
    symm_mem.rendezvous(x, group)
    text = Path("/proc/self/numa_maps").read_text()
    assert re.search(r" bind:0 file=/memfd:symm_cp:\d+:tensors", text), text
    own = f"process {os.getpid()}, "
    return [found.detail for found in memory_of_ranks() if found.name.startswith(own)]


def test_memory_of_ranks_that_are_bound_to_a_node(ranks: Ranks) -> None:
    with ranks.own(2, under_a_policy) as running:
        for outcome in running.outcomes():
            assert outcome.result is not None, outcome
            if outcome.result == [os.strerror(errno.EPERM)]:
                pytest.skip("this container may not set policies of memory")
            assert outcome.result == ["4.0 MiB on node 0"], outcome
