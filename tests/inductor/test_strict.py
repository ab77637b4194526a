"""`strict` refuses whatever is left unfused next to a matmul, however it is arranged."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from symm_cp.inductor.options import Options
from tests.inductor.graphs import through_passes
from tests.pool import Ranks


def _gathered(x: Any, g: Any, dim: int = 0) -> Any:
    return funcol.all_gather_tensor(x, dim, g)


#: What is next to a matmul, but cannot be fused; all with (x, w) of (4, 8) and (8, 6).
UNFUSED = {
    "gathered, flipped": lambda g, x, w: _gathered(x, g).flip(0) @ w,
    "gathered, padded": lambda g, x, w: F.pad(_gathered(x, g), (0, 0, 1, 0)) @ w,
    "gathered as wider bits": lambda g, x, w: (
        _gathered(x.view(torch.int32), g, 1).view(torch.float64)
        @ w.repeat(g.size(), 1)[: 4 * g.size()].double()
    ),
    "gathered as bytes, dim 1": lambda g, x, w: (
        _gathered(x.view(torch.uint8), g, 1).view(torch.float32) @ w.repeat(g.size(), 1)
    ),
    "gathered weight": lambda g, x, w: x @ _gathered(w, g, 1),
    "gathered, some rows": lambda g, x, w: _gathered(x, g)[torch.tensor([3, 0, 2])] @ w,
    "scattered, flipped": lambda g, x, w: funcol.reduce_scatter_tensor(
        (x @ w).flip(0), "sum", 0, g
    ),
    "scattered with a residual": lambda g, x, w: funcol.reduce_scatter_tensor(
        x @ w + x[:, :6], "sum", 0, g
    ),
    "summed": lambda g, x, w: funcol.all_reduce(x @ w, "sum", g),
    "exchanged": lambda g, x, w: funcol.all_to_all_single(x, None, None, g) @ w,
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
        # What a later pass leaves alone, too, is still next to a matmul.
        options = Options(strict=True, low_contention=place % 2 == 0)
        said = refusal(functools.partial(fn, group), inputs, options)
        assert "strict: " in said, name
        assert "left alone: " in said, name
    for fn in (
        lambda x, w: _gathered(x, group).exp() @ w,
        lambda x, w: funcol.reduce_scatter_tensor((x @ w).exp(), "sum", 0, group),
        lambda x, w: funcol.all_reduce((x @ w).sum(), "sum", group),
    ):  # something computes in between: not next to the matmul
        through_passes(fn, inputs, Options(strict=True))


def test_strict_refuses_whatever_is_left_next_to_a_matmul(ranks: Ranks) -> None:
    ranks.run(2, refuses, timeout=300)
