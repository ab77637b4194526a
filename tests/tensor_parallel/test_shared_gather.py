"""Linears that share one gather of their input."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from symm_cp.tensor_parallel import FusedColwiseGroup
from symm_cp.testing import Ranks
from tests.tensor_parallel.common import (
    B,
    K,
    N,
    Recorder,
    S,
    leaf,
    local,
    mesh_of,
    part,
    same,
)


class Attention(nn.Module):
    """Calls its projections by `how`; (B, S, K) in, (B, S, N / W) out."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(K, N, bias=False)
        self.wk = nn.Linear(K, N, bias=False)
        self.wv = nn.Linear(K, N, bias=False)

    def forward(self, x: torch.Tensor, how: Callable[..., Any]) -> Any:
        return how(self, x)


class Shared:
    """A dense attention and its parallel copy, whose gathers are counted."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.dense = Attention().double()
        self.module = copy.deepcopy(self.dense)
        style = FusedColwiseGroup(("wq", "wk", "wv"))
        parallelize_module(self.module, mesh_of(group), style)

    def input(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(B, S, K, dtype=torch.float64)
        return x, part(x, self.group, 1).contiguous()

    def check(self, name: str, actual: torch.Tensor, x: torch.Tensor) -> None:
        expected = self.dense.get_submodule(name)(x)
        same(actual, part(expected, self.group, -1))

    @contextmanager
    def gathers(self, count: int, warning: str | None) -> Iterator[None]:
        """Expects `count` gathers inside, and one warning or none."""
        with warnings.catch_warnings(record=True) as caught, Recorder() as recorder:
            warnings.simplefilter("always")
            yield
        assert recorder.communicating() == ["symm_mem::fused_all_gather_matmul"] * count
        messages = [str(w.message) for w in caught if "symm_cp" in str(w.message)]
        assert len(messages) == (warning is not None), messages
        assert warning is None or warning in messages[0]


def each(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.wv(x), m.wq(x), m.wk(x)]


def modified_input(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    first = m.wq(x)
    x.mul_(2)
    return [first, m.wk(x), m.wv(x)]


def another_input(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.wq(x), m.wk(x + 1), m.wv(x)]


def twice(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    first = m.wq(x)
    second = m.wq(x)
    first.zero_()  # an output has one caller
    return [second, m.wk(x), m.wv(x)]


def several_inputs(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [out for piece in (x, x + 1) for out in each(m, piece)]


def another_mode(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        first = m.wq(x)
    return [first, m.wk(x), m.wv(x)]


AGAIN = "was called again, with another input"
IN_ORDER, OF_EACH = ("wq", "wk", "wv"), ("wv", "wq", "wk")
#: A forward of the parent, its mode, gathers and warning; its outputs, and the inputs that these
#: are of: x times a factor, plus a summand.
CASES: dict[str, tuple[Any, Any, int, str | None, tuple[str, ...], list[tuple[int, int]]]] = {
    "shared": (each, torch.enable_grad, 1, None, OF_EACH, [(1, 0)] * 3),
    "without gradients": (each, torch.no_grad, 1, None, OF_EACH, [(1, 0)] * 3),
    "several inputs": (
        *(several_inputs, torch.enable_grad, 2, None, OF_EACH * 2),
        [(1, 0)] * 3 + [(1, 1)] * 3,
    ),
    "modified input": (
        *(modified_input, torch.no_grad, 3, f"'wk' {AGAIN}", IN_ORDER),
        [(1, 0), (2, 0), (2, 0)],
    ),
    "another input": (
        *(another_input, torch.enable_grad, 2, f"'wk' {AGAIN}", IN_ORDER),
        [(1, 0), (1, 1), (1, 0)],
    ),
    "another mode": (
        *(another_mode, torch.enable_grad, 3, "in another mode", IN_ORDER),
        [(1, 0)] * 3,
    ),
    "inference mode": (
        *(modified_input, torch.inference_mode, 3, "in inference mode", IN_ORDER),
        [(1, 0), (2, 0), (2, 0)],
    ),
    "twice": (twice, torch.no_grad, 2, "'wq' was called again", IN_ORDER, [(1, 0)] * 3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks(2)
def test_calls_of_a_group(group: dist.ProcessGroup, case: str) -> None:
    how, mode, gathers, warning, names, inputs = CASES[case]
    shared = Shared(group)
    for _ in range(2 if warning is None else 1):  # it warns once
        with mode():
            x, x_shard = shared.input()
            with shared.gathers(gathers, warning):
                outputs = shared.module(x_shard, how)
            assert outputs[1].requires_grad == torch.is_grad_enabled()
            for name, output, (factor, summand) in zip(names, outputs, inputs, strict=True):
                shared.check(name, output, factor * x + summand)


def changed_weight(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    first = m.wq(x)
    with torch.no_grad():
        m.wk.weight.to_local().mul_(3)
        m.wv.weight.mul_(2)
    return [first, m.wk(x), m.wv(x)]


def does_not_share_changed_weights(group: dist.ProcessGroup) -> None:
    shared = Shared(group)
    x, x_shard = shared.input()
    q, k, v = shared.module(x_shard, changed_weight)
    shared.check("wq", q, x)
    same(k, part(3 * shared.dense.wk(x), group, -1))
    same(v, part(2 * shared.dense.wv(x), group, -1))


def works_outside_of_the_parent(group: dist.ProcessGroup) -> None:
    shared = Shared(group)
    x, x_shard = shared.input()
    with shared.gathers(1, "'wk' was called outside"):
        shared.check("wk", shared.module.wk(x_shard), x)


def unused(m: Attention, x: torch.Tensor) -> torch.Tensor:
    return m.wq(x)


def tells_of_unused_outputs(group: dist.ProcessGroup) -> None:
    shared = Shared(group)
    x, x_shard = shared.input()
    with shared.gathers(1, "['wk', 'wv'] were computed but not used"):
        q = shared.module(x_shard, unused)
    shared.check("wq", q, x)
    q.sum().backward()
    shared.dense.wq(x).sum().backward()
    same(local(shared.module.wq.weight.grad), part(shared.dense.wq.weight.grad, group, 0))
    grad = shared.module.wk.weight.grad
    assert grad is None or not local(grad).any()  # DTensors of torch 2.11 turn None into zeros


def failing(m: Attention, x: torch.Tensor) -> None:
    m.wq(x)
    raise KeyError("on the way")


def keeps_nothing(group: dist.ProcessGroup) -> None:
    shared = Shared(group)
    for how in (each, failing):
        x_shard = leaf(shared.input()[1])
        seen = weakref.ref(x_shard)
        try:
            outputs = shared.module(x_shard, how)
        except KeyError:
            outputs = None
        if outputs:
            sum(o.sum() for o in outputs).backward()
        del x_shard, outputs
        gc.collect()
        assert seen() is None
    with shared.gathers(1, None):  # the forward that failed left nothing behind
        shared.module(shared.input()[1], each)


def accepts_no_sharing_of_names(group: dist.ProcessGroup) -> None:
    # A style is a recipe: one instance serves all modules that a pattern matches.
    model = nn.ModuleDict({"a": Attention(), "b": Attention()}).double()
    dense = copy.deepcopy(model)
    parallelize_module(model, mesh_of(group), {"*": FusedColwiseGroup(("wq", "wk", "wv"))})
    assert model["a"].wq.shared is not model["b"].wq.shared
    x = torch.randn(B, S, K, dtype=torch.float64)
    outputs = model["b"](part(x, group, 1), lambda m, x: each(m, model["a"](x, each) and x))
    same(outputs[0], part(dense["b"].wv(x), group, -1))


@pytest.mark.parametrize(
    "check",
    [
        does_not_share_changed_weights,
        works_outside_of_the_parent,
        tells_of_unused_outputs,
        keeps_nothing,
        accepts_no_sharing_of_names,
    ],
)
def test_group(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks.run(2, check)
