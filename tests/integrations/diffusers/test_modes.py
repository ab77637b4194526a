"""The caller's modes: compiled blocks, checkpoints, autocast, inference, our torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.integrations.diffusers.test_models import DEGREES, checks, ranks_of
from tests.integrations.rounding import largest, size

pytestmark = exhaustive


def compiled(model: nn.Module) -> None:
    torch._dynamo.reset()
    # Not by Inductor, which takes a minute for these blocks and changes nothing around our ops.
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("flux", {"ring_degree": 2}),
        ("ltx", DEGREES["ring 2 and ulysses 2"]),
        ("qwen with padding", {"ulysses_degree": 2, "ulysses_anything": True}),
    ],
)
def test_compiled_blocks(ranks: Ranks, name: str, degrees: dict[str, Any]) -> None:
    ranks.run(ranks_of(degrees), checks, (name,), degrees, prepare=compiled, timeout=600)


def recomputing(model: nn.Module) -> None:
    model.enable_gradient_checkpointing()
    model.train()


@pytest.mark.parametrize("degrees", DEGREES)
def test_recomputed_activations(ranks: Ranks, degrees: str) -> None:
    ranks.run(
        4, checks, ("flux", "wan", "qwen with padding"), DEGREES[degrees], prepare=recomputing
    )


@pytest.mark.ranks(4)
def test_inference_then_training(group: dist.ProcessGroup) -> None:
    import symm_cp.integrations.diffusers as integration
    from tests.integrations.diffusers.common import CLIENTS, parallel, ring_of

    client = CLIENTS["flux"]
    inputs = client.inputs(8, 16)
    integration.enable()
    try:
        model = parallel(client, ring_of(group))
        outs = []
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                outs.append(model(**inputs, return_dict=False)[0])
        for out in outs[:2]:
            assert torch.equal(out.clone(), outs[2].detach())
        outs[2].sum().backward()
    finally:
        integration.disable()


@pytest.mark.parametrize("degrees", [{"ring_degree": 4}, DEGREES["ring 2 and ulysses 2"]])
@pytest.mark.ranks(4)
def test_autocast(group: dist.ProcessGroup, degrees: dict[str, Any]) -> None:
    import diffusers

    import symm_cp.integrations.diffusers as integration
    from tests.integrations.diffusers.common import CLIENTS, over_ranks, run_model

    client = CLIENTS["flux"]
    inputs = client.inputs(8, 16)
    exact = run_model(client.make(), inputs)
    single = {
        name: value.float() if torch.is_tensor(value) else value for name, value in inputs.items()
    }

    def errors(model: nn.Module) -> dict[str, float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = run_model(model.float(), single)
        if model._parallel_config is not None:
            result = over_ranks(result, group)
        found = {"output": size(result.out - exact.out)}
        # The timestep's gradient is two sums of terms that cancel: rounding errors of one run say
        # nothing about those of another. test_models compares it in float64.
        for name, grad in exact.grads.items():
            other = result.grads[name]
            if grad is not None and other is not None and name != "timestep":
                found[name] = size(other - grad)
        return found

    # Some tensors have eight numbers: three runs, in which different ones are rounded up.
    exact_states = single["hidden_states"]
    runs = []
    for _ in range(3):
        single["hidden_states"] = exact_states * (1 + 2**-9 * torch.randn_like(exact_states))
        runs.append(errors(client.make()))
    rounded = largest(runs)
    single["hidden_states"] = exact_states

    integration.enable()
    try:
        model = client.make()
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
        for name, error in errors(model).items():
            assert error <= 3 * rounded[name] + 1e-3, (name, error, rounded[name])
    finally:
        integration.disable()


@pytest.mark.parametrize("degrees", [{"ring_degree": 4}, DEGREES["ring 2 and ulysses 2"]])
@pytest.mark.ranks(4)
def test_our_backend(group: dist.ProcessGroup, degrees: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from tests.integrations.diffusers.common import CLIENTS, check_client

    shape = (degrees.get("ring_degree", 1), degrees.get("ulysses_degree", 1))
    names = ("ring", "ulysses")
    backends = dict.fromkeys(names, "symm_cp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)
    assert dist.get_backend(mesh["ring"].get_group()) == "symm_cp"
    check_client(CLIENTS["qwen with padding"], degrees, mesh=mesh)
