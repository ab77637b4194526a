"""Exchanges of a sequence for heads next to projections: what is fused, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.inductor.options import Options
from tests.inductor.graphs import compare

D, E = 6, 2


def split(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(2, (-1, E)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT).softmax(-1)) @ v


class Graphs:
    """Layers of attention by heads over a group, and graphs whose exchanges are not fused."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, H = group, 2 * group.size()
        self.shapes = [(2, 3, D), *[(H * E, D)] * 3, (D, H * E), (H * E,), (D,)]

    def layer(self, x: Any, wq: Any, wk: Any, wv: Any, wo: Any, bias: Any, last: Any) -> Any:
        biases = (bias, bias, bias) if self.biased else (None,) * 3
        projected = [split(F.linear(x, w, b)) for w, b in zip((wq, wk, wv), biases, strict=True)]
        q, k, v = symm_cp.sequence_to_heads(projected, group=self.group)
        out = symm_cp.heads_to_sequence(attend(q, k, v), group=self.group)
        return F.linear(out.transpose(1, 2).flatten(2), wo, last if self.biased else None)

    biased = False

    def with_biases(self, *inputs: Any) -> Any:
        self.biased = True
        return self.layer(*inputs)

    def turned(self, x: Any, wq: Any, wk: Any, wv: Any, *_: Any) -> Any:
        """A projection changes before its exchange, and the result after its exchange."""
        q, k = (split(F.linear(x, w)) for w in (wq, wk))
        q, k = symm_cp.sequence_to_heads([q.sin(), k], group=self.group)
        return symm_cp.heads_to_sequence(q * k, group=self.group).sin()

    def of_two_inputs(self, x: Any, wq: Any, wk: Any, *_: Any) -> Any:
        q, k = split(F.linear(x, wq)), split(F.linear(x.cos(), wk))
        q, k = symm_cp.sequence_to_heads([q, k], group=self.group)
        return q * k

    def used_elsewhere(self, x: Any, wq: Any, *_: Any) -> Any:
        q = split(F.linear(x, wq))
        return symm_cp.sequence_to_heads(q, group=self.group), q.sum()


BOTH = ["project_to_heads", "project_from_heads"]
#: Why an exchange is left alone, and the ops into which others are fused, once in the forward and
#: once in the backward graph.
FUSED: dict[str, tuple[str, list[str]]] = {
    "layer": ("", BOTH),
    "with_biases": ("", BOTH),
    "turned": ("not all of its tensors are products", []),
    "of_two_inputs": ("projections of different inputs", []),
    "used_elsewhere": ("", []),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.ranks(2)
def test_projections_are_fused(group: dist.ProcessGroup, name: str, train: bool) -> None:
    graphs = Graphs(group)
    fn: Callable[..., Any] = getattr(graphs, name)
    # Tensors that are not used have no gradient.
    used = {"layer": 5, "with_biases": 7, "turned": 3, "of_two_inputs": 3, "used_elsewhere": 2}
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in graphs.shapes]
    for t in inputs[: used[name]]:
        t.requires_grad_(train)
    compiled = compare(fn, inputs)
    reason, fused = FUSED[name]
    decisions = compiled.report.decisions
    found = [str(d.fused_into or d.runs_as) for d in decisions]
    if fused:
        each = 2 if train else 1
        assert sorted(found) == sorted(fused * each), str(compiled.report)
        assert not any("exchange_heads" in op for op in compiled.ops), compiled.ops
    else:
        assert "exchange_heads" in found, str(compiled.report)
    if reason:
        assert any(reason in d.reason for d in decisions), str(compiled.report)
    off = compare(fn, inputs, Options(context_parallel=False)).report
    assert not off.fused, str(off)
    assert "exchange_heads" in off.text()
