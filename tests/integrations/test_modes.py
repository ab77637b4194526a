"""Models under `context_parallel` in their callers' modes: right, or refused with a message."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.integrations.common import (
    Batch,
    Client,
    Result,
    WideTensors,
    assert_near,
    assert_same,
    causal_batch,
    check_client,
    in_one_process,
    target_loss,
    under_context_parallel,
)
from tests.integrations.decoders import CLIENTS

LENGTH = 24
DOCUMENTS = [10, 6, 8]
CLIENT = CLIENTS["mistral"]


def balancer(group: dist.ProcessGroup) -> symm_cp.LoadBalancer:
    return symm_cp.HeadTail(LENGTH, group.size())


# --- no gradients, then training -----------------------------------------------------------------


def inference_then_training(group: dist.ProcessGroup) -> None:
    for mode in (torch.inference_mode, torch.no_grad):
        # A new length for each mode, so that cached tensors are made in this mode.
        length = LENGTH + (8 if mode is torch.no_grad else 0)
        batch = causal_batch(length, documents=[length - 6, 6])
        even = symm_cp.HeadTail(length, group.size())
        local, _ = symm_cp.shard_batch(mesh_of(group), dict(batch), load_balancer=even)
        local.pop("labels")
        model = CLIENT.make("eager")
        with mode(), symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=even):
            found = model(**local, use_cache=False).logits
        expected = in_one_process(CLIENT, batch)
        rows = even.positions(group.rank())
        assert_near("logits", found, expected.logits[:, rows], CLIENT.tolerance)
        actual = under_context_parallel(group, CLIENT, batch, balancer=even)
        assert_same(actual, expected, batch, CLIENT.tolerance)


def test_inference_then_training(ranks: Ranks) -> None:
    ranks.run(2, inference_then_training)


# --- autocast and deterministic algorithms -------------------------------------------------------


def largest_error(found: Result, exact: Result, batch: Batch) -> float:
    """Returns the largest relative error, in the norm, of any tensor."""
    seen = batch["attention_mask"].bool()
    pairs = [(found.logits[seen], exact.logits[seen]), (found.loss, exact.loss)]
    pairs += [(found.grads[name], want) for name, want in exact.grads.items()]
    return max(float((got.double() - want).norm() / want.norm()) for got, want in pairs)


def in_autocast(group: dist.ProcessGroup) -> None:
    client = Client("Llama", dtype=torch.float32)
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    batch = causal_batch(LENGTH, padding="right")
    with WideTensors():
        exact = in_one_process(client, batch)
        with around():
            alone = in_one_process(client, batch)
        spread = under_context_parallel(
            group, client, batch, balancer=balancer(group), around=around
        )
    # Both round to bfloat16, in a different order: over 150 seeds, errors up to 1.6 times as large.
    assert largest_error(spread, exact, batch) <= 3 * largest_error(alone, exact, batch)


@pytest.mark.exhaustive
def test_autocast(ranks: Ranks) -> None:
    ranks.run(2, in_autocast)


def deterministic(group: dist.ProcessGroup) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check_client(group, CLIENT, causal_batch(LENGTH, padding="left"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.exhaustive
def test_deterministic_algorithms(ranks: Ranks) -> None:
    ranks.run(2, deterministic)


# --- recomputation -------------------------------------------------------------------------------


def forward_loss(
    group: dist.ProcessGroup, model: nn.Module, batch: Batch, region: Any
) -> torch.Tensor:
    local, reduce_loss = symm_cp.shard_batch(
        mesh_of(group), dict(batch), load_balancer=balancer(group)
    )
    labels = local.pop("labels")
    with region:
        logits = model(**local, use_cache=False).logits
        loss: torch.Tensor = reduce_loss(target_loss(logits, labels))
    return loss


def recomputed_outside(group: dist.ProcessGroup) -> None:
    batch = causal_batch(LENGTH, documents=DOCUMENTS)
    expected = in_one_process(CLIENT, batch)
    region = partial(symm_cp.context_parallel, mesh_of(group), load_balancer=balancer(group))
    for chosen in (False, True):
        model = CLIENT.make("eager").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if chosen:  # permanently
            model.set_attn_implementation("symm_cp")
        loss = forward_loss(group, model, batch, region(model=model))
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            dist.all_reduce(parameter.grad, group=group)
            want = expected.grads[name]
            assert want is not None
            assert_near(name, parameter.grad, want, CLIENT.tolerance)


@pytest.mark.exhaustive
def test_recomputed_outside_of_the_context(ranks: Ranks) -> None:
    ranks.run(2, recomputed_outside)


# --- other threads -------------------------------------------------------------------------------


def in_another_thread(group: dist.ProcessGroup) -> None:
    batch = causal_batch(LENGTH, padding="right")
    expected = in_one_process(CLIENT, batch)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    model, even = CLIENT.make("eager"), balancer(group)
    found: list[torch.Tensor] = []

    def alone() -> None:
        found.append(model(**inputs, use_cache=False).logits.detach())

    with symm_cp.context_parallel(
        mesh_of(group), model=model, load_balancer=even, on_unfused="ignore"
    ):
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join()
    seen = batch["attention_mask"].bool()
    assert_near("logits", found[0][seen], expected.logits[seen], CLIENT.tolerance)


@pytest.mark.exhaustive
def test_threads_without_a_context_attend_as_usual(ranks: Ranks) -> None:
    ranks.run(2, in_another_thread)


# --- tensors without values, transforms ----------------------------------------------------------


def fake(group: dist.ProcessGroup) -> None:
    batch, mesh = causal_batch(LENGTH, padding="right"), mesh_of(group)
    local, _ = symm_cp.shard_batch(mesh, dict(batch), load_balancer=balancer(group))
    local.pop("labels")
    model = CLIENT.make("eager")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {name: mode.from_tensor(tensor) for name, tensor in local.items()}
        with symm_cp.context_parallel(
            mesh, model=model, load_balancer=balancer(group), on_unfused="ignore"
        ):
            logits = model(**inputs, use_cache=False).logits
            logits.sum().backward()
    assert logits.shape == (2, LENGTH // group.size(), model.config.vocab_size)
    check_client(group, CLIENT, batch)  # no fake tensors are left behind


@pytest.mark.exhaustive
def test_fake_tensors(ranks: Ranks) -> None:
    ranks.run(2, fake)


def transformed(group: dist.ProcessGroup) -> None:
    batch = causal_batch(LENGTH, documents=DOCUMENTS)
    model = CLIENT.make("eager")
    even = balancer(group)
    local, _ = symm_cp.shard_batch(mesh_of(group), dict(batch), load_balancer=even)
    local.pop("labels")
    parameters = dict(model.named_parameters())

    def mean(values: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.func.functional_call(model, values, kwargs={**local, "use_cache": False})
        return out.logits.mean()

    with (
        pytest.raises(NotImplementedError, match=r"functorch|torch\.func"),
        symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=even),
    ):
        torch.func.grad(mean)(parameters)
    check_client(group, CLIENT, batch)


@pytest.mark.exhaustive
def test_transforms_are_refused(ranks: Ranks) -> None:
    ranks.run(2, transformed)
