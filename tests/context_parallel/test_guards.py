"""What `context_parallel` refuses because it would get it wrong: real models, and their compiled forms."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import symm_cp
from tests.context_parallel.common import mesh_of
from tests.pool import Ranks

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}


def build(name: str, **options: Any) -> nn.Module:
    """A small model with random weights, the same on all ranks."""
    torch.manual_seed(0)
    known = {**SIZES, "attn_implementation": "sdpa", **options}
    head, dtype = known.pop("head", "ForCausalLM"), known.pop("dtype", None)
    known = {key: value for key, value in known.items() if value != "unset"}
    config = getattr(transformers, name + known.pop("config", "Config"))(**known)
    model = getattr(transformers, name + head)(config)
    return model.double() if dtype is None else model.to(dtype)


def differences(group: dist.ProcessGroup, model: nn.Module, length: int, **options: Any) -> None:
    """Compares logits and gradients with those of one process."""
    mesh, W = mesh_of(group), group.size()
    dense = copy.deepcopy(model)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))
    full = dense(input_ids=ids).logits
    expected = F.cross_entropy(full.flatten(0, 1), labels.flatten())
    expected.backward()
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    balancer = symm_cp.HeadTail(length, W)
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, shift_labels=False)
    targets = local.pop("labels")
    if not options.pop("with_mask", True):
        local.pop("attention_mask")
    given = options.pop("load_balancer", balancer)
    with symm_cp.context_parallel(mesh, load_balancer=given, **options):
        logits = model(**local).logits
        loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        loss.backward()
    torch.testing.assert_close(
        logits, full[:, balancer.positions(group.rank())], rtol=1e-5, atol=1e-5
    )
    for (name, got), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        if want.grad is not None:
            dist.all_reduce(got.grad, group=group)
            torch.testing.assert_close(
                got.grad, want.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )
