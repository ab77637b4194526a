"""Groups whose ranks work apart: every op against the same references as on one host."""

from __future__ import annotations

import datetime
import random
import re
import unittest.mock
import warnings

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda, env
from symm_cp.group import hosts, liveness, memory
from symm_cp.ops.common import device_kernels
from symm_cp.schedule.layout import head_tail
from symm_cp.testing import Ranks, say
from tests.cuda.simulated import simulation
from tests.exhaustive import exhaustive, some
from tests.hosts.apart import CPU, forget, run_apart
from tests.hosts.fabric import fabric
from tests.ops import (
    test_attention,
    test_attention_options,
    test_convolution,
    test_exchange_heads,
    test_experts,
    test_gradients,
    test_grouped_matmuls,
    test_halo,
    test_head_projection,
    test_random,
    test_recurrence,
    test_round_trips,
    test_scan,
)

wait = torch.ops._c10d_functional.wait_tensor
#: The host of each rank.
HOSTS = pytest.mark.parametrize("of_ranks", some("001", of=["01", "001", "0101"]))


def all_ops(group: dist.ProcessGroup, seed: int, layouts: int = 2) -> None:
    """Runs all ops, forward and backward."""
    for index in range(4):
        test_random.gathers(group, index)
        test_random.scatters(group, index)
        test_random.all_reduces(group, index)
        test_random.scaled_gathers(group, index)
        test_random.scaled_scatters(group, index)
    W, rank = group.size(), group.rank()
    rows, full = torch.randn(W, 3, 4), torch.randn(W, W * 2, 3)
    gathered = symm_cp.low_contention_all_gather(rows[rank], group=group)
    scattered = symm_cp.low_contention_reduce_scatter(full[rank], group=group)
    assert torch.equal(wait(gathered), rows.flatten(0, 1))
    torch.testing.assert_close(wait(scattered), full.sum(0).chunk(W)[rank])
    lone = torch.ones(1, 2)[:, ::2]  # contiguous, whatever its strides are
    assert symm_cp.all_gather_matmul(lone, lone, group=group).tolist() == [[1.0]] * W
    leaf = rows[rank].clone().requires_grad_()
    key, value = symm_cp.all_gather_kv(leaf, leaf * 2, seq_dim=0, group=group)
    (key.sum() + (value * value).sum()).backward()
    torch.testing.assert_close(leaf.grad, W * (1 + 8 * rows[rank]))
    chosen = random.Random(seed)
    cases = [
        test_attention.Case(layout, dtype=torch.float64, rotate=rotate, **mask)
        for layout in chosen.sample(test_attention.layouts(W), layouts)
        for mask in test_attention.masks(layout)
        for rotate in ("allgather", "alltoall")
    ]
    test_attention.run_all(group, cases, seed)
    layout = head_tail(12 * W + 3, W)
    mixed = [test_attention_options.combined(layout, chosen) for _ in range(3)]
    test_attention_options.run_all(group, mixed, seed)


@HOSTS
def test_all_ops(ranks: Ranks, of_ranks: str) -> None:
    ranks.run(len(of_ranks), run_apart, of_ranks, all_ops, random.randrange(1 << 30))


def exchanges(group: dist.ProcessGroup) -> None:
    test_exchange_heads.exchanges(group)
    test_head_projection.projects(group, True, torch.float64)
    test_head_projection.collects(group, True, torch.float64)
    test_round_trips.pipelines(group, 2, torch.float32)
    test_experts.many_agree(group, range(8), [torch.float64])
    test_grouped_matmuls.many_agree(group, range(4), [torch.float64])


def recurrent(group: dist.ProcessGroup) -> None:
    sizes = [3, 1, 6, 2][: group.size()]
    test_halo.exchanges(group, sizes, [torch.float32])
    test_scan.scans(group, [torch.float64])
    for rule in ("delta", "delta, by feature", "linear"):
        test_recurrence.runs(group, rule, "any sizes", "whole")
    test_convolution.runs(group, "any sizes", "packed")


@HOSTS
@pytest.mark.parametrize(
    "family", some(exchanges, of=[exchanges, recurrent, test_gradients.gather_gradients])
)
def test_families(ranks: Ranks, of_ranks: str, family: object) -> None:
    ranks.run(len(of_ranks), run_apart, of_ranks, family)


def sums(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Products that are exact, and sums of them that are rounded."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        x, eye = torch.randn(8 * group.size(), 16).to(dtype), torch.eye(16).to(dtype)
        x *= 1 + group.rank()
        results += [
            symm_cp.matmul_reduce_scatter(x, eye, scatter_dim=0, group=group),
            symm_cp.matmul_all_reduce(x[: 5 + group.size()], eye, group=group),
        ]
    return results


@pytest.mark.ranks(4)
def test_sums_have_the_bits_of_one_host(group: dist.ProcessGroup) -> None:
    of_ranks = "0001"
    state = torch.get_rng_state()
    together = sums(group)
    torch.set_rng_state(state)
    for one, other in zip(together, run_apart(group, of_ranks, sums), strict=True):
        assert torch.equal(one, other)


def needs_one_host(group: dist.ProcessGroup) -> None:
    tensor = torch.randn(4, 4)
    ops = torch.ops.symm_mem
    for call in (
        lambda: ops.one_shot_all_reduce(tensor, "sum", group.group_name),
        lambda: ops.two_shot_all_reduce_(tensor, "sum", group.group_name),
        lambda: ops.reduce_scatter_out(tensor, group.group_name, False, tensor[:2].clone()),
        lambda: ops.get_remote_tensors(tensor, group.group_name),
    ):
        with pytest.raises(NotImplementedError, match=r"its ranks are on 2 hosts.*: use the coll"):
            call()
    symm_cp.reserve(group, 1 << 12)
    # A rank that refuses its call reports that to nobody: the next call works.
    with pytest.raises(ValueError, match="gather_dim"):
        symm_cp.all_gather_matmul(tensor, tensor, gather_dim=5, group=group)
    assert symm_cp.all_gather_matmul(tensor, tensor, group=group).shape == (8, 4)


def test_ops_on_peers_memory_need_one_host(ranks: Ranks) -> None:
    ranks.run(2, run_apart, "01", needs_one_host)


# --- which ranks work apart -------------------------------------------------------------------


def connected(links: str, host: str = "aaaa") -> list[hosts.HostPlace]:
    """Ranks with one GPU each and links such as "01 12"; a rank sees all GPUs of its host."""
    known = {frozenset(link) for link in links.split()}
    ranks = [str(rank) for rank in range(len(host))]

    def unreachable(rank: str) -> tuple[str, ...]:
        return tuple(p for p in ranks if p != rank and frozenset((rank, p)) not in known)

    return [hosts.HostPlace(host[int(rank)], rank, unreachable(rank)) for rank in ranks]


def test_which_places_are_apart() -> None:
    assert not hosts.places_apart([hosts.HostPlace("a")] * 3)
    assert "on 2 hosts" in hosts.places_apart([hosts.HostPlace(host) for host in "baba"])
    assert not hosts.places_apart(connected("01 02 03 12 13 23"))
    for others in ("", "01 23", "01 12 23"):
        assert "do not all reach each other" in hosts.places_apart(connected(others))
    # A rank may reach a GPU that it does not see, and ranks that share a GPU reach each other.
    assert not hosts.places_apart([hosts.HostPlace("a", gpu) for gpu in "0123"])
    assert not hosts.places_apart([hosts.HostPlace("a", gpu, ("1",)) for gpu in "00"])


def gpus_apart(group: dist.ProcessGroup) -> None:
    """GPUs of one host without links."""
    state, rank = memory.resolve(group), group.rank()
    before = state.state(hosts.APART, dict)
    state.put(hosts.APART, {})
    forget(group)
    patch = unittest.mock.patch.object(hosts, "_place", return_value=connected("", "aa")[rank])
    try:
        with patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            symm_cp.reserve(group, 1 << 12)
            test_random.gathers(group, 0)
        said = [str(warning.message) for warning in caught if "symm_cp" in str(warning.message)]
        assert len(said) == (rank == 0)
        assert all("over the process group: its GPUs do not all reach" in text for text in said)
        assert not memory.resolve(group).workspace("sync").slot_bytes
    finally:
        state.put(hosts.APART, before)
        forget(group)


def test_gpus_that_do_not_reach_each_other_warn_once(ranks: Ranks) -> None:
    with ranks.own(2, gpus_apart) as running:
        assert [outcome.failure for outcome in running.outcomes()] == ["", ""]


def without_signals(group: dist.ProcessGroup) -> object:
    own = dist.new_group(list(range(group.size())))
    with simulation(passes=False):
        for index in range(4):
            test_random.gathers(own, index)
            test_random.scatters(own, index)
        gathered = device_kernels["_low_contention_all_gather"](torch.ones(3), own.group_name)
        assert wait(gathered).tolist() == [1.0] * 3 * group.size()
        found = hosts.apart_of(memory.resolve(own), CPU)
        assert not cuda.workspaces_of(memory.resolve(own)).current, "ranks waited for signals"
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
def test_ranks_that_cannot_signal_each_other(ranks: Ranks, world_size: int) -> None:
    expected = hosts.Apart("streams cannot signal", failed_check=True)
    assert ranks.run(world_size, without_signals) == [expected] * world_size


def test_identity_is_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYMM_CP_HOST", raising=False)
    assert re.fullmatch(r"[0-9a-f-]{36} net:\[\d+\]", liveness.host_identity())
    monkeypatch.setenv("SYMM_CP_HOST", "here")
    assert env.host() == liveness.host_identity() == "here"


# --- network namespaces -----------------------------------------------------------------------


def over_the_network(group: dist.ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    laid_out = test_random.laid_out
    # No tensor is symmetric between hosts.
    test_random.laid_out = lambda x, group, kind: laid_out(x, group, kind % 3)
    all_ops(group, seed, layouts=1)
    found = hosts.apart_of(memory.resolve(group), CPU)
    say(found and found.reason)


@exhaustive
def test_three_hosts_of_two_ranks_each(ranks: Ranks) -> None:
    """The ranks find out by themselves that they are on several hosts."""
    with fabric(3) as made:
        places = [made.place(rank // 2) for rank in range(6)]
        with ranks.own(6, over_the_network, random.randrange(1 << 30), places=places) as running:
            said = set(running.hear_all(timeout=120))
        assert said == {"its ranks are on 3 hosts, which share no memory"}


def until_an_error(group: dist.ProcessGroup) -> None:
    tensor = torch.randn(64, 64)
    symm_cp.all_gather_matmul(tensor, tensor, group=group)
    say("ready")
    try:
        while True:
            symm_cp.all_gather_matmul(tensor, tensor, group=group)
    except RuntimeError as error:
        say(str(error))


@pytest.mark.parametrize("cut", some(False, of=[False, True]), ids=["killed", "link down"])
def test_losing_a_host_is_an_error_on_all_ranks(ranks: Ranks, cut: bool) -> None:
    with fabric(2) as made:
        places = [made.place(rank // 2) for rank in range(4)]
        limit = datetime.timedelta(seconds=2 if cut else 60)
        with ranks.own(4, until_an_error, places=places, group_timeout=limit) as running:
            assert running.hear_all() == ["ready"] * 4
            if cut:
                survivors = made.cut(1, running, per_host=2)
            else:
                running.kill(3)
                survivors = [0, 1, 2]
            for rank in survivors:
                line = running.hear(rank, timeout=20)
                assert "all_gather_matmul" in line, line
                assert f"on rank {rank} " in line, line
