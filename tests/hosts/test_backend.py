"""The backend in groups whose ranks are on several hosts: gloo; shared memory within a host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import symm_cp
from symm_cp.testing import Ranks, say
from tests.backend import sharded
from tests.backend.test_programs import assert_same
from tests.backend.world import world
from tests.exhaustive import exhaustive, some
from tests.hosts.apart import CPU, on_hosts
from tests.hosts.fabric import fabric

BACKEND = "symm_cp"


def backend_of(group: dist.ProcessGroup) -> str:
    return group._get_backend(CPU).name()


def handed_over(group: dist.ProcessGroup, of_ranks: str) -> str:
    with on_hosts(group, of_ranks), world(group, BACKEND) as span:
        rank, W = span.rank(), span.size()
        total = torch.full((5,), float(rank))
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        shard = torch.arange(12.0).view(2, 6) + rank
        gathered = symm_cp.all_gather_matmul(shard, torch.eye(6), group=span)
        work.wait()
        assert total.tolist() == [W * (W - 1) / 2] * 5
        assert torch.equal(gathered, torch.cat([shard - rank + peer for peer in range(W)]))
        return backend_of(span)


@pytest.mark.parametrize("of_ranks", some("001", of=["01", "001", "0101", "0123"]))
def test_a_group_on_several_hosts_is_a_gloo_group(ranks: Ranks, of_ranks: str) -> None:
    with ranks.own(len(of_ranks), handed_over, of_ranks) as running:
        outcomes = running.outcomes()
    assert [each.failure for each in outcomes] == [""] * len(of_ranks)
    assert {each.result for each in outcomes} == {"gloo"}
    said = [each.output.count("uses gloo: its ranks are on") for each in outcomes]
    assert said == [1] + [0] * (len(of_ranks) - 1)


def on_a_mesh(group: dist.ProcessGroup) -> None:
    """The axis that stays on a host has shared memory."""
    with world(group, BACKEND):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        for axis in ("hosts", "ranks"):
            along = mesh[axis].get_group()
            x = torch.full((3, 3), 1.0 + dist.get_rank())
            members = dist.get_process_group_ranks(along)
            dist.all_reduce(x, group=along)
            assert torch.equal(x, torch.full((3, 3), sum(1.0 + rank for rank in members)))
            gathered = symm_cp.all_gather_matmul(x, torch.eye(3), group=along)
            assert torch.equal(gathered, torch.cat([x, x]))
        dist.barrier()
        say([backend_of(mesh[axis].get_group()) for axis in ("hosts", "ranks")])


def test_meshes_have_shared_memory_within_a_host(ranks: Ranks) -> None:
    with fabric(2) as made:
        places = [made.place(rank // 2) for rank in range(4)]
        with ranks.own(4, on_a_mesh, places=places) as running:
            assert running.hear_all() == [["gloo", BACKEND]] * 4


@exhaustive
@pytest.mark.ranks(4)
def test_hybrid_sharding(group: dist.ProcessGroup) -> None:
    """FSDP within a host, replicas between hosts."""
    results = []
    for backend, of_ranks in (("gloo", "0000"), (BACKEND, "0011")):
        torch.manual_seed(1)
        with on_hosts(group, of_ranks), world(group, backend):
            results.append(sharded.hsdp())
    assert_same(*results)
