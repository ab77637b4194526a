"""transformers' expert parallelism by `ep_implementation="symm_cp"`: against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.distributed import DistributedConfig

import symm_cp
from symm_cp import moe
from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import some
from tests.integrations.common import Client, causal_batch, saved
from tests.integrations.decoders import CLIENTS
from tests.tensor_parallel.common import whole

EIGHT = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
MODELS = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3")


def close(found: Any, want: torch.Tensor, tolerance: float, what: str) -> None:
    """Compares in `want`'s dtype: transformers loads some routers in float32."""
    scale = float(want.abs().max())
    torch.testing.assert_close(
        found.to(want.dtype), want, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}"
    )


def loaded(client: Client, folder: str, implementation: str, **sizes: int) -> nn.Module:
    config = DistributedConfig(ep_implementation=implementation, **sizes)
    made = type(client.make("eager"))
    return made.from_pretrained(  # type: ignore[attr-defined, no-any-return]
        folder,
        distributed_config=config,
        dtype=client.dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def in_a_world(
    group: dist.ProcessGroup, function: Callable[[dist.ProcessGroup, str], None], name: str
) -> None:
    """transformers spreads models over all ranks."""
    unfused = AssertionError("experts are fused with dispatch and combine")
    with (
        world(group, "symm_cp") as of_world,
        mock.patch.object(moe, "dispatch", side_effect=unfused),
    ):
        function(of_world, name)
        dist.barrier()  # others may still connect


def with_a_shared_batch(group: dist.ProcessGroup, name: str) -> None:
    """Ranks of a TP group hold the same batch, and each sends a part of it."""
    client = CLIENTS[name].having(**EIGHT, num_key_value_heads=4)
    W = group.size()
    model: Any = client.make("eager")
    # 13 tokens: not a multiple of the ranks; with 1 token some ranks have none.
    for shape in ((1, 13), (1, 1)):
        ids = torch.randint(3, 60, shape)
        model.zero_grad()
        expected = model(input_ids=ids, use_cache=False)
        expected.logits.square().sum().backward()
        with saved(model) as folder:
            split: Any = loaded(client, folder, "symm_cp", tp_size=W, ep_size=W)
        found = split(input_ids=ids, use_cache=False)
        logits = whole(found.logits)
        logits.square().sum().backward()
        close(logits, expected.logits, client.tolerance, "logits")
        grads = gradients(split)
        for parameter, want in gradients(model).items():
            close(grads[parameter], want, 5 * client.tolerance, parameter)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize(
    ("name", "world_size"),
    some(("qwen3-moe", 2), of=[(name, size) for name in MODELS for size in (2, 4)]),
)
def test_ranks_that_share_a_batch(ranks: Ranks, name: str, world_size: int) -> None:
    ranks.run(world_size, in_a_world, with_a_shared_batch, name)


def with_batches_of_their_own(group: dist.ProcessGroup, name: str) -> None:
    """With different batches on an FSDP group's ranks, compares with transformers' exchange."""
    client = CLIENTS[name].having(**EIGHT, num_key_value_heads=4)
    W, rank = group.size(), group.rank()
    model: Any = client.make("eager")
    ids = torch.randint(3, 60, (W, 9))
    expected = model(input_ids=ids, use_cache=False).logits.detach()
    results = {}
    with saved(model) as folder:
        for implementation in ("all_to_all", "symm_cp"):
            split: Any = loaded(client, folder, implementation, fsdp_size=W, ep_size=W)
            logits = split(input_ids=ids[rank : rank + 1], use_cache=False).logits
            logits.square().sum().backward()
            results[implementation] = gradients(split)
            close(logits, expected[rank : rank + 1], client.tolerance, implementation)
    for parameter, want in results["all_to_all"].items():
        close(results["symm_cp"][parameter], want, 5 * client.tolerance, parameter)


@pytest.mark.parametrize(
    ("name", "world_size"),
    some(("mixtral", 2), of=[("mixtral", 2), ("gpt-oss", 4), ("qwen3-moe", 2)]),
)
def test_ranks_with_batches_of_their_own(ranks: Ranks, name: str, world_size: int) -> None:
    ranks.run(world_size, in_a_world, with_batches_of_their_own, name)


def with_parts_of_a_sequence(group: dist.ProcessGroup, name: str) -> None:
    """With context parallelism over the same ranks: each has parts of sequences, and experts."""
    # FSDP2 divides gradients of lone shards twice in float64 and float16.
    client = replace(CLIENTS[name], dtype=torch.float32, tolerance=2e-5)
    client = client.having(**EIGHT)
    model: Any = client.make("eager")
    batch = causal_batch(26, padding="right")
    expected = model(**batch, use_cache=False)
    expected.loss.backward()
    with saved(model) as folder:
        split: Any = loaded(client, folder, "symm_cp", fsdp_size=group.size(), ep_size=group.size())
    with symm_cp.training_step(split, batch, split._device_mesh["fsdp"]) as step:
        step.loss.backward()
    close(step.loss, expected.loss, client.tolerance, "loss")
    grads = gradients(split)
    for parameter, want in gradients(model).items():
        close(grads[parameter], want, 5 * client.tolerance, parameter)


@pytest.mark.parametrize(
    ("name", "world_size"),
    some(
        ("qwen3-moe", 2), of=[("qwen3-moe", 2), ("gpt-oss", 4), ("mixtral", 4), ("deepseek-v3", 2)]
    ),
)
def test_ranks_with_parts_of_a_sequence(ranks: Ranks, name: str, world_size: int) -> None:
    ranks.run(world_size, in_a_world, with_parts_of_a_sequence, name)


def on_two_axes(group: dist.ProcessGroup, name: str, experts_over: int, in_parts: bool) -> None:
    """Combines tensor parallelism with different batches, or (`in_parts`) with parts of sequences.

    `experts_over`: 2 (the ranks that share a batch) or 4 (all ranks).
    """
    # FSDP2 divides gradients of lone shards twice in float64 and float16.
    client = replace(CLIENTS[name], dtype=torch.float32, tolerance=2e-5)
    client = client.having(**EIGHT, num_key_value_heads=4)
    model: Any = client.make("eager")
    batch = causal_batch(26, padding="right")
    if in_parts:
        want = model(**batch, use_cache=False).loss
    else:  # FSDP takes the mean of the losses of the ranks
        losses = [
            model(input_ids=ids[None], use_cache=False).logits.square().mean()
            for ids in batch["input_ids"]
        ]
        want = (losses[0] + losses[1]) / 2
    want.backward()
    with saved(model) as folder:
        sizes = {"tp_size": 2, "fsdp_size": 2, "ep_size": experts_over}
        split: Any = loaded(client, folder, "symm_cp", **sizes)
    mesh = split._device_mesh["fsdp"]
    if in_parts:
        with symm_cp.training_step(split, batch, mesh) as step:
            step.loss.backward()
        found = step.loss
    else:
        ids = batch["input_ids"][mesh.get_local_rank(), None]
        own = whole(split(input_ids=ids, use_cache=False).logits).square().mean()
        own.backward()
        want, found = losses[mesh.get_local_rank()], own
    close(whole(found), want, client.tolerance, "loss")
    grads = gradients(split)
    for parameter, needed in gradients(model).items():
        close(grads[parameter], needed, 5 * client.tolerance, parameter)


@pytest.mark.parametrize(
    ("name", "experts_over", "in_parts"),
    some(
        ("qwen3-moe", 4, False),
        of=[(n, w, p) for n in ("qwen3-moe", "mixtral") for w in (2, 4) for p in (False, True)],
    ),
)
def test_meshes_of_two_dimensions(
    ranks: Ranks, name: str, experts_over: int, in_parts: bool
) -> None:
    function = functools.partial(on_two_axes, experts_over=experts_over, in_parts=in_parts)
    ranks.run(4, in_a_world, function, name)
