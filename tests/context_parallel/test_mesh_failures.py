"""Ranks that fail in calls over a mesh of two dimensions, and the calls after them."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import flex_attention

import symm_cp
from symm_cp.ops.attention import pipeline, ulysses
from tests.context_parallel.test_methods import MIXED, mesh_2d
from tests.exhaustive import some


class Trouble(Exception):
    """An error in a rank's own code."""


class Fails(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        raise Trouble


@pytest.mark.parametrize("failing", some(1, of=[0, 1, 3]))
@pytest.mark.parametrize("keys_first", some(False, of=[False, True]))
@pytest.mark.ranks(4)
def test_a_rank_that_fails_on_a_mesh(
    group: dist.ProcessGroup, keys_first: bool, failing: int
) -> None:
    """All ranks learn of a failure at once, and can use the mesh and the whole group again."""
    names = MIXED[::-1] if keys_first else MIXED
    q = torch.randn(1, 4, 8, 4, dtype=torch.float64)
    mask = torch.ones(3, 3, dtype=torch.bool)
    trouble: list[Callable[[DeviceMesh], Any]] = [
        lambda mesh: symm_cp.all_gather_attention(q, q[:, :3], q, group=mesh, method=names),
        lambda mesh: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        lambda mesh: flex_attention(q, q[:, :3], q),
        lambda mesh: Fails()(q),
    ]
    mesh = mesh_2d((2, 2))

    def step(attend: Any, fail: Callable[[DeviceMesh], Any] | None) -> torch.Tensor:
        x = q.clone().requires_grad_()
        with symm_cp.context_parallel(mesh, method=names, on_unfused="ignore"):
            attend(x, x, x)
            if fail is not None:
                fail(mesh)
            out: torch.Tensor = attend(x, x, x)
            return torch.autograd.grad(out.square().sum(), x)[0]

    for number, fail in enumerate(trouble):
        begin, fails = time.monotonic(), group.rank() == failing
        attend: Any = flex_attention if number == 2 else F.scaled_dot_product_attention
        expected = step(attend, None)
        with pytest.raises((RuntimeError, ValueError, NotImplementedError, Trouble)) as caught:
            step(attend, fail if fails else None)
        told = rf"Error on global rank {failing}: .*along mesh dimension '(one|other)', ranks \["
        assert fails or re.search(told, str(caught.value)), str(caught.value)
        # The failed call does not affect later results.
        assert torch.equal(step(attend, None), expected)
        x = torch.ones(4, 4)
        assert symm_cp.all_gather_matmul(x, x, group=group)[0, 0] == 4
        assert time.monotonic() - begin < 20.0  # the group's time-out is 60 seconds


def failing_at(
    original: Callable[..., Any], call: int, kind: type[BaseException], afterwards: bool
) -> Callable[..., Any]:
    """Returns `original` made to fail at one call, before or after it does its work."""
    calls = itertools.count(1)

    def fails(*args: Any, **options: Any) -> Any:
        now = next(calls) == call
        if now and not afterwards:
            raise kind
        result = original(*args, **options)
        if now:
            raise kind
        return result

    return fails


@pytest.mark.parametrize("failing", some(2, of=[0, 2, 3]))
@pytest.mark.ranks(4)
def test_a_rank_that_fails_within_a_call_over_a_mesh(
    group: dist.ProcessGroup, failing: int
) -> None:
    """A rank fails before, between and after the inner calls of one call over a mesh."""
    q, mesh = torch.randn(1, 4, 8, 4, dtype=torch.float64, requires_grad=True), mesh_2d((2, 2))

    def step() -> torch.Tensor:
        out = symm_cp.all_gather_attention(q, q, q, group=mesh, method=MIXED)
        return torch.autograd.grad(out.square().sum(), q)[0]

    expected, mine = step(), group.rank() == failing
    for where, name, at in (
        (ulysses, "head_exchange", 1),
        (pipeline, "consume_keys", 1),
        (ulysses, "head_exchange", 2),
        (ulysses, "head_exchange", 3),
        (pipeline, "reduce_gradients", 1),
        (ulysses, "head_exchange", 4),
    ):
        for afterwards, kind in itertools.product((False, True), (Trouble, KeyboardInterrupt)):
            told = None if mine else kind.__name__
            fails = failing_at(getattr(where, name), at, kind, afterwards)
            last = at == 4 or (name == "reduce_gradients" and afterwards)
            if last and (group.rank() - failing) % 2:  # not of its column: had all its data
                assert torch.equal(step(), expected)
            error = pytest.raises(kind if mine else RuntimeError, match=told)
            with mock.patch.object(where, name, fails if mine else getattr(where, name)), error:
                step()
            assert torch.equal(step(), expected)
