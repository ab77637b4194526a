"""Groups that span hosts: every op against the same references as on one host."""

from __future__ import annotations

import datetime
import os
import random
import re
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import env, native
from symm_cp.group import hosts, liveness, memory
from symm_cp.schedule.layout import head_tail
from symm_cp.testing import Ranks, say
from tests.exhaustive import exhaustive, some
from tests.hosts.fabric import fabric
from tests.ops import (
    test_attention,
    test_attention_options,
    test_convolution,
    test_delta_rule,
    test_exchange_heads,
    test_experts,
    test_gradients,
    test_grouped_matmuls,
    test_halo,
    test_head_projection,
    test_random,
    test_round_trips,
    test_scan,
    test_uneven,
)

CPU = torch.device("cpu")
wait = torch.ops._c10d_functional.wait_tensor
#: World sizes, and numbers of ranks per host.
SPREADS = pytest.mark.parametrize(
    ("world_size", "per_host"), some((4, 2), of=[(2, 1), (3, 1), (4, 2), (4, 1)])
)


#: Facts found about the pool's groups, which outlive a test; by group name and ranks per host.
_found: dict[tuple[str, int], dict[str, hosts.Hosts | None]] = {}


def _forget(group: dist.ProcessGroup) -> None:
    """Deletes the ranks' hosts from the store; they change in these tests only."""
    dist.barrier(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    for key in ("host/cpu", "local/cpu"):
        store.delete_key(f"symm_cp/{key}/{group.rank()}")
    dist.distributed_c10d._get_default_store().delete_key(f"symm_cp/host/{dist.get_rank()}")
    dist.barrier(group)


@contextmanager
def spread_out(group: dist.ProcessGroup, per_host: int) -> Iterator[dist.ProcessGroup]:
    """Inside, ranks treat each other as ranks of several hosts."""
    state, key = memory.resolve(group), (group.group_name, per_host)
    before = state.state(hosts.SPREADS, dict)
    state.put(hosts.SPREADS, _found.setdefault(key, {}))
    os.environ["SYMM_CP_HOST"] = f"host {group.rank() // per_host}"
    set_on_one_host = native.load().symm_cp_set_on_one_host
    set_on_one_host(state.handle, 0)
    _forget(group)
    try:
        yield group
    finally:
        set_on_one_host(state.handle, 1)
        state.put(hosts.SPREADS, before)
        del os.environ["SYMM_CP_HOST"]
        _forget(group)


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


def on_hosts(
    group: dist.ProcessGroup, per_host: int, function: Callable[..., Any], *args: Any
) -> None:
    with spread_out(group, per_host) as wide:
        found = hosts.hosts_of(memory.resolve(wide), CPU)
        assert found is not None
        assert len(found.ranks) == group.size() // per_host
        function(wide, *args)


@SPREADS
def test_all_ops(ranks: Ranks, world_size: int, per_host: int) -> None:
    ranks.run(world_size, on_hosts, per_host, all_ops, random.randrange(1 << 30))


def exchanges(group: dist.ProcessGroup) -> None:
    test_exchange_heads.exchanges(group)
    test_head_projection.projects(group, True, torch.float64)
    test_head_projection.collects(group, True, torch.float64)
    test_round_trips.pipelines(group, 2, torch.float32)
    test_experts.many_agree(group, range(8), [torch.float64])
    test_grouped_matmuls.many_agree(group, range(4), [torch.float64])


@SPREADS
def test_exchanges_of_heads_and_tokens(ranks: Ranks, world_size: int, per_host: int) -> None:
    ranks.run(world_size, on_hosts, per_host, exchanges)


def recurrent(group: dist.ProcessGroup) -> None:
    sizes = [3, 1, 6, 2][: group.size()]
    test_halo.exchanges(group, sizes, [torch.float32])
    test_scan.scans(group, [torch.float64])
    for by_feature in (False, True):
        test_delta_rule.runs(group, sizes, by_feature=by_feature)
    test_delta_rule.runs(group, sizes, by_feature=False, erasing=False)
    test_convolution.runs(group, sizes, [0, 2, sum(sizes)])


@exhaustive
@SPREADS
def test_recurrent_layers(ranks: Ranks, world_size: int, per_host: int) -> None:
    ranks.run(world_size, on_hosts, per_host, recurrent)


@exhaustive
def test_gradients_of_gathers(ranks: Ranks) -> None:
    ranks.run(4, on_hosts, 2, test_gradients.gather_gradients)


def uneven_parts(group: dist.ProcessGroup) -> None:
    test_uneven.gathers(group, torch.float32)
    test_uneven.scatters(group, torch.float32)
    test_uneven.scaled(group)
    test_uneven.collective_gradients(group)


@SPREADS
@pytest.mark.exhaustive
def test_uneven_parts(ranks: Ranks, world_size: int, per_host: int) -> None:
    ranks.run(world_size, on_hosts, per_host, uneven_parts)


def bitwise(group: dist.ProcessGroup) -> None:
    x = torch.randn(8 * group.size(), 16).bfloat16()
    first = symm_cp.matmul_reduce_scatter(x, x[:16].t()[:, :5], scatter_dim=0, group=group)
    for _ in range(5):
        again = symm_cp.matmul_reduce_scatter(x, x[:16].t()[:, :5], scatter_dim=0, group=group)
        assert torch.equal(first, again)


def test_sums_do_not_depend_on_timing(ranks: Ranks) -> None:
    ranks.run(4, on_hosts, 2, bitwise)


def refuses(group: dist.ProcessGroup) -> None:
    """Three ranks are refused if two of them are on one host."""
    with spread_out(group, 2) as wide:
        tensor = torch.randn(2, 2)
        with pytest.raises(
            NotImplementedError,
            match=r"\[\[0, 1\], \[2\]\]; every host must hold the same",
        ):
            symm_cp.all_gather_matmul(tensor, tensor, group=wide)
    # On one host the same group still works.
    symm_cp.all_gather_matmul(tensor, tensor, group=group)


def test_hosts_with_different_numbers_of_ranks_are_refused(ranks: Ranks) -> None:
    ranks.run(3, refuses)


def needs_one_host(group: dist.ProcessGroup) -> None:
    with spread_out(group, 1) as wide:
        tensor = torch.randn(4, 4)
        ops = torch.ops.symm_mem
        for call in (
            lambda: ops.one_shot_all_reduce(tensor, "sum", wide.group_name),
            lambda: ops.two_shot_all_reduce_(tensor, "sum", wide.group_name),
            lambda: ops.reduce_scatter_out(tensor, wide.group_name, False, tensor[:2].clone()),
            lambda: ops.get_remote_tensors(tensor, wide.group_name),
        ):
            with pytest.raises(NotImplementedError, match=r": the ranks of group .* on 2 hosts"):
                call()
        out = symm_cp.all_gather_matmul(tensor, tensor, group=wide)
        assert out.shape == (8, 4)


def test_ops_on_peers_memory_need_one_host(ranks: Ranks) -> None:
    ranks.run(2, needs_one_host)


def test_spread() -> None:
    def spread(text: str) -> tuple[tuple[int, ...], ...]:
        return hosts.spread([hosts.Place(host) for host in text])

    assert spread("aaa") == ((0, 1, 2),)
    assert spread("baba") == ((0, 2), (1, 3))


def connected(links: str, host: str = "aaaa") -> list[hosts.Place]:
    """Ranks with one GPU each and links such as "01 12"; a rank sees all GPUs of its host."""
    known = {frozenset(link) for link in links.split()}
    ranks = [str(rank) for rank in range(len(host))]

    def unreachable(rank: str) -> tuple[str, ...]:
        return tuple(p for p in ranks if p != rank and frozenset((rank, p)) not in known)

    return [hosts.Place(host[int(rank)], rank, unreachable(rank)) for rank in ranks]


def test_gpus_that_do_not_reach_each_other_are_as_on_several_hosts() -> None:
    everything = "01 02 03 12 13 23"
    assert hosts.spread(connected(everything)) == ((0, 1, 2, 3),)
    assert hosts.spread(connected("01 23")) == ((0, 1), (2, 3))
    assert hosts.spread(connected("02 13")) == ((0, 2), (1, 3))
    for others in ("", "01 12 23", "01 02 12", "01"):  # none; a chain; parts of several sizes
        assert hosts.spread(connected(others)) == ((0,), (1,), (2,), (3,))
    assert hosts.spread(connected("01 23", "aabb")) == ((0, 1), (2, 3))
    assert hosts.spread(connected("01", "aabb")) == ((0,), (1,), (2,), (3,))
    # A rank may reach a GPU that it does not see, and ranks that share a GPU reach each other.
    assert hosts.spread([hosts.Place("a", gpu) for gpu in "0123"]) == ((0, 1, 2, 3),)
    assert hosts.spread([hosts.Place("a", gpu, ("1",)) for gpu in "00"]) == ((0, 1),)


def gpus_apart(group: dist.ProcessGroup, seed: int) -> None:
    """Two pairs of GPUs on one host, with no link between the pairs."""
    state, rank = memory.resolve(group), group.rank()
    before = state.state(hosts.SPREADS, dict)
    state.put(hosts.SPREADS, {})
    _forget(group)
    here = connected("01 23")[rank]
    patch = unittest.mock.patch.object(hosts, "_place", return_value=here)
    try:
        with patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            symm_cp.reserve(group, 1 << 12)
            test_random.gathers(group, 0)
            found = hosts.hosts_of(state, CPU)
        assert found is not None
        assert (found.ranks, found.host, found.place) == (((0, 1), (2, 3)), rank // 2, rank % 2)
        said = [str(w.message) for w in caught if "symm_cp" in str(w.message)]
        assert len(said) == (rank == 0)
        assert all("ranks [0, 1], [2, 3] exchange data as if on different hosts" in s for s in said)
        all_ops(group, seed, layouts=1)
    finally:
        state.put(hosts.SPREADS, before)
        _forget(group)


@pytest.mark.exhaustive
def test_ops_between_gpus_that_do_not_reach_each_other(ranks: Ranks) -> None:
    ranks.run(4, gpus_apart, random.randrange(1 << 30))


def test_identity_is_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYMM_CP_HOST", raising=False)
    assert re.fullmatch(r"[0-9a-f-]{36} net:\[\d+\]", liveness.host_identity())
    monkeypatch.setenv("SYMM_CP_HOST", "here")
    assert env.host() == liveness.host_identity() == "here"


# --- network namespaces ------------------------------------------------------------------------


def over_the_network(group: dist.ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    laid_out = test_random.laid_out
    # No tensor is symmetric between hosts.
    test_random.laid_out = lambda x, group, kind: laid_out(x, group, kind % 3)
    found = hosts.hosts_of(memory.resolve(group), CPU)
    assert found is not None
    all_ops(group, seed, layouts=1)
    say(f"right on {len(found.ranks)} hosts")


@pytest.mark.exhaustive
def test_three_hosts_of_two_ranks_each(ranks: Ranks) -> None:
    """The ranks find out by themselves that they are on several hosts."""
    with fabric(3) as made:
        places = [made.place(rank // 2) for rank in range(6)]
        with ranks.own(6, over_the_network, random.randrange(1 << 30), places=places) as running:
            assert set(running.hear_all(timeout=120)) == {"right on 3 hosts"}


def until_the_link_is_cut(group: dist.ProcessGroup) -> None:
    tensor = torch.randn(64, 64)
    symm_cp.all_gather_matmul(tensor, tensor, group=group)
    say("ready")
    try:
        while True:
            symm_cp.all_gather_matmul(tensor, tensor, group=group)
    except RuntimeError as error:
        say(str(error))


@pytest.mark.exhaustive
def test_a_link_that_goes_down_is_an_error_that_names_the_ranks(ranks: Ranks) -> None:
    with fabric(2) as made:
        places = [made.place(rank // 2) for rank in range(4)]
        limit = datetime.timedelta(seconds=2)
        with ranks.own(4, until_the_link_is_cut, places=places, group_timeout=limit) as running:
            running.hear_all()
            for rank in made.cut(1, running, per_host=2):
                line = running.hear(rank, timeout=20)
                peer = (rank + 2) % 4
                lost = f"rank {rank} lost the link from rank {peer} or to rank {peer}"
                # Or the other rank of this host noticed first, and says so here.
                other = f"rank {rank ^ 1} lost the link from rank {peer ^ 1}"
                assert lost in line or other in line, line
                assert "fused_all_gather_matmul" in line
