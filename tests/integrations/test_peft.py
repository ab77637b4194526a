"""Models with adapters of PEFT under context parallelism: losses and gradients of one process."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symm_cp
from tests.context_parallel.common import mesh_of
from tests.integrations.common import (
    Client,
    Result,
    assert_near,
    assert_same,
    causal_batch,
    spread_weights,
    summed_grads,
    target_loss,
)

LENGTH = 24
LLAMA = Client("Llama")
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


class StandIn(nn.Module):
    """Stand-in for PEFT's wrappers, which forward attributes of the model inside."""

    def __init__(self, model: nn.Module, *, adds_positions: bool = False) -> None:
        super().__init__()
        self.base_model = model
        self.active_adapter = "default"
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=adds_positions)}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    @property
    def active_peft_config(self) -> Any:
        return self.peft_config[self.active_adapter]

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def adapted(kind: str, *, adds_positions: bool = False) -> nn.Module:
    model = LLAMA.make("sdpa")
    if kind == "stand-in":
        return StandIn(model, adds_positions=adds_positions)
    import peft

    task = "CAUSAL_LM" if kind == "peft" else None
    if adds_positions:
        config: Any = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=4)
    else:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    wrapped: nn.Module = peft.get_peft_model(model, config).double()
    spread_weights(wrapped)
    return wrapped.eval()


def result_of(model: nn.Module, loss: torch.Tensor, logits: torch.Tensor) -> Result:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Result(loss.detach(), logits.detach(), grads)


KINDS = ["stand-in", *(pytest.param(k, marks=needs_peft) for k in ("peft", "peft without a task"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2)
def test_adapters(group: dist.ProcessGroup, kind: str) -> None:
    mesh, batch = mesh_of(group), causal_batch(LENGTH, padding="right")
    alone, stepping, cutting = (adapted(kind) for _ in range(3))
    out = alone(**batch)
    out.loss.backward()
    expected = result_of(alone, out.loss, out.logits)
    assert any(grad is None for grad in expected.grads.values()) or kind == "stand-in"

    with symm_cp.training_step(stepping, batch, mesh) as step:
        step.loss.backward()
    whole = symm_cp.context_parallel_unshard(group, [step.output.logits.detach()], [1])[0]
    assert_same(result_of(stepping, step.loss, whole), expected, batch, LLAMA.tolerance)

    local, reduce_loss = symm_cp.shard_batch(mesh, batch, model=cutting)
    with symm_cp.context_parallel(mesh, model=cutting, load_balancer=reduce_loss.load_balancer):
        loss = reduce_loss(cutting(**local).loss)
        loss.backward()
    assert_near("loss", loss.detach(), expected.loss, LLAMA.tolerance)
    for name, grad in summed_grads(group, cutting).items():
        want = expected.grads[name]
        assert (grad is None) == (want is None), name
        if grad is not None and want is not None:
            assert_near(name, grad, want, LLAMA.tolerance, 1e-2)

    def loss_function(output: Any, local: Any) -> torch.Tensor:
        return target_loss(output.logits, local["labels"])

    compiled = torch.compile(adapted(kind), backend="eager")  # within another wrapper
    with symm_cp.training_step(compiled, batch, mesh, loss_function=loss_function) as step:
        step.loss.backward()
    assert_near("loss", step.loss.detach(), expected.loss, LLAMA.tolerance)


@pytest.mark.parametrize("kind", ["stand-in", pytest.param("peft", marks=needs_peft)])
@pytest.mark.ranks(2)
def test_virtual_tokens_are_refused(group: dist.ProcessGroup, kind: str) -> None:
    mesh, batch = mesh_of(group), causal_batch(LENGTH)
    model = adapted(kind, adds_positions=True)
    with pytest.raises(NotImplementedError, match="put the virtual tokens before its part"):  # noqa: SIM117
        with symm_cp.training_step(model, batch, mesh):
            pass
    local, _ = symm_cp.shard_batch(mesh, batch, model=model)
    with (
        pytest.raises(NotImplementedError, match="put the virtual tokens before its part"),
        symm_cp.context_parallel(mesh),
    ):
        model(**local)
    if kind == "stand-in":  # the active adapter may change
        model.active_peft_config.is_prompt_learning = False
        model.peft_config["other"] = SimpleNamespace(is_prompt_learning=False)
        model.active_adapter = "other"
        with symm_cp.training_step(model, batch, mesh) as step:
            step.loss.backward()
