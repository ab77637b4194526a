"""Attention by heads: shares of heads, flex attention, meshes, groups of heads and errors."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import symm_cp
from symm_cp.group.memory import resolve
from symm_cp.ops.attention import ulysses
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.ops.attention.methods import Method, split_by
from symm_cp.ops.heads.shares import shares_of
from symm_cp.schedule import sequential
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive, some
from tests.ops import test_flex_attention as flex
from tests.ops.attention_cases import layouts, run
from tests.ops.test_attention_options import HEADS, combined

OP = torch.ops.symm_mem.fused_all_gather_attention
ULYSSES = Method("ulysses")
ON_DEVICES = device.devices(*device.NAMES)


# --- which heads a rank has ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (6, 6), (6, 3), (6, 2), (7, 7), (12, 4)]
)
def test_every_head_is_attended_with_once_and_by_the_key_head_that_it_shares(
    heads: int, kv_heads: int
) -> None:
    for ranks in range(1, heads + 1):
        shares = shares_of("op", heads, kv_heads, ranks)
        assert [head for part in shares.queries for head in range(*part)] == list(range(heads))
        counts = [end - begin for begin, end in shares.queries]
        assert max(counts) - min(counts) <= 1
        for rank, ((begin, end), (first, last)) in enumerate(
            zip(shares.queries, shares.keys, strict=True)
        ):
            each = shares.key_of_each(rank)
            if each is None:  # as kernels share them
                assert (end - begin) % (last - first) == 0
                size = (end - begin) // (last - first)
                each = tuple(i // size for i in range(end - begin))
            wanted = [head * kv_heads // heads for head in range(begin, end)]
            assert [first + i for i in each] == wanted
            assert sorted(set(wanted)) == list(range(first, last))


# --- flex attention --------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", some(of=[2, 3, 4]))
def test_flex_masks(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, flex.plain, flex.masks, ULYSSES)


@pytest.mark.parametrize("world_size", some(of=[1, 3]))
def test_flex_score_mods(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, flex.plain, flex.scores, ULYSSES)


def by_head() -> Any:
    return itertools.islice((case for case in flex.masks() if case[0].startswith("by ")), 3)


# --- over a mesh of two dimensions -----------------------------------------------------------


def mixed(group: dist.ProcessGroup, seed: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    chosen = random.Random(seed)
    for names in (("ulysses", "allgather"), ("allgather", "ulysses")):
        name, method = split_by("op", mesh, names)
        whole = torch.distributed.distributed_c10d._resolve_process_group(name)
        for layout in layouts(4):
            case = combined(layout, chosen)
            case = replace(case, **chosen.choice(HEADS[:3]))
            run(whole, replace(case, options=method.as_options()), chosen.randrange(1 << 30))
        for _, case in itertools.islice(flex.masks(), 0, None, 5):
            balancer = flex.HeadTail(case.visible.shape[2], 4)
            shape = (case.visible.shape[0], 4, 2, 8)
            mask = case.block_mask()
            flex.compare(whole, case, balancer, mask, shape=shape, method=method)


@exhaustive
def test_mixed_with_attention_by_keys(ranks: Ranks) -> None:
    for _ in range(5):
        ranks.run(4, mixed, random.randrange(1 << 30))


# --- groups of heads, of which one travels while another is attended with ---------------------


def test_groups_of_heads_are_apart() -> None:
    for heads, kv_heads, ranks, most in ((8, 8, 2, 4), (12, 4, 2, 4), (7, 7, 3, 4), (16, 16, 3, 2)):
        whole = shares_of("op", heads, kv_heads, ranks)
        groups = whole.in_groups(most)
        held = [min(end - begin for begin, end in whole.keys)]
        assert len(groups) == min(most, *held)
        for rank in range(ranks):
            for parts, all_of_rank in (
                ([group.queries[rank] for group in groups], whole.queries[rank]),
                ([group.keys[rank] for group in groups], whole.keys[rank]),
            ):
                assert [i for part in parts for i in range(*part)] == list(range(*all_of_rank))
            assert all(group.key_of_each(rank) is None for group in groups)
    # Ranks that share key heads, and key heads that are shared unequally, take one group.
    assert len(shares_of("op", 8, 2, 4).in_groups(4)) == 1
    assert len(shares_of("op", 8, 2, 3).in_groups(4)) == 1


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
@pytest.mark.ranks
def test_one_group_of_heads_after_the_other(group: dist.ProcessGroup, world_size: int) -> None:
    seed = random.randrange(1 << 30)
    chosen, W = random.Random(seed), group.size()
    heads = ({"heads": 8, "kv_heads": 8}, {"heads": 4 * W, "kv_heads": 2 * W})
    with mock.patch.object(ulysses, "_groups", return_value=3):
        for layout in layouts(W):
            case = replace(combined(layout, chosen), **chosen.choice(heads))
            run(group, replace(case, options={"method": "ulysses"}), seed)
        for cases in (by_head(), itertools.islice(flex.scores(), 0, None, 3)):
            for _, case in cases:
                balancer, shape = flex.HeadTail(case.visible.shape[2], W), (2, 4, 4, 8)
                shape = (case.visible.shape[0], *shape[1:])
                flex.compare(group, case, balancer, case.block_mask(), shape=shape, method=ULYSSES)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_bad_calls_are_refused_on_all_ranks(group: dist.ProcessGroup) -> None:
    W, name = group.size(), group.group_name
    few = torch.randn(1, W - 1, 4, 8)
    layout = sequential(4 * W, W)
    with pytest.raises(ValueError, match=f"{W - 1} heads for {W} ranks"):
        symm_cp.all_gather_attention(few, few, few, group=group, method="ulysses")
    dist.barrier(group)
    with pytest.raises(ValueError, match=f"{W - 1} heads for {W} ranks"):
        flex_all_gather_attention(
            few, few, few, group=resolve(group), layout=layout, method=ULYSSES
        )
    q = torch.randn(1, W, 4, 8)
    dist.barrier(group)
    # On one rank only: the others are told.
    wrong = torch.randn(1, W, 4, 7) if group.rank() == 0 else q
    with pytest.raises((ValueError, RuntimeError), match="key of shape"):
        OP(q, wrong, q, name, method="ulysses")
    dist.barrier(group)
    with pytest.raises(RuntimeError, match="fused_all_gather_attention"):
        OP(q, q, q, name, method="ulysses", is_causal=group.rank() == 0)
    dist.barrier(group)
    assert OP(q, q, q, name, method="ulysses")[0].isfinite().all()


@exhaustive
@pytest.mark.ranks(4)
def test_a_rank_of_a_mesh_tells_all_others(group: dist.ProcessGroup) -> None:
    """A rank that fails tells the ranks that exchange heads with it and those that gather keys."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    name, method = split_by("op", mesh, ("ulysses", "allgather"))
    q = torch.randn(1, 2, 4, 8)
    wrong = q[..., :7] if group.rank() == 3 else q
    with pytest.raises((ValueError, RuntimeError), match="key of shape"):
        OP(q, wrong, q, name, **method.as_options())
