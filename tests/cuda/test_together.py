"""Attention to the keys of all peers at once, on streams: kernels, masks and layouts."""

from __future__ import annotations

import unittest.mock
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp import cuda, tuning
from symm_cp.group import memory
from symm_cp.ops.attention import kernels, together
from symm_cp.schedule import CAUSAL, NO_MASK, Mask, SequenceLayout, head_tail, sequential
from symm_cp.schedule.tiles import held_by_others, tiles, tiles_of_others
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation
from tests.exhaustive import exhaustive
from tests.ops import test_attention

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 4])


def pairs_of(layout: SequenceLayout, mask: Mask, rank: int) -> set[tuple[int, int]]:
    """The (query, key) positions that the tiles of the peers' keys cover."""
    queries = list(layout.positions(rank))
    keys = [
        position
        for _, span in held_by_others(layout, rank)
        for position in range(span.start, span.start + span.length)
    ]
    found = []
    for tile in tiles_of_others(layout, mask, rank):
        for i in range(tile.q_end - tile.q_begin):
            for j in range(tile.k_end - tile.k_begin):
                low = tile.low is None or tile.low <= j - i
                if low and (tile.high is None or j - i <= tile.high):
                    found.append((queries[tile.q_begin + i], keys[tile.k_begin + j]))
    assert len(found) == len(set(found))  # no pair twice
    return set(found)


@WORLD_SIZES
def test_tiles_have_all_pairs_that_the_mask_allows(world_size: int) -> None:
    for layout in test_attention.layouts(world_size):
        length = layout.length
        for mask in (
            NO_MASK,
            CAUSAL,
            Mask(left=5, right=2),
            Mask(right=0, documents=(0, length // 3, length)),
            Mask(right=0, prefix=4),
            Mask(keys=((1, 5), (7, length))),
        ):
            seen = torch.zeros(length, length, dtype=torch.bool)
            for region in mask.regions:
                for i in range(region.first, min(region.end, length)):
                    for keys in region.keys:
                        for j in range(keys.first, min(keys.end, length)):
                            left = keys.left is None or i - j <= keys.left
                            seen[i, j] |= left and (keys.right is None or j - i <= keys.right)
            for rank in range(world_size):
                own = set(layout.positions(rank))
                expected = {
                    (i, j) for i in own for j in range(length) if j not in own and seen[i, j]
                }
                assert pairs_of(layout, mask, rank) == expected


def test_few_tiles() -> None:
    """There is one tile for each chunk of queries; by shards, there are more or as many."""
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            assert len(tiles_of_others(sequential(64 * ranks, ranks), NO_MASK, rank)) == 1
            one_chunk = tiles_of_others(sequential(64 * ranks, ranks), CAUSAL, rank)
            assert len(one_chunk) == (rank > 0)
            two_chunks = tiles_of_others(head_tail(64 * ranks, ranks), CAUSAL, rank)
            # The chunks of the last rank adjoin, and all of the first one's keys are behind them.
            assert len(two_chunks) == (2 if 0 < rank < ranks - 1 else 1)
            by_shards = [
                tile
                for owner in range(ranks)
                if owner != rank
                for tile in tiles(head_tail(64 * ranks, ranks), CAUSAL, rank, owner)
            ]
            assert len(two_chunks) <= len(by_shards)


def called(group: dist.ProcessGroup, mode: dict[str, Any], seed: int) -> None:
    """It runs where it is forced and fits, with the expected number of kernels in each pass."""
    W, rank = group.size(), group.rank()
    test_case = test_attention.Case
    causal = head_tail(12 * W, W)
    cases = [
        (test_case(sequential(8 * W, W)), 1 + 1),
        (test_case(causal, causal=True), 1 + (2 if 0 < rank < W - 1 else 1)),
        (
            test_case(causal, causal=True, heads=4, dtype=torch.bfloat16),
            1 + (2 if 0 < rank < W - 1 else 1),
        ),
        (test_case(causal, queries=5, dtype=torch.float64), 1 + 1),
        (test_case(head_tail(12 * W + 5, W), strided="rows first"), 1 + 1),
        (test_case(test_attention.layouts(W)[3], causal=True), None),
    ]
    forward = unittest.mock.Mock(wraps=kernels.forward)
    backward = unittest.mock.Mock(wraps=kernels.backward)

    with simulation(**mode) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        for number, (case, expected) in enumerate(cases):
            with (
                unittest.mock.patch.object(
                    together, "consume_keys", wraps=together.consume_keys
                ) as consumed,
                unittest.mock.patch.object(
                    together, "reduce_gradients", wraps=together.reduce_gradients
                ) as reduced,
            ):
                test_attention.run(group, case, seed + number)
            assert consumed.call_count >= 1, case
            assert reduced.call_count >= 1, case
            rows = len(list(case.layout.positions(rank)))
            queries = rows if case.queries is None else case.queries
            q, k = (torch.randn(1, n, r, 32) for n, r in ((case.heads, queries), (2, rows)))
            q, k = (t.to(case.dtype).requires_grad_() for t in (q, k))
            forward.reset_mock()
            backward.reset_mock()
            with (
                unittest.mock.patch.object(kernels, "forward", forward),
                unittest.mock.patch.object(kernels, "backward", backward),
                tuning.forced("together"),
            ):
                out, _ = test_attention.OP(q, k, k, group.group_name, **case.arguments())
                out.sum().backward()
            found = forward.call_count, backward.call_count
            assert expected is None or found == (expected, expected), (case, found)


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"graph": True},
        pytest.param({"one_queue": True, "driver_version": 12050}, marks=exhaustive),
        pytest.param({"lazy_loading": True, "multiprocessors": True}, marks=exhaustive),
    ],
    ids=str,
)
@WORLD_SIZES
def test_it_runs_where_it_is_forced(ranks: Ranks, world_size: int, mode: dict[str, Any]) -> None:
    ranks.run(world_size, called, mode, int(torch.randint(1 << 30, ())))


def options(group: dist.ProcessGroup, seed: int) -> None:
    """Sinks, prefixes, scales, hidden keys and documents give the same results as by shards."""
    W, rank = group.size(), group.rank()
    length = 20 * W
    torch.manual_seed(seed)
    balancer = symm_cp.HeadTail(length, W)
    rows = balancer.positions(rank)
    q, k, v = (
        torch.randn(1, heads, length, n)[:, :, rows] for heads, n in ((4, 24), (2, 24), (2, 24))
    )
    key_mask = torch.ones(1, length, dtype=torch.bool)
    key_mask[:, -7:] = False
    given: list[dict[str, Any]] = [
        {"sinks": torch.randn(4)},
        {"prefix_lengths": 9, "is_causal": True},
        {"is_causal": True, "scale": 0.3},
        {"key_mask": key_mask},
        {"cu_seqlens": [0, length // 2, length], "is_causal": True},
    ]
    with simulation():
        for more in given:
            found = []
            for algorithm in ("pipeline", "together"):
                with tuning.forced(algorithm):
                    out, lse = symm_cp.all_gather_attention(
                        q, k, v, group=group, load_balancer=balancer, enable_gqa=True,
                        return_lse=True, **more,
                    )  # fmt: skip
                found.append((out, lse))
            torch.testing.assert_close(found[0], found[1])


@WORLD_SIZES
def test_options(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, options, int(torch.randint(1 << 30, ())))


def refused(group: dist.ProcessGroup) -> None:
    """Batches, soft caps, windows and calls that need too many bytes go by shards."""
    W, calls = group.size(), 0

    def consume_keys(*args: Any) -> Any:
        raise AssertionError

    with (
        simulation(plan_at=-1),
        unittest.mock.patch.object(together, "consume_keys", consume_keys),
        tuning.forced("together"),
    ):
        for batch, more in (
            (2, {}),
            (1, {"softcap": 4.0}),
            (1, {"window_left": 2, "window_right": 0}),
        ):
            q = torch.randn(batch, 2, 16, 8)
            symm_cp.all_gather_attention(q, q, q, group=group, **more)
            calls += 1
        with unittest.mock.patch.object(together, "_MOST_BYTES", 4 * 2 * 16 * W * 16 - 1):
            q = torch.randn(1, 2, 16, 8)
            symm_cp.all_gather_attention(q, q, q, group=group)


@pytest.mark.parametrize("world_size", [3])
def test_what_does_not_fit_goes_by_shards(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, refused)


def under_modes(group: dist.ProcessGroup, seed: int) -> None:
    """Autocast, checkpoints, inference mode and torch.compile agree with dense attention."""
    W, rank = group.size(), group.rank()
    balancer = symm_cp.HeadTail(12 * W, W)
    rows = balancer.positions(rank)
    torch.manual_seed(seed)
    whole = [torch.randn(1, heads, 12 * W, 16) for heads in (4, 2, 2)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return symm_cp.all_gather_attention(
            q, k, v, group=group, is_causal=True, load_balancer=balancer, enable_gqa=True
        )

    def dense(*own: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *own, is_causal=True, enable_gqa=True
        )

    def stepped(step: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = step(*leaves)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    own = [t[:, :, rows] for t in whole]
    expected = [t[:, :, rows] for t in stepped(dense, whole)]
    with (
        simulation(plan_at=-1),
        tuning.forced("together"),
        unittest.mock.patch.object(together, "consume_keys", wraps=together.consume_keys) as used,
    ):
        torch.testing.assert_close(stepped(attend, own), expected)
        recomputed = stepped(partial(checkpoint, attend, use_reentrant=False), own)
        torch.testing.assert_close(recomputed, expected)
        assert used.call_count == 1 + 2
        compiled = stepped(torch.compile(attend, fullgraph=True), own)
        torch.testing.assert_close(compiled, expected)
        with torch.inference_mode():
            out = attend(*own)
        torch.testing.assert_close(out, expected[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = stepped(attend, own)
        assert low[0].dtype == torch.bfloat16
        assert all(grad.dtype == torch.float32 for grad in low[1:])
        for mine, exact in zip(low, expected, strict=True):
            assert (mine - exact).norm() < 0.05 * exact.norm()
        assert used.call_count == 1 + 2 + 1 + 1 + 1


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=exhaustive) for n in (3, 4))])
def test_under_modes(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, under_modes, int(torch.randint(1 << 30, ())))
