"""A real client: a Llama of Hugging Face's transformers, trained under `context_parallel`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import symm_cp
from tests.context_parallel.common import mesh_of
from tests.pool import Ranks

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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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
