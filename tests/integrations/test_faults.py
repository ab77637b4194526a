"""Models under `context_parallel` whose ranks differ or fail: all get an error, and can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.integrations.common import (
    Batch,
    assert_near,
    causal_batch,
    in_one_process,
    target_loss,
)
from tests.integrations.decoders import CLIENTS
from tests.patience import patient

LENGTH = 24
AT_ONCE = 20.0  # seconds; the groups of the tests time out after 60
CLIENT = CLIENTS["mistral"]

Change = Callable[[nn.Module, Batch], Any]


class Trouble(Exception):
    """An error of a rank's own code."""


def step(model: nn.Module, local: Batch, labels: torch.Tensor, region: Any, reduce: Any) -> Any:
    with region:
        logits = model(**local, use_cache=False).logits
        loss = reduce(target_loss(logits, labels))
        loss.backward()
    return loss.detach()


def differ(group: dist.ProcessGroup, change: Change, message: str, odd_rank: int = 1) -> None:
    """One rank's model or batch is changed: each rank gets an error, and the next step is right."""
    mesh, batch = mesh_of(group), causal_batch(LENGTH, masked=False)
    expected = in_one_process(CLIENT, batch)
    for odd in (True, False):
        model = CLIENT.make("eager").train()
        balancer = symm_cp.HeadTail(LENGTH, group.size())
        local, reduce_loss = symm_cp.shard_batch(mesh, dict(batch), load_balancer=balancer)
        labels = local.pop("labels")
        if odd and group.rank() == odd_rank:
            change(model, local)
        arguments: dict[str, Any] = {"model": model, "load_balancer": balancer}
        arguments.update(getattr(model, "other_arguments", {}))
        region = symm_cp.context_parallel(mesh, **arguments)
        begin = time.monotonic()
        if not odd:
            loss = step(model, local, labels, region, reduce_loss)
            assert_near("loss", loss, expected.loss, CLIENT.tolerance)
            continue
        with pytest.raises((RuntimeError, ValueError, NotImplementedError, Trouble)) as caught:
            step(model, local, labels, region, reduce_loss)
        assert time.monotonic() - begin < patient(AT_ONCE)
        assert any(part in str(caught.value) for part in message.split("|")), str(caught.value)


def other_window(model: nn.Module, local: Batch) -> None:
    model.config.sliding_window = 3


def other_dropout(model: nn.Module, local: Batch) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5


def other_batch(model: nn.Module, local: Batch) -> None:
    for name, tensor in local.items():
        local[name] = tensor[:1]


def with_mask(model: nn.Module, local: Batch) -> None:
    local["attention_mask"] = torch.ones_like(local["input_ids"])


def not_given(model: nn.Module, local: Batch) -> None:
    model.other_arguments = {"model": None}


def other_implementation(model: nn.Module, local: Batch) -> None:
    model.other_arguments = {"model": None}
    model.set_attn_implementation("sdpa")


def shorter(model: nn.Module, local: Batch) -> None:
    for name in list(local):
        local[name] = local[name][:, :-1]


def other_load_balancer(model: nn.Module, local: Batch) -> None:
    model.other_arguments = {"load_balancer": symm_cp.Sequential(LENGTH, 2)}


def fewer_layers(model: nn.Module, local: Batch) -> None:
    """Makes this rank reach the loss while the others still attend."""
    model.model.layers = model.model.layers[:1]


def raising(model: nn.Module, local: Batch) -> None:
    def fail(*_: Any) -> None:
        raise Trouble("in the middle of a layer")

    model.model.layers[0].mlp.register_forward_hook(fail)


def raising_in_backward(model: nn.Module, local: Batch) -> None:
    def fail(*_: Any) -> None:
        raise Trouble("in the backward pass")

    model.model.layers[0].mlp.register_full_backward_hook(fail)


def interrupted(model: nn.Module, local: Batch) -> None:
    def interrupt(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise Trouble("stopped by hand") from error

    model.model.layers[0].mlp.register_forward_hook(interrupt)


SEVERAL: dict[str, tuple[Change, str]] = {
    "window": (other_window, "window|mask"),
    "dropout": (other_dropout, "dropout|mask"),
    "batch": (other_batch, "rank"),
    "mask": (with_mask, "rank"),
    "not given": (not_given, "rank|context_parallel"),
    "implementation": (other_implementation, "rank|context_parallel"),
    "shorter": (shorter, "rank"),
    "load balancer": (other_load_balancer, "were cut by HeadTail"),
    "layers": (fewer_layers, "ranks disagree: rank"),
    "raises": (raising, "in the middle of a layer"),
    "raises in backward": (raising_in_backward, "in the backward pass"),
    "interrupted": (interrupted, "stopped by hand"),
}


def all_differ(group: dist.ProcessGroup, names: list[str]) -> None:
    for name in names:
        change, message = SEVERAL[name]
        try:
            differ(group, change, message)
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_rank_that_raises(ranks: Ranks) -> None:
    ranks.run(2, all_differ, ["raises", "raises in backward"])


@pytest.mark.ranks(2)
def test_a_rank_with_fewer_layers(group: dist.ProcessGroup) -> None:
    """The difference is noticed before the first layer or, without comparison, during the step."""
    differ(group, fewer_layers, "the parameters of MistralForCausalLM differ")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SYMM_CP_COMPARE_INPUTS", "0")
        all_differ(group, ["layers"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [name for name in SEVERAL if not name.startswith(("raises", "layers"))]
)
def test_ranks_that_differ(ranks: Ranks, name: str) -> None:
    ranks.run(2, all_differ, [name])
