"""Masks of each sample: packed documents, padding, hidden keys, with every other kind of mask."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp.ops.attention.masks import documents_of, keys_of
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule import CAUSAL, NO_MASK, Mask, SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests.allocations import allocated
from tests.exhaustive import exhaustive, some
from tests.ops.attention_cases import OP, Case, layouts, run_all
from tests.ops.refusals import Wrong, check_disagreements, check_refusals

HEADS = 2


def packed(batch: int, length: int) -> torch.Tensor:
    """Random documents in each sample; their ids do not ascend."""
    ids = torch.empty(batch, length, dtype=random.choice([torch.int32, torch.int64]))
    for sample in ids:
        edges = sorted(random.choices(range(length + 1), k=random.randrange(4)))
        bounds = [0, *edges, length]
        numbers = random.sample(range(-3, 10), len(bounds))
        for number, begin, end in zip(numbers, bounds, bounds[1:], strict=False):
            sample[begin:end] = number
    return ids


def padded(batch: int, length: int, side: str) -> torch.Tensor:
    """Samples of different lengths, the first of full length and the last without keys."""
    position = torch.arange(length)
    lengths = [length, *(random.randrange(length + 1) for _ in range(batch - 2)), 0][:batch]
    shown = torch.tensor(lengths).unsqueeze(1)
    return position < shown if side == "right" else position >= length - shown


def every_layout(world_size: int) -> list[SequenceLayout]:
    even = sequential(12 * world_size, world_size)
    return [even, head_tail(12 * world_size + 5, world_size), *layouts(world_size)]


def cases_of(layout: SequenceLayout) -> list[Case]:
    length = layout.length
    batch = random.randrange(3, 5)
    holes = torch.rand(batch, length) < 0.5
    holes[0] = holes[1, 0] = holes[1, -1] = True  # samples with and without gaps share tiles
    holes[-1] = False  # a sample without a key
    chunks = torch.arange(length).div(7, rounding_mode="floor").unsqueeze(0)  # Llama 4's
    prefixes = torch.randint(0, length + 1, (batch,))
    prefixes[0] = 0
    causal, window = {"causal": True}, {"causal": True, "left": 5}
    left, right = ({"key_mask": padded(batch, length, side)} for side in ("left", "right"))
    prefixed, hidden = {"prefixes": prefixes}, {"key_mask": holes}

    def ids(rows: int = batch) -> dict[str, Any]:
        return {"document_ids": packed(rows, length)}

    some_masks: list[dict[str, Any]] = [
        ids(),
        {**ids(), **causal, "with_lse": True},
        {**ids(), **window},
        {"document_ids": chunks, **causal},
        {**ids(1), "documents": (0, length // 3, length), "right": 2},
        {**right, **causal},
        {**left, **causal, "with_lse": True},
        {"key_mask": padded(1, length, "left"), **window},
        {**ids(), **right, **causal},
        hidden,
        {**hidden, **causal, "with_lse": True},
        {"document_ids": chunks, **hidden, **window},
        {**ids(), "key_mask": holes[1:2], "left": 3},
        {**causal, **prefixed, "with_lse": True},
        {**window, "prefixes": prefixes[1:2].int()},
        {"left": 2, "right": 1, **prefixed},
        {**hidden, **causal, **prefixed},
        {**left, **window, **prefixed},
    ]
    return [Case(layout, batch=batch, dtype=torch.float64, **mask) for mask in some_masks]


@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
@pytest.mark.exhaustive
def test_masks_of_each_sample(ranks: Ranks, world_size: int) -> None:
    cases = [case for layout in every_layout(world_size) for case in cases_of(layout)]
    # Gaps of two keys and more are cut out of tiles, like long gaps of real sequences.
    cases += [replace(case, gap=2) for case in random.sample(cases, 12)]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize("world_size", some(2, 4, of=[1, 2, 3, 4]))
def test_queries_of_another_sequence_see_unpadded_keys(ranks: Ranks, world_size: int) -> None:
    cases = []
    for layout in every_layout(world_size):
        length = layout.length
        holes = torch.rand(3, length) < 0.5
        for mask in (padded(3, length, "right"), padded(1, length, "left"), holes):
            queries = random.choice([1, 5, 40])
            cases.append(Case(layout, queries, 3, key_mask=mask, dtype=torch.float64))
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(
        (2, torch.bfloat16),
        of=itertools.product([1, 2, 3, 4], [torch.float32, torch.bfloat16, torch.float16]),
    ),
    ids=str,
)
def test_dtypes_in_longer_sequences(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    """Enough rows for several bands, and gaps on both sides of the limit between short and long."""
    layout = head_tail(700, world_size)
    ids = torch.zeros(2, 700, dtype=torch.int64)
    ids[0, 130:], ids[1, 5:], ids[1, 600:] = 1, 1, 2
    mask = torch.ones(2, 700, dtype=torch.bool)
    mask[0, 20:100], mask[0, 200:420], mask[1, 690:], mask[1, ::3] = False, False, False, False
    cases = [
        Case(layout, batch=2, document_ids=ids, key_mask=mask, dtype=dtype, **options)
        for options in ({}, {"causal": True}, {"causal": True, "left": 99})
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.ranks
def test_invalid_masks_are_refused(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    q = torch.randn(2, HEADS, 6, 16)
    ids = torch.zeros(2, 6 * W, dtype=torch.int64)
    torn = ids.clone()
    torn[1, 2:4] = 5
    seen = ids == 0

    def prefix(*lengths: float) -> dict[str, Any]:
        return {"is_causal": True, "prefix_lengths": torch.tensor(lengths)}

    prefixed = prefix(3)
    good = {"key_mask": seen, "document_ids": torn.sort(1).values}

    def attend(query: torch.Tensor = q, **options: Any) -> torch.Tensor:
        return OP(query, q, q, name, **options or good)[0]

    wrong: list[Wrong] = [
        (ValueError, "document_ids of sample 1 has document 0 at pos", {"document_ids": torn}),
        (ValueError, "document_ids has shape", {"document_ids": ids[:, 1:]}),
        (TypeError, "document_ids is torch.float32", {"document_ids": ids.float()}),
        (ValueError, "document_ids requires equal lengths",
         {"query": torch.randn(2, HEADS, 7, 16), "document_ids": torn.sort(1).values}),
        (TypeError, "key_mask is torch.int64", {"key_mask": ids}),
        (ValueError, "key_mask has shape", {"key_mask": seen.repeat(2, 1)}),
        (ValueError, "prefix_lengths and document_ids are both", prefixed | {"document_ids": ids}),
        (ValueError, "prefix_lengths requires is_causal=Tr", {"prefix_lengths": torch.tensor([3])}),
        (ValueError, "prefix_lengths is torch.float32", prefix(3.0)),
        (ValueError, r"prefix_lengths is torch.int64 \[3\], must be int32 or", prefix(3, 4, 5)),
        (ValueError, r"prefix_lengths=\[1, -1\] must be between 0 and", prefix(1, -1)),
        (ValueError, "prefix_lengths=.* must be between 0 and", prefix(6 * W + 1)),
    ]  # fmt: skip
    check_refusals(group, attend, wrong, "fused_all_gather_attention")
    if W > 1:  # masks must be identical on all ranks
        different = seen.clone()
        different[0, 1] = rank == 0
        differing = [{"key_mask": different}, prefix(rank + 1)]
        check_disagreements(attend, differing, "fused_all_gather_attention")


def test_an_empty_batch_has_masks_too(ranks: Ranks) -> None:
    layout = sequential(10, 2)
    ids, mask = torch.zeros(1, 10, dtype=torch.int64), torch.ones(1, 10, dtype=torch.bool)
    mask[0, 3] = False
    cases = [
        Case(layout, batch=0, document_ids=ids[:n], key_mask=mask[:n], causal=True) for n in (0, 1)
    ]
    ranks.run(2, run_all, cases, 0)


def peak_of_masks(group: dist.ProcessGroup, length: int) -> list[int]:
    W, rank = group.size(), group.rank()
    layout = head_tail(length, W)
    q = torch.randn(2, 1, layout.lengths[rank], 8, requires_grad=True)
    ids = torch.arange(length).expand(2, -1) // 1000
    gaps = torch.rand(2, length) < 0.9
    gaps[1, 1000:] = False
    peaks = []
    for options in (
        {"document_ids": ids, "is_causal": True},
        {"key_mask": gaps, "is_causal": True},
        {"key_mask": gaps, "is_causal": True, "window_left": 100},
    ):

        def train(options: dict[str, Any] = options) -> None:
            out, _ = OP(
                q,
                q,
                q,
                group.group_name,
                chunk_order=list(layout.chunk_order),
                chunk_lengths=list(layout.chunk_lengths),
                **options,
            )
            out.sum().backward()

        peaks.append(max(allocated(train)))
    return peaks


@pytest.mark.parametrize("world_size", [2])
def test_masks_take_no_memory_of_the_square_of_the_length(ranks: Ranks, world_size: int) -> None:
    for peaks in ranks.run(world_size, peak_of_masks, 6000):
        # The largest tensor at most the mask of a band's tile: samples x rows x keys, in float32.
        assert max(peaks) <= 2 * 256 * 512 * 4, peaks


def test_peers_are_sent_the_rows_that_they_may_see() -> None:
    window = AttentionSpec(layout=sequential(64, 2), mask=Mask(5, 0))
    key = torch.empty(1, 3, 32, 4)
    assert window.shard_shapes(key) == [((1, 3, 5, 4),) * 2, ((1, 3, 0, 4),) * 2]
    assert window.grad_shapes(key) == [(1 * 3 * 5 * 8,), (0,)]
    for mask in (NO_MASK, CAUSAL, tuple(Mask(5 + i, 0) for i in range(5))):
        assert replace(window, mask=mask).shard_shapes(key) is None


@exhaustive
def test_a_key_that_was_not_sent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask kind that only the tiles support would need such a key."""
    spec = AttentionSpec(layout=sequential(16, 2), mask=Mask(left=3, right=0))
    tiles = spec.tiles(1, 0, 8)
    assert spec.first_sent(1, 0, tiles) == 5
    assert spec.first_sent(0, 0, spec.tiles(0, 0, 8)) == 0
    monkeypatch.setattr(AttentionSpec, "sent_rows", lambda self, owner: slice(6, 8))
    with pytest.raises(AssertionError, match="rank 1 sees keys 5 to 8 of rank 0, which sends 6 to"):
        spec.first_sent(1, 0, tiles)


def test_masks_of_long_sequences_are_read_in_time() -> None:
    import time

    ids = torch.arange(100_000).expand(8, -1) // 100
    alternate = torch.arange(100_000).expand(8, -1) % 2 == 0
    for read in (lambda: documents_of("op", ids), lambda: keys_of(alternate)):
        best = min(_time(read, time.perf_counter) for _ in range(5))
        assert best < 0.1


def _time(call: Any, clock: Any) -> float:
    begin = clock()
    call()
    return float(clock() - begin)
