"""A real client: a Llama of Hugging Face's transformers, trained under `context_parallel`."""

from __future__ import annotations

import contextlib
import copy
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    masking_utils,
)

import symm_cp
from symm_cp.integrations.transformers import inspector
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import some

STEPS, VOCABULARY = 3, 97


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).double()


def trains_like_one_process(group: dist.ProcessGroup, length: int, recompute: bool) -> None:
    mesh = mesh_of(group)
    split = model()
    dense = copy.deepcopy(split)
    if recompute:
        split.gradient_checkpointing_enable({"use_reentrant": False})
        split.train()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (split, dense)]
    for step in range(STEPS):
        ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = dense(input_ids=ids).logits[:, :-1]
        expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        expected.backward()

        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        local, reduce_loss = symm_cp.shard_batch(mesh, batch)
        labels = local.pop("labels")
        with symm_cp.context_parallel(mesh, load_balancer=symm_cp.HeadTail(length, group.size())):
            logits = split(**local, use_cache=False).logits
            loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            loss.backward()
        # The rotary embedding of transformers is computed in float32, from other products.
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
        for (name, got), want in zip(split.named_parameters(), dense.parameters(), strict=True):
            dist.all_reduce(got.grad, group=group)
            torch.testing.assert_close(
                got.grad, want.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("world_size", some(1, 4, of=[1, 2, 3, 4]))
def test_llama_trains_like_in_one_process(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, trains_like_one_process, 44, False)


def test_llama_with_gradient_checkpointing(ranks: Ranks) -> None:
    ranks.run(2, trains_like_one_process, 37, True)


def refuses_padding(group: dist.ProcessGroup) -> None:
    ids = torch.zeros(1, 16, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    local, _ = symm_cp.shard_batch(mesh_of(group), {"input_ids": ids, "attention_mask": mask})
    if not bool((local["attention_mask"] == 0).any()):
        local["attention_mask"][:, -1] = 0  # every rank's mask has padding, so every rank says so
    with (
        symm_cp.context_parallel(mesh_of(group)),
        pytest.raises(NotImplementedError, match="attn_mask of shape"),
    ):
        model()(**local, use_cache=False)


def test_padding_is_refused_not_dropped(ranks: Ranks) -> None:
    ranks.run(2, refuses_padding)


# --- flex attention --------------------------------------------------------------------------


def flex_model(window: int | None = None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A Llama, or a Mistral with a window, that uses flex attention, and one that uses SDPA."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    models = []
    for implementation in ("flex_attention", "sdpa"):
        if window is None:
            config = LlamaConfig(**options, attn_implementation=implementation)
            models.append(LlamaForCausalLM(config).double())
        else:
            config = MistralConfig(
                **options, sliding_window=window, attn_implementation=implementation
            )
            models.append(MistralForCausalLM(config).double())
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


@contextlib.contextmanager
def quick_masks() -> Iterator[None]:
    """Leaves transformers' mask creation uncompiled: compiling it takes most of the time."""
    create = masking_utils.create_block_mask

    def uncompiled(*args: Any, _compile: bool = False, **kwargs: Any) -> BlockMask:
        return create(*args, **kwargs)

    with unittest.mock.patch.object(masking_utils, "create_block_mask", uncompiled):
        yield


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def flex_trains(
    group: dist.ProcessGroup, *, compiled: bool, window: int | None = None, recompute: bool = False
) -> None:
    mesh, length = mesh_of(group), 24 * group.size()
    split, dense = flex_model(window)
    if recompute:
        split.gradient_checkpointing_enable({"use_reentrant": False})
        split.train()
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    logits = dense(input_ids=ids).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    local, reduce_loss = symm_cp.shard_batch(mesh, batch)
    labels, forward = local.pop("labels"), split
    if compiled:
        # A mask of the whole sequence, which transformers passes on; its own breaks the graph.
        local["attention_mask"] = create_block_mask(
            causal, None, None, length, length, device="cpu"
        )
        forward = torch.compile(split, fullgraph=True, backend="aot_eager")
    breaks = sum(counters["graph_break"].values())
    with quick_masks(), symm_cp.context_parallel(mesh):
        logits = forward(**local, use_cache=False).logits
        loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        loss.backward()
    assert sum(counters["graph_break"].values()) == breaks, dict(counters["graph_break"])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    for (name, got), want in zip(split.named_parameters(), dense.parameters(), strict=True):
        dist.all_reduce(got.grad, group=group)
        torch.testing.assert_close(
            got.grad, want.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
def test_llama_with_flex_attention(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, flex_trains, compiled=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2])
def test_compiled_llama_with_flex_attention(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, flex_trains, compiled=True)


@pytest.mark.exhaustive
def test_mistral_with_flex_attention_and_a_window(ranks: Ranks) -> None:
    ranks.run(2, flex_trains, compiled=False, window=30)


@pytest.mark.exhaustive
def test_llama_with_flex_attention_and_checkpointing(ranks: Ranks) -> None:
    ranks.run(2, flex_trains, compiled=False, recompute=True)


def flex_refuses_packing(group: dist.ProcessGroup) -> None:
    ids = torch.zeros(1, 24, dtype=torch.int64)
    # transformers takes it for packed sequences, and makes a mask of this rank's part of them.
    positions = torch.arange(24).unsqueeze(0) % 6
    split, _ = flex_model()
    for forward in (split, torch.compile(split, backend="aot_eager")):
        with (
            # As in releases of transformers whose mask functions are unknown here.
            unittest.mock.patch.object(inspector, "_replace", return_value=None),
            quick_masks(),
            symm_cp.context_parallel(mesh_of(group)),
            pytest.raises(ValueError, match="a BlockMask of the whole sequence as attention_mask"),
        ):
            forward(input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.exhaustive
def test_flex_masks_of_parts_are_refused(ranks: Ranks) -> None:
    ranks.run(2, flex_refuses_packing)
