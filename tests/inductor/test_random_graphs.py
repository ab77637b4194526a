"""Fixed random graphs, on fresh inputs; `python -m tests.inductor.random_graphs` draws others."""

from __future__ import annotations

import pytest

from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.inductor.random_graphs import AT_ONCE, many


@pytest.mark.parametrize(
    ("turn", "world_size"), some((0, 2), of=[(t, 2 + t % 3) for t in range(9)])
)
def test_random_graphs(ranks: Ranks, turn: int, world_size: int) -> None:
    begin = AT_ONCE * turn
    count = AT_ONCE if turn else 12
    assert min(ranks.run(world_size, many, range(begin, begin + count), timeout=400)) > 0
