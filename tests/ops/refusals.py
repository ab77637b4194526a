"""Calls that all ranks refuse, that one rank refuses, or that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import device

Call = Callable[..., Any]
#: An error, a part of its text, and a call that raises it: or what changes a good one into it.
Wrong = tuple[type[Exception], str, Call | Mapping[str, Any]]


def check_refusals(
    group: dist.ProcessGroup,
    good: Callable[..., torch.Tensor],
    wrong: Iterable[Wrong],
    op: str = "",
) -> None:
    """All ranks refuse each call, then the last one alone, and its peers hear of it.

    Errors name `op`. After each of them the good call gives what it gave before.
    """
    expected, last = good(), group.size() - 1
    for error, message, given in wrong:
        bad = given if callable(given) else partial(good, **given)
        text = f"{op}.*: .*{message}" if op else message
        with pytest.raises(error, match=text):
            bad()
        assert torch.equal(good(), expected), text
        if last == 0 or device.chosen() != "cpu":  # on streams the host does not wait for peers
            continue
        mine = group.rank() == last
        told = text if mine else f"{error.__name__} on rank {last}: "
        with pytest.raises((error, RuntimeError), match=told):
            (bad if mine else good)()
        assert torch.equal(good(), expected), text


def check_disagreements(
    good: Callable[..., torch.Tensor],
    calls: Iterable[Call | Mapping[str, Any]],
    text: str = "ranks disagree",
) -> None:
    """Calls that differ between ranks fail on all of them; a good call follows each."""
    if device.chosen() != "cpu":  # on streams, ranks compare calls in debug mode only
        return
    expected = good()
    for given in calls:
        with pytest.raises(RuntimeError, match=text):
            given() if callable(given) else good(**given)
        assert torch.equal(good(), expected)
