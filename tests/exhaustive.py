"""What runs with ``pytest --all`` only: the marker `exhaustive`, and parameters that carry it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def some(*plain: Any, of: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: these always, the others `of` all with --all.

    A tuple is one set of parameters.
    """
    everything = list(of)
    assert all(value in everything for value in plain), (plain, everything)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in plain else exhaustive,
        )
        for value in everything
    ]
