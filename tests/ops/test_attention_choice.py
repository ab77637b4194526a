"""What attention takes with `method="auto"`: the method that was measured to be faster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from symm_cp.ops.attention.choice import by_heads, moved
from symm_cp.schedule.layout import SequenceLayout, head_tail, sequential
from symm_cp.schedule.mask import CAUSAL, NO_MASK

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "methods.json"
ROWS = json.loads(RESULTS.read_text())["rows"]
BF16, F32 = 2, 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_the_choice_on_cpu_is_as_measured(row: dict) -> None:  # type: ignore[type-arg]
    """Two ranks. At most 1.11 of the better method: noise, and five heads in the backward pass."""
    found = re.match(r"(\d+) tokens, (\d+)/(\d+) heads, ([a-z-]+),", row["case"])
    assert found
    tokens, heads, kv_heads = map(int, found.groups()[:3])
    layout = (head_tail if found[4] == "head-tail" else sequential)(tokens, 2)
    exchanges, _ = by_heads(layout, layout, (CAUSAL,), (heads, kv_heads), None)
    chosen = row["ratio"]["ulysses" if exchanges else "allgather"]
    assert chosen <= 1.11 * min(row["ratio"]["ulysses"], 1.0)


def on_gpus(
    layout: SequenceLayout, heads: int, kv_heads: int, *, causal: bool = False, back: bool = False
) -> bool:
    masks = (CAUSAL if causal else NO_MASK,)
    return by_heads(layout, layout, masks, (heads, kv_heads), moved(BF16, F32, backward=back))[0]


def test_gpus_move_fewer_bytes() -> None:
    """By keys each rank gets all keys; by heads a share of queries, keys, values and results."""
    for ranks, heads, kv_heads, forward, backward in (
        (2, 8, 8, False, True),  # 8 + 8 against 2 * 8 forward; gradients of keys are in float32
        (2, 32, 8, False, False),
        (4, 8, 8, True, True),
        (4, 32, 8, False, True),
        (4, 64, 8, False, False),
        (8, 32, 8, True, True),
        (8, 64, 8, False, True),
        (8, 8, 1, False, False),  # of one key head each rank gets a copy
    ):
        for layout in (sequential(1024, ranks), head_tail(1024, ranks)):
            assert on_gpus(layout, heads, kv_heads) is forward, (ranks, heads)
            assert on_gpus(layout, heads, kv_heads, back=True) is backward, (ranks, heads)


def test_the_slowest_rank_decides_before_the_bytes() -> None:
    # Rank 1 of 2 has three quarters of a causal mask's pairs, or two of three heads.
    assert on_gpus(sequential(1024, 2), 32, 8, causal=True)
    assert not on_gpus(head_tail(1024, 2), 3, 3, causal=True, back=True)
    assert not on_gpus(head_tail(1024, 4), 5, 5, causal=True)
    for ranks in (2, 4):
        assert not on_gpus(sequential(1024, ranks), ranks - 1, ranks - 1, causal=True)


def test_layouts_of_slightly_different_shards_count_as_balanced() -> None:
    odd = SequenceLayout(2, (0, 1), (101, 100))
    assert by_heads(odd, odd, (NO_MASK,), (8, 8), None) == (
        True,
        "one kernel for the whole sequence",
    )
