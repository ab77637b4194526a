"""Models under `context_parallel` in their callers' modes: right, or refused with a message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import symm_cp
from tests.context_parallel.common import mesh_of
from tests.integrations.common import (
    assert_near,
    assert_same,
    causal_batch,
    check_client,
    in_one_process,
    under_context_parallel,
)
from tests.integrations.decoders import CLIENTS

LENGTH = 24
DOCUMENTS = [10, 6, 8]
CLIENT = CLIENTS["mistral"]


def balancer(group: dist.ProcessGroup) -> symm_cp.LoadBalancer:
    return symm_cp.HeadTail(LENGTH, group.size())


# --- no gradients, then training -----------------------------------------------------------------


@pytest.mark.ranks(2)
def test_inference_then_training(group: dist.ProcessGroup) -> None:
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


# --- deterministic algorithms --------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_deterministic_algorithms(group: dist.ProcessGroup) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check_client(group, CLIENT, causal_batch(LENGTH, padding="left"))
    finally:
        torch.use_deterministic_algorithms(False)


# --- tensors without values, transforms ----------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_fake_tensors(group: dist.ProcessGroup) -> None:
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
@pytest.mark.ranks(2)
def test_transforms_are_refused(group: dist.ProcessGroup) -> None:
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
