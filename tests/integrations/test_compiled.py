"""Models of transformers and their layers under `torch.compile` within `context_parallel`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import in_turns
from tests.integrations.common import Client, assert_near, causal_batch, check_client
from tests.integrations.decoders import CLIENTS

FIRST_CALL_LIMIT = 3.0  # times the layer's first call outside of contexts
LENGTH = 48
DOCUMENTS = [20, 12, 16]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def at_most(more_graphs: int, *, breaks: int = 0) -> Iterator[None]:
    """Fails if more new graphs, or more graph breaks, are made inside."""
    before, broken = graphs(), sum(counters["graph_break"].values())
    yield
    assert graphs() - before <= more_graphs, graphs() - before
    assert sum(counters["graph_break"].values()) - broken <= breaks, dict(counters["graph_break"])


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if type(part).__name__.endswith("DecoderLayer")]


def layers_compiled(**options: Any) -> Callable[[nn.Module], None]:
    """Prepares a model: each decoder layer is compiled, without a graph break."""

    def prepare(model: nn.Module) -> None:
        layers = decoder_layers(model)
        assert layers
        for layer in layers:
            layer.compile(fullgraph=True, **options)

    return prepare


def compilable(client: Client) -> Client:
    """Gives a client experts that Dynamo can trace: "eager" ones loop over the chosen experts."""
    return client.having(experts_implementation="batched_mm")


# --- against one process -----------------------------------------------------------------------


def layers_of_client(
    group: dist.ProcessGroup, client: Client, layout: str, kind: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    client = compilable(client)
    batch = causal_batch(LENGTH, **kind)
    with at_most(2 * client.make("eager").config.num_hidden_layers):
        check_client(
            group, client, batch, layout=layout, prepare=layers_compiled(backend="aot_eager")
        )


@pytest.mark.exhaustive
def test_layer_with_window_and_packing(ranks: Ranks) -> None:
    ranks.run(2, layers_of_client, ONE_LAYER, "HeadTail", {"documents": DOCUMENTS})


ONE_LAYER = CLIENTS["mistral"].having(num_hidden_layers=1)
#: Models whose layers differ for the compiler, each with as few layers as show the difference.
LAYERED = {
    "gemma2": {},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt-oss": {"num_hidden_layers": 1},
    "llama4": {},
    "qwen3-moe": {"num_hidden_layers": 1},
    "deepseek-v3": {},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "batch"),
    in_turns(
        LAYERED, [("HeadTail", {"documents": DOCUMENTS}), ("Sequential", {"padding": "right"})]
    ),
    ids=str,
)
def test_layers_of_clients(ranks: Ranks, name: str, batch: Any) -> None:
    ranks.run(2, layers_of_client, CLIENTS[name].having(**LAYERED[name]), *batch, timeout=600)


def whole_model(group: dist.ProcessGroup, client: Client, kind: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def prepare(model: nn.Module) -> None:
        model.compile(fullgraph=True, backend="aot_eager")

    with at_most(1):
        check_client(group, compilable(client), causal_batch(LENGTH, **kind), prepare=prepare)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", {"documents": DOCUMENTS}),
        ("gemma3", {"padding": "left"}),
        ("llama4", {"masked": False}),
    ],
    ids=str,
)
def test_whole_models_are_one_graph(ranks: Ranks, name: str, kind: dict[str, Any]) -> None:
    client = CLIENTS[name].having(**LAYERED.get(name, {}))
    ranks.run(2, whole_model, client, kind, timeout=600)


# --- one compiled layer, many calls --------------------------------------------------------------


class Problem:
    """A client's model, and a copy with compiled decoder layers."""

    def __init__(self, group: dist.ProcessGroup, client: Client, **options: Any) -> None:
        torch._dynamo.reset()
        self.group, self.tolerance = group, client.tolerance
        self.model = client.make("eager")
        self.compiled = client.make("eager")
        self.options = {"fullgraph": True, "backend": "aot_eager", **options}
        for layer in decoder_layers(self.compiled):
            layer.compile(**self.options)

    def step(self, model: nn.Module, local: dict[str, torch.Tensor], region: Any) -> Any:
        """Logits and gradients of this rank's part."""
        model.zero_grad()
        with region:
            logits = model(**local, use_cache=False).logits
            logits.square().mean().backward()
        return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    def check(self, length: int, *, spread: bool = True, **kind: Any) -> None:
        """Compares a step of the compiled model with the eager one, in a context if `spread`."""
        batch = causal_batch(length, **kind)
        batch.pop("labels")
        mesh, balancer = mesh_of(self.group), symm_cp.HeadTail(length, self.group.size())
        results = []
        for model in (self.model, self.compiled):
            local, region = batch, torch.enable_grad()
            if spread:
                local, _ = symm_cp.shard_batch(mesh, batch, load_balancer=balancer)
                region = symm_cp.context_parallel(mesh, model=model, load_balancer=balancer)
            results.append(self.step(model, local, region))
        (want, grads), (got, compiled_grads) = results
        # transformers' norms are float32, which the compiler rounds differently.
        assert_near("logits", got, want, self.tolerance)
        largest = max(float(grad.abs().max()) for grad in grads)
        for one, other in zip(compiled_grads, grads, strict=True):
            assert_near("gradient", one, other, self.tolerance, 1e-3 * largest)


def many_calls(group: dist.ProcessGroup) -> None:
    problem = Problem(group, ONE_LAYER)
    for length, documents in ((48, [20, 12, 16]), (64, [40, 24])):
        problem.check(length, documents=documents)
    with at_most(0), torch._dynamo.config.patch(error_on_recompile=True):
        for documents in ([30, 34], [1, 60, 3], [30, 40, 10, 16], [50, 3, 3]):
            problem.check(sum(documents), documents=documents)
    # Without a context the layer is traced again, once; graphs made for contexts are kept.
    with at_most(2):
        problem.check(32, spread=False)
        problem.check(40, spread=False)
    with at_most(0):
        problem.check(72, documents=[40, 32])
        problem.check(56, spread=False)


@pytest.mark.exhaustive
def test_one_layer_serves_all_lengths_and_documents(ranks: Ranks) -> None:
    ranks.run(2, many_calls, timeout=600)


def outside_first(group: dist.ProcessGroup) -> None:
    problem = Problem(group, ONE_LAYER)
    for spread in (False, True, False, True):
        problem.check(LENGTH, spread=spread)


@pytest.mark.exhaustive
def test_compiled_outside_of_contexts_first(ranks: Ranks) -> None:
    ranks.run(2, outside_first, timeout=600)


def first_call(group: dist.ProcessGroup, spread: bool) -> float:
    """Returns the CPU seconds of a first call on this rank; waits for others do not count."""
    problem = Problem(group, ONE_LAYER)
    kind = {"documents": DOCUMENTS} if spread else {}
    begin = time.process_time()
    problem.check(LENGTH, spread=spread, **kind)
    return time.process_time() - begin


@pytest.mark.exhaustive
def test_first_call_of_a_layer(ranks: Ranks) -> None:
    alone, spread = (max(ranks.run(2, first_call, value, timeout=600)) for value in (False, True))
    assert spread < FIRST_CALL_LIMIT * alone, (spread, alone)


def with_mode(group: dist.ProcessGroup) -> None:
    problem = Problem(group, ONE_LAYER, backend="inductor", mode="max-autotune")
    problem.check(LENGTH, documents=DOCUMENTS)
    problem.check(LENGTH, documents=DOCUMENTS)


@pytest.mark.exhaustive
def test_modes_of_the_compiler(ranks: Ranks) -> None:
    """Tests max-autotune, the only mode that changes anything on the CPU."""
    ranks.run(2, with_mode, timeout=600)
