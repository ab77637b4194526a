"""Variables that functions capture, in eager mode and for functions made in or out of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from symm_cp.integrations.transformers.closures import captured

Mask = Callable[..., Any]


def window(size: int) -> Mask:
    def inner(q: Any, k: Any) -> Any:
        return k > q - size

    return inner


def padding(mask: torch.Tensor) -> Mask:
    def inner(q: Any, k: Any) -> Any:
        return mask[k]

    return inner


def both(*masks: Mask) -> Mask:
    def inner(q: Any, k: Any) -> Any:
        return all(mask(q, k) for mask in masks)

    return inner


def causal(q: Any, k: Any) -> Any:
    return k <= q


WINDOW, PADDING, BOTH = (
    made.__code__  # type: ignore[attr-defined]
    for made in (window(1), padding(torch.ones(1)), both())
)


def composed(mask: torch.Tensor, size: int) -> Mask:
    return both(both(window(size), causal), padding(mask))


def applied(x: torch.Tensor, function: Mask) -> torch.Tensor:
    """Uses everything that the function captures."""
    names = captured(function)
    code = function.__code__  # type: ignore[attr-defined]
    if code is BOTH:
        for part in names["masks"]:
            x = applied(x, part)
        return x
    if code is WINDOW:
        return x + names["size"]
    if code is PADDING:
        return x * names["mask"]
    assert names == {}
    return x * 2


def made_inside(x: torch.Tensor, mask: torch.Tensor, size: int) -> torch.Tensor:
    return applied(x, composed(mask * 3, size))


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_eager() -> None:
    x, mask = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(applied(x, composed(mask, 3)), (x + 3) * 2 * mask)


def test_functions_made_in_the_traced_code() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(made_inside, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, requires_grad=True)
    for size in (3, 5):
        mask = torch.randn(4)
        torch.testing.assert_close(compiled(x, mask, size), made_inside(x, mask, size))


@pytest.mark.exhaustive
def test_functions_made_before() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(applied, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(compiled(x, composed(mask, 3)), (x + 3) * 2 * mask)
    before = graphs()
    other = torch.randn(4)  # captured tensors are inputs: a mask of each batch is not traced again
    torch.testing.assert_close(compiled(x, composed(other, 3)), (x + 3) * 2 * other)
    assert graphs() == before
    torch.testing.assert_close(compiled(x, padding(mask)), x * mask)
    assert graphs() == before + 1
