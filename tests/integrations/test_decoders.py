"""Decoders of transformers under `context_parallel(model=...)`, as in one process or refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive, pairs, some
from tests.integrations.common import (
    BALANCERS,
    Batch,
    Client,
    Result,
    assert_near,
    assert_same,
    causal_batch,
    check_client,
    in_one_process,
    recomputing,
    summed_grads,
    under_context_parallel,
)
from tests.integrations.decoders import CLIENTS, REFUSED, STRANGERS
from tests.integrations.rounding import largest, size

# Not divisible by 2 or 4 ranks, or by their numbers of chunks.
LENGTH = 27
DOCUMENTS = [4, 11, 1, 3, 8]

BATCHES: dict[str, dict[str, Any]] = {
    "mask of ones": {},
    "no mask": {"masked": False},
    "packed": {"documents": DOCUMENTS},
    "padded left": {"padding": "left"},
    "padded right": {"padding": "right"},
}


def batch_of(kind: str, length: int = LENGTH) -> Batch:
    return causal_batch(length, **BATCHES[kind])


def checks(
    group: dist.ProcessGroup,
    client: Client,
    layout: str = "HeadTail",
    batch: str = "mask of ones",
    **how: Any,
) -> None:
    check_client(group, client, batch_of(batch), layout=layout, **how)


PLAIN = (("gpt-oss", "mask of ones", 2, "HeadTail"), ("llama", "packed", 2, "HeadTail"))


@pytest.mark.parametrize(
    ("name", "kind", "world_size", "layout"),
    some(*PLAIN, of=pairs(CLIENTS, BATCHES, (2, 4), BALANCERS, also=PLAIN)),
)
def test_clients(ranks: Ranks, name: str, kind: str, world_size: int, layout: str) -> None:
    ranks.run(world_size, checks, CLIENTS[name], layout, kind)


# With 27 positions on 4 ranks, each rank holds 6 or 7, in chunks of 3 or 4.
@exhaustive
@pytest.mark.parametrize("window", [1, 5, 7, 13, 27])
def test_windows_of_any_length(ranks: Ranks, window: int) -> None:
    for layout in BALANCERS:
        ranks.run(4, checks, CLIENTS["mistral"].having(sliding_window=window), layout)


@exhaustive
@pytest.mark.parametrize(
    ("name", "window", "layout"), pairs(["gemma2", "gpt-oss", "gemma3"], [2, 7, 26], BALANCERS)
)
def test_windows_of_some_layers(ranks: Ranks, name: str, window: int, layout: str) -> None:
    ranks.run(4, checks, CLIENTS[name].having(sliding_window=window), layout)


@exhaustive
@pytest.mark.parametrize(("size", "kind"), list(zip([1, 5, 7, 27, 40], BATCHES, strict=True)))
def test_chunks_of_any_length(ranks: Ranks, size: int, kind: str) -> None:
    ranks.run(4, checks, CLIENTS["llama4"].having(attention_chunk_size=size), batch=kind)


@exhaustive
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
@pytest.mark.ranks(4)
def test_one_position(group: dist.ProcessGroup, name: str) -> None:
    client = CLIENTS[name]
    check_client(group, client, causal_batch(5))


@exhaustive
@pytest.mark.parametrize(
    ("name", "kind", "reentrant"),
    pairs(["llama", "mistral", "gemma2", "gpt-oss"], ["packed", "padded left"], [False, True]),
)
def test_recomputed_activations(ranks: Ranks, name: str, kind: str, reentrant: bool) -> None:
    prepare = functools.partial(recomputing, reentrant=reentrant)
    tolerance = CLIENTS[name].tolerance if reentrant else None  # reentrant: recomputed in float32
    ranks.run(2, checks, CLIENTS[name], batch=kind, prepare=prepare, tolerance=tolerance)


# --- modes -------------------------------------------------------------------------------------


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def errors(actual: Result, exact: Result) -> dict[str, float]:
    """The error of each result, relative to its size."""
    pairs = {"logits": (actual.logits, exact.logits), "loss": (actual.loss, exact.loss)}
    for name, grad in exact.grads.items():
        other = actual.grads[name]
        assert grad is not None
        assert other is not None
        pairs[name] = (other, grad)
    return {name: size(a.double() - b) / max(size(b), 1e-3) for name, (a, b) in pairs.items()}


@exhaustive
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.ranks(2)
def test_autocast(group: dist.ProcessGroup, name: str) -> None:
    client = CLIENTS[name]
    single = replace(client, dtype=torch.float32)
    # The loss is one number, and some weights have eight.
    runs = []
    for _ in range(4):
        batch = batch_of("no mask", 24)
        exact = in_one_process(client, batch)
        with bfloat16():
            runs.append(errors(in_one_process(single, batch), exact))
    rounded = largest(runs)
    balancer = symm_cp.HeadTail(24, group.size())
    spread = under_context_parallel(group, single, batch, balancer=balancer, around=bfloat16)
    for name, error in errors(spread, exact).items():
        assert error <= 3 * rounded[name] + 2**-9, (name, error, rounded[name])


# --- models that were not thought of -----------------------------------------------------------


OTHERS = [name for name in STRANGERS if name not in REFUSED]


@exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(ranks: Ranks, name: str) -> None:
    """Tests each at one world size and layout; CLIENTS cover the dependence on these."""
    client = STRANGERS[name]
    places = ((2, "HeadTail"), (2, "Sequential"), (4, "HeadTail"), (2, "Sequential"))
    world_size, layout = places[OTHERS.index(name) % 4]
    for kind in ("mask of ones", "packed"):
        ranks.run(world_size, checks, client, layout, kind)


@pytest.mark.parametrize("name", some("lfm2", "mamba", of=REFUSED))
@pytest.mark.ranks(2)
def test_refused_models(group: dist.ProcessGroup, name: str) -> None:
    client = STRANGERS[name]
    match = REFUSED[name]
    balancer = symm_cp.HeadTail(LENGTH, group.size())
    batch = batch_of("mask of ones")
    with pytest.raises(NotImplementedError, match=match):
        under_context_parallel(group, client, batch, balancer=balancer)


@exhaustive
@pytest.mark.ranks(2)
def test_losses_that_balance_experts(group: dist.ProcessGroup) -> None:
    """Computes the loss from all ranks' router logits, as the refusal's message suggests."""
    client = CLIENTS["mixtral"]
    batch = batch_of("mask of ones")
    dense = client.make("eager")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = dense.model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    expected = load_balancing_loss_func(logits.router_logits, 4, 2)
    expected.backward()
    mesh, balancer = mesh_of(group), symm_cp.Sequential(LENGTH, group.size())
    local, _ = symm_cp.shard_batch(mesh, batch, load_balancer=balancer)
    local.pop("labels")
    model = client.make("eager")
    sizes = [len(ids) * length for length in balancer.lengths]
    with symm_cp.context_parallel(mesh, model=model, load_balancer=balancer):
        with pytest.raises(NotImplementedError, match="has output_router_logits=True"):
            model(**local, output_router_logits=True)
        outputs = model.model(**local, output_router_logits=True)
        logits = tuple(
            symm_cp.low_contention_all_gather(each, group=group, sizes=sizes)
            for each in outputs.router_logits
        )
        loss = load_balancing_loss_func(logits, 4, 2)
        (loss / group.size()).backward()
    assert_near("loss", loss.detach(), expected.detach(), 1e-5)
    grads = summed_grads(group, model)
    for name, parameter in dense.named_parameters():
        if parameter.grad is not None:
            assert_near(name, grads[name], parameter.grad, 1e-4, 1e-3)


# --- positions ---------------------------------------------------------------------------------


@exhaustive
@pytest.mark.parametrize(
    ("name", "kind", "world_size", "layout"),
    pairs(["llama-dynamic", "llama-longrope", "llama4-temperature"], BATCHES, (2, 4), BALANCERS),
)
def test_what_depends_on_the_length(
    ranks: Ranks, name: str, kind: str, world_size: int, layout: str
) -> None:
    ranks.run(world_size, checks, STRANGERS[name], layout, kind)


# --- positions ---------------------------------------------------------------------------------


def counts_positions(group: dist.ProcessGroup, client: Client, padding: str | None) -> None:
    """Without `position_ids`, ranks use the positions that the model counts in one process."""
    batch = causal_batch(LENGTH, padding=padding)
    batch.pop("position_ids", None)
    expected = in_one_process(client, batch)
    model = client.make("eager")
    with symm_cp.training_step(model, batch, mesh_of(group)) as step:
        step.loss.backward()
    whole = symm_cp.context_parallel_unshard(group, [step.output.logits.detach()], [1])[0]
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(Result(step.loss.detach(), whole, grads), expected, batch, client.tolerance)


@pytest.mark.parametrize(
    ("name", "padding"),
    some(
        ("opt", "left"),
        ("biogpt", "left"),
        of=pairs(["opt", "biogpt", "gpt2", "llama"], ["left", "right", None]),
    ),
)
def test_positions_are_those_that_a_model_counts(
    ranks: Ranks, name: str, padding: str | None
) -> None:
    client = CLIENTS[name] if name in CLIENTS else STRANGERS[name]
    ranks.run(2, counts_positions, client, padding)
