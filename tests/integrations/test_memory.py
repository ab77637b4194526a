"""Nothing of the size of a mask or of scores is allocated in a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.integrations.common import Client, causal_batch, target_loss

TOKENS = 4096
WINDOW = {"sliding_window": 512}


@contextmanager
def largest_allocation() -> Iterator[list[int]]:
    """Yields a list that on exit gets the size in bytes of the largest tensor made inside."""
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    found.append(max(event.nbytes() for event in events if event.name() == "[memory]"))


def step(group: dist.ProcessGroup, client: Client, how: dict[str, object]) -> int:
    """Returns the size in bytes of the largest tensor that a training step allocates."""
    mesh, balancer = mesh_of(group), symm_cp.HeadTail(TOKENS, group.size())
    batch = causal_batch(TOKENS, samples=1, **how)  # type: ignore[arg-type]
    model = client.make("eager")
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, load_balancer=balancer)
    labels = local.pop("labels")
    with (
        largest_allocation() as found,
        symm_cp.context_parallel(mesh, model=model, load_balancer=balancer),
    ):
        reduce_loss(target_loss(model(**local, **client.call).logits, labels)).backward()
    return found[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("Llama", {}, {}),
        ("Llama", {}, {"documents": [1000, 2000, 1096]}),
        ("Llama", {}, {"padding": "left"}),
        ("Mistral", WINDOW, {}),
        ("Gemma2", WINDOW, {}),
        ("GptOss", {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2}, {}),
    ],
)
def test_no_scores_and_no_masks(
    ranks: Ranks, name: str, options: dict[str, object], how: dict[str, object]
) -> None:
    client = replace(Client(name).having(num_hidden_layers=1, **options), dtype=torch.float32)
    largest = max(ranks.run(2, step, client, how))
    # The size of a one-byte mask of this rank's positions by one rank's positions.
    assert largest < (TOKENS // 2) ** 2, largest
