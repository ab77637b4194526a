"""How many Python functions of this package a training step calls beside the model's own."""

from __future__ import annotations

import collections
import os
import sys
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.context_parallel import hooks
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.integrations.common import Client

_HERE = os.path.dirname(os.path.abspath(symm_cp.__file__)) + os.sep
LAYERS = 8
# About 35 are made in each layer. Without csrc/ops/function_filter.cpp 580 more, one for each torch
# function.
MOST_CALLS = 870


def calls_of_a_warm_step(group: dist.ProcessGroup) -> collections.Counter[str]:
    client = Client("Llama", head="ForCausalLM").having(num_hidden_layers=LAYERS)
    model, mesh = client.make("sdpa").train(), mesh_of(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(1))
    counts: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_HERE):
            counts[f"{name.removeprefix(_HERE)}:{frame.f_code.co_qualname}"] += 1

    for number in range(5):
        if number == 4:
            sys.setprofile(count)
        try:
            with symm_cp.training_step(model, {"input_ids": ids, "labels": ids}, mesh) as step:
                step.loss.backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    return counts


def test_a_warm_step_calls_few_functions(ranks: Ranks) -> None:
    with ranks.own(2, calls_of_a_warm_step) as running:  # other tests leave hooks in a process
        first, second = running.outcomes(90)
    assert not first.failure + second.failure
    counts = first.result
    most = "\n".join(f"{n:6} {name}" for name, n in counts.most_common(40))
    assert counts.total() < MOST_CALLS, f"{counts.total()} calls:\n{most}"


@pytest.mark.ranks(2)
def test_a_region_sees_the_same_without_its_filter(group: dist.ProcessGroup) -> None:
    """Without Python's headers there is no filter, and Python sees each function."""
    client = Client("Llama").having(attention_dropout=0.2)
    ids = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(1))
    other, x = torch.nn.MultiheadAttention(8, 2), torch.ones(4, 2, 8)
    weights = (
        other.in_proj_weight,
        other.in_proj_bias,
        None,
        None,
        False,
        0.0,
        other.out_proj.weight,
    )
    of_other = x, x, x, 8, 2, *weights, other.out_proj.bias
    results = []
    for made in (hooks._filter_class, lambda: None):
        model = client.make("sdpa").train()
        model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        with mock.patch.object(hooks, "_filter_class", made):
            with symm_cp.training_step(model, {"input_ids": ids, "labels": ids}, group) as step:
                step.loss.backward()
            with (
                symm_cp.context_parallel(group),
                pytest.raises(NotImplementedError, match="MultiheadAttention"),
            ):
                torch.nn.functional.multi_head_attention_forward(*of_other)
        results.append([step.loss.detach(), *(p.grad for p in model.parameters())])
    for one, another in zip(*results, strict=True):
        assert torch.equal(one, another)
