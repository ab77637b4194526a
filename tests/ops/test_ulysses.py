"""Attention by heads: every option against the dense reference, and against attention by keys."""

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
from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive, some
from tests.ops import test_attention_options as by_keys
from tests.ops import test_flex_attention as flex
from tests.ops.attention_cases import Case, layouts, positions, run, run_all
from tests.ops.test_attention_options import combined, made

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


# --- against the dense reference -------------------------------------------------------------

HEADS: list[dict[str, int]] = [
    {"heads": 4, "kv_heads": 4},
    {"heads": 8, "kv_heads": 2},
    {"heads": 8, "kv_heads": 1},
    {"heads": 6, "kv_heads": 6},
    {"heads": 6, "kv_heads": 2},
]


def by_heads(group: dist.ProcessGroup, cases: list[Case], seed: int) -> None:
    run_all(group, [replace(case, options={"method": "ulysses"}) for case in cases], seed)


def each(world_size: int) -> list[Case]:
    """Every option with every mask, in turn with each layout and numbers of heads."""
    turns = itertools.cycle(itertools.product(layouts(world_size), HEADS))
    found = []
    for option, mask in itertools.product([{}, *by_keys.OPTIONS], by_keys.MASKS):
        layout, heads = next(turns)
        found.append(made(layout, **{**mask, **option, **heads}))
    return found


@ON_DEVICES
def test_options(ranks: Ranks) -> None:
    seed = int(torch.randint(1 << 30, ()))
    ranks.run(3, by_heads, random.sample(each(3), 6), seed)


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_option_with_each_mask(ranks: Ranks, world_size: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    ranks.run(world_size, by_heads, each(world_size), seed)


@ON_DEVICES
@pytest.mark.parametrize("world_size", some(4, of=[1, 2, 3, 4]))
def test_combinations(ranks: Ranks, world_size: int) -> None:
    seed = random.randrange(1 << 30)
    chosen = random.Random(seed)
    cases = [
        replace(combined(layout, chosen), **chosen.choice(HEADS))
        for layout in layouts(world_size)
        for _ in range(4)
    ]
    ranks.run(world_size, by_heads, cases, seed)


@exhaustive
@pytest.mark.parametrize("world_size", [3])
def test_many_rows(ranks: Ranks, world_size: int) -> None:
    """Enough rows and keys for several blocks of the kernels, and tiles with bands."""
    layout = head_tail(600, world_size)
    options = {"softcap": 2.0, "sinks": True, "bias": True, "dropout_p": 0.2, "with_lse": True}
    cases = [
        made(layout, batch=1, heads=4, dtype=dtype, causal=True, features=16, **more)
        for dtype, more in itertools.product(
            (torch.float32, torch.bfloat16),
            ({**options, "value_features": 24}, {"left": 100}, {"kv_heads": 1, "with_lse": True}),
        )
    ]
    ranks.run(world_size, by_heads, cases, int(torch.randint(1 << 30, ())))


@exhaustive
@ON_DEVICES
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_queries_of_another_layout(ranks: Ranks, world_size: int) -> None:
    W = world_size
    keys, uneven = head_tail(11 * W + 2, W), sequential(7 * W + 1, W)
    same = sequential(11 * W + 2, W)  # the keys' sequence, spread differently
    heads = {"heads": 4, "kv_heads": 2}
    cases = [
        made(keys, uneven, bias=True, dropout_p=0.2, sinks=True, softcap=1.0, **heads),
        made(keys, uneven, padded=True, with_lse=True, **heads),
        made(keys, uneven, causal=True, left=5, **heads),
        made(keys, same, causal=True, bias=True, **heads),
        made(keys, same, causal=True, **heads),
        made(same, keys, left=3, dropout_p=0.3, **heads),
        made(sequential(0, W), uneven, sinks=True, with_lse=True, **heads),
        made(keys, sequential(0, W), sinks=True, with_lse=True, **heads),
    ]
    ranks.run(world_size, by_heads, cases, int(torch.randint(1 << 30, ())))


def cross(group: dist.ProcessGroup) -> None:
    """Without a mask queries of another length need no layout."""
    W, r = group.size(), group.rank()
    q, k, v = (torch.randn(1, 4, n * W, 8, dtype=torch.float64) for n in (3, 5, 5))
    mine = [t[:, :, r * n : (r + 1) * n] for t, n in ((q, 3), (k, 5), (v, 5))]
    out = symm_cp.all_gather_attention(*mine, group=group, method="ulysses")
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, whole[:, :, 3 * r : 3 * r + 3])


def test_queries_of_another_length_without_a_layout(ranks: Ranks) -> None:
    ranks.run(2, cross)


# --- flex attention --------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", some(of=[2, 4]))
def test_flex_masks(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, flex.plain, flex.masks, ULYSSES)


@pytest.mark.parametrize("world_size", some(of=[1, 3]))
def test_flex_score_mods(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, flex.plain, flex.scores, ULYSSES)


def by_head() -> Any:
    return itertools.islice((case for case in flex.masks() if case[0].startswith("by ")), 3)


@exhaustive
def test_flex_masks_that_differ_between_heads_and_samples(ranks: Ranks) -> None:
    ranks.run(3, flex.plain, by_head, ULYSSES)


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


def grouped(group: dist.ProcessGroup, seed: int) -> None:
    chosen, W = random.Random(seed), group.size()
    heads = ({"heads": 8, "kv_heads": 8}, {"heads": 4 * W, "kv_heads": 2 * W})
    with mock.patch.object(ulysses, "_groups", return_value=3):
        for layout in layouts(W):
            case = replace(combined(layout, chosen), **chosen.choice(heads))
            by_heads(group, [case], seed)
        for cases in (by_head(), itertools.islice(flex.scores(), 0, None, 3)):
            for _, case in cases:
                balancer, shape = flex.HeadTail(case.visible.shape[2], W), (2, 4, 4, 8)
                shape = (case.visible.shape[0], *shape[1:])
                flex.compare(group, case, balancer, case.block_mask(), shape=shape, method=ULYSSES)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
def test_one_group_of_heads_after_the_other(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, grouped, random.randrange(1 << 30))


# --- dropout, bits ---------------------------------------------------------------------------


def dropped(group: dist.ProcessGroup, layout: SequenceLayout, heads: tuple[int, int]) -> None:
    """One-hot values show which weights both methods drop in forward and backward passes."""
    (H, G), S, at = heads, layout.length, positions(layout, group.rank())
    q, k = torch.zeros(2, H, len(at), 4), torch.zeros(2, G, len(at), 4)
    v = torch.eye(S)[at].expand(2, G, -1, -1).clone().requires_grad_()
    options: dict[str, Any] = {
        "chunk_order": layout.chunk_order,
        "chunk_lengths": layout.chunk_lengths,
        "dropout_p": 0.4,
        "dropout_seed": torch.tensor(11),
        "enable_gqa": True,
    }
    found = []
    for method in ("allgather", "ulysses"):
        out = OP(q, k, v, group.group_name, method=method, **options)[0]
        (grad,) = torch.autograd.grad(out, v, torch.eye(S)[at].expand_as(out))
        found.append((out.detach() != 0, grad != 0))
    if len(at):
        assert 0.5 < found[0][0].float().mean() < 0.7
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_both_methods_drop_the_same_weights(ranks: Ranks, world_size: int) -> None:
    for layout in layouts(world_size):
        for heads in ((4, 4), (8, 2), (5, 5)):
            ranks.run(world_size, dropped, layout, heads)


def results(group: dist.ProcessGroup, inputs: list[torch.Tensor], **options: Any) -> Any:
    out, lse = OP(*inputs, group.group_name, method="ulysses", **options)
    return out, lse, *torch.autograd.grad([out, lse], inputs, [out.cos(), lse.sin()])


def repeated(group: dist.ProcessGroup) -> None:
    for dtype, kv_heads in itertools.product((torch.float32, torch.bfloat16), (1, 2, 8)):
        shapes = [(2, heads, 37, 16) for heads in (8, kv_heads, kv_heads)]
        inputs = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
        first = results(group, inputs, enable_gqa=True, is_causal=True)
        # Tensors of projections have the heads of a position next to each other.
        rows = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
        for others in (inputs, [t.requires_grad_() for t in rows]):
            again = results(group, others, enable_gqa=True, is_causal=True)
            assert all(map(torch.equal, again, first))


def test_equal_inputs_give_equal_bits(ranks: Ranks) -> None:
    ranks.run(4, repeated)


# --- errors ----------------------------------------------------------------------------------


def refused(group: dist.ProcessGroup) -> None:
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


def test_bad_calls_are_refused_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(3, refused)


def refused_in_a_mesh(group: dist.ProcessGroup) -> None:
    """A rank that fails tells the ranks that exchange heads with it and those that gather keys."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    name, method = split_by("op", mesh, ("ulysses", "allgather"))
    q = torch.randn(1, 2, 4, 8)
    wrong = q[..., :7] if group.rank() == 3 else q
    with pytest.raises((ValueError, RuntimeError), match="key of shape"):
        OP(q, wrong, q, name, **method.as_options())


@exhaustive
def test_a_rank_of_a_mesh_tells_all_others(ranks: Ranks) -> None:
    ranks.run(4, refused_in_a_mesh)


# --- modes -----------------------------------------------------------------------------------
