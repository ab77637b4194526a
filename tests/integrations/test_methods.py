"""Models of transformers under each method of `context_parallel`, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.test_methods import MIXED, exchanges, mesh_2d
from tests.exhaustive import exhaustive, pairs, some
from tests.integrations.common import causal_batch, check_client, recomputing
from tests.integrations.decoders import CLIENTS
from tests.integrations.encoders import ENCODERS, SEQ2SEQ, check_encoder, masked_batch, pair_batch
from tests.integrations.test_compiled import at_most, compilable, layers_compiled
from tests.integrations.test_decoders import LENGTH, batch_of

NAMES = ["llama", "gpt-oss", "gemma2", "deepseek-v3", "mistral"]
KINDS = ["mask of ones", "packed", "padded left", "padded right"]


def on(group: dist.ProcessGroup, method: Any) -> dict[str, Any]:
    """Returns the arguments for a method; a two-dimensional one takes a mesh."""
    return {"method": method, "mesh": mesh_2d((2, 2)) if isinstance(method, tuple) else None}


def decodes(group: dist.ProcessGroup, name: str, kind: str, layout: str, method: Any) -> None:
    with exchanges() as made:
        check_client(group, CLIENTS[name], batch_of(kind), layout=layout, **on(group, method))
    assert method == "auto" or set(made) == {"forward", "backward"}


PLAIN = (("gpt-oss", "padded left", (2, "ulysses"), "HeadTail"),)


@pytest.mark.parametrize(
    ("name", "kind", "how", "layout"),
    some(
        *PLAIN,
        of=pairs(
            NAMES,
            KINDS,
            [(2, "ulysses"), (4, "ulysses"), (4, MIXED), (2, "auto")],
            ["HeadTail", "Sequential"],
            also=PLAIN,
        ),
    ),
)
def test_decoders(ranks: Ranks, name: str, kind: str, how: tuple[int, Any], layout: str) -> None:
    world_size, method = how
    ranks.run(world_size, decodes, name, kind, layout, method)


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "method", "layout"),
    [
        (2, "ulysses", "HeadTail"),
        (4, "ulysses", "Sequential"),
        (4, MIXED, "HeadTail"),
        (2, "auto", "Sequential"),
    ],
)
@pytest.mark.ranks
def test_encoders(group: dist.ProcessGroup, world_size: int, layout: str, method: Any) -> None:
    for source, target in ((24, 16), (27, 13)):
        batch = pair_batch(source, target, padding=True)
        check_encoder(group, SEQ2SEQ["t5"], batch, layout, **on(group, method))
    batch = masked_batch(24, padding=True)
    check_encoder(group, ENCODERS["modernbert"], batch, layout, **on(group, method))


@exhaustive
@pytest.mark.parametrize(("world_size", "method"), [(2, "ulysses"), (4, "ulysses"), (4, MIXED)])
@pytest.mark.ranks
def test_dropout_and_checkpoints(group: dist.ProcessGroup, world_size: int, method: Any) -> None:
    """Dropout is the same as with the default method, also when activations are recomputed."""
    found = []
    batch = batch_of("packed")
    for given in (None, method):
        torch.manual_seed(5)
        client = CLIENTS["llama"].having(attention_dropout=0.2)
        model = client.make("eager").train()
        how = on(group, given)
        mesh = how.pop("mesh") or group
        local, reduce_loss = symm_cp.shard_batch(mesh, batch, method=given)
        labels = local.pop("labels")
        recomputing(model)
        with symm_cp.context_parallel(mesh, model=model, method=given,
                                      load_balancer=reduce_loss.load_balancer):  # fmt: skip
            logits = model(**local, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            reduce_loss(loss).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([logits.detach(), *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def compiled_layers(group: dist.ProcessGroup, name: str, kind: str, method: Any) -> None:
    """No graph is broken, and few are made."""
    torch._dynamo.reset()
    client = compilable(CLIENTS[name]).having(num_hidden_layers=1)
    with at_most(2), exchanges() as made:
        check_client(
            group,
            client,
            batch_of(kind),
            prepare=layers_compiled(backend="aot_eager"),
            **on(group, method),
        )
    assert set(made) == {"forward", "backward"}


@exhaustive
@pytest.mark.parametrize(
    ("name", "kind", "world_size", "method"),
    [
        ("llama", "packed", 2, "ulysses"),
        ("gpt-oss", "padded right", 2, "ulysses"),
        ("gemma2", "mask of ones", 4, MIXED),
        ("deepseek-v3", "padded right", 2, "ulysses"),
    ],
)
def test_compiled_layers(ranks: Ranks, name: str, kind: str, world_size: int, method: Any) -> None:
    ranks.run(world_size, compiled_layers, name, kind, method, timeout=600)


def one_graph(group: dist.ProcessGroup, method: Any) -> None:
    """A compiled layer is reused for other lengths and layouts."""
    torch._dynamo.reset()
    client = CLIENTS["llama"].having(num_hidden_layers=1)
    with at_most(3):
        for length, layout in ((LENGTH, "HeadTail"), (40, "Sequential"), (64, "HeadTail")):
            check_client(
                group,
                client,
                causal_batch(length),
                layout=layout,
                prepare=layers_compiled(backend="aot_eager", dynamic=True),
                **on(group, method),
            )


@exhaustive
def test_compiled_layers_serve_other_lengths(ranks: Ranks) -> None:
    ranks.run(2, one_graph, "auto", timeout=600)


@exhaustive
@pytest.mark.ranks(4)
def test_fewer_heads_than_ranks(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="query has 2 heads for 4 ranks: method"):
        check_client(group, CLIENTS["llama"].having(num_attention_heads=2, num_key_value_heads=2),
                     batch_of("packed"), method="ulysses")  # fmt: skip
