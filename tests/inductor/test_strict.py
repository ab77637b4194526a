"""`strict` refuses every collective next to a matmul that stays unfused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from symm_cp import inductor
from symm_cp.inductor.options import Options
from symm_cp.testing import Ranks
from tests.inductor.graphs import through_passes


def _gathered(x: Any, group: Any, dim: int = 0) -> Any:
    return funcol.all_gather_tensor(x, dim, group)


#: Collectives next to a matmul that cannot be fused; all take x (4, 8) and w (8, 6).
UNFUSED = {
    "gathered, flipped": lambda group, x, w: _gathered(x, group).flip(0) @ w,
    "gathered, padded": lambda group, x, w: F.pad(_gathered(x, group), (0, 0, 1, 0)) @ w,
    "gathered as wider bits": lambda group, x, w: (
        _gathered(x.view(torch.int32), group, 1).view(torch.float64)
        @ w.repeat(group.size(), 1)[: 4 * group.size()].double()
    ),
    "gathered as bytes, dim 1": lambda group, x, w: (
        _gathered(x.view(torch.uint8), group, 1).view(torch.float32) @ w.repeat(group.size(), 1)
    ),
    "gathered weight": lambda group, x, w: x @ _gathered(w, group, 1),
    "gathered, some rows": lambda group, x, w: _gathered(x, group)[torch.tensor([3, 0, 2])] @ w,
    "scattered, flipped": lambda group, x, w: funcol.reduce_scatter_tensor(
        (x @ w).flip(0), "sum", 0, group
    ),
    "scattered with a residual": lambda group, x, w: funcol.reduce_scatter_tensor(
        x @ w + x[:, :6], "sum", 0, group
    ),
    "summed, used elsewhere": lambda group, x, w: funcol.all_reduce(p := x @ w, "sum", group) + p,
    "summed, flipped": lambda group, x, w: funcol.all_reduce((x @ w).flip(0), "sum", group),
    "sum multiplied": lambda group, x, w: funcol.all_reduce(x, "sum", group) @ w,
    "largest": lambda group, x, w: funcol.all_reduce(x @ w, "max", group),
    "exchanged": lambda group, x, w: funcol.all_to_all_single(x, None, None, group) @ w,
}


def refusal(fn: Any, inputs: Any, options: Options) -> str:
    try:
        through_passes(fn, inputs, options)
    except Exception as error:  # Dynamo's, around ours
        return str(error)
    return "no error"


def refuses(group: dist.ProcessGroup) -> None:
    inputs = torch.randn(4, 8), torch.randn(8, 6)
    for place, (name, fn) in enumerate(UNFUSED.items()):
        # A collective that a later pass leaves alone as well is still next to a matmul.
        options = Options(strict=True, low_contention=place % 2 == 0)
        message = refusal(functools.partial(fn, group), inputs, options)
        assert "strict: " in message, name
        assert "left alone: " in message or "not fused, runs as" in message, name
    for fn in (
        lambda x, w: _gathered(x, group).exp() @ w,
        lambda x, w: funcol.reduce_scatter_tensor((x @ w).exp(), "sum", 0, group),
        lambda x, w: funcol.all_reduce((x @ w).sum(), "sum", group),
    ):  # something computes in between: not next to the matmul
        through_passes(fn, inputs, Options(strict=True))


def test_strict_refuses_whatever_is_left_next_to_a_matmul(ranks: Ranks) -> None:
    ranks.run(2, refuses, timeout=300)


def test_compile_options_takes_what_enable_takes() -> None:
    def options_of(options: dict[str, Any]) -> Options:
        found = {each.options for each in options.values()}
        assert len(found) == 1
        return found.pop()

    assert options_of(inductor.compile_options(strict=True)) == Options(strict=True)
    changed = inductor.compile_options(Options(min_bytes=7), low_contention=True)
    assert options_of(changed) == Options(min_bytes=7, low_contention=True)
    with pytest.raises(TypeError, match="compile_options: unknown strikt; must be of all_reduce, "):
        inductor.compile_options(strikt=True)
