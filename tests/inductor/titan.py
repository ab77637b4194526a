"""A decoder with torchtitan's conventions: its modules' names, plan of styles and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH, HEADS, KEY_HEADS, VOCABULARY = 32, 4, 2, 64
FEATURES = WIDTH // HEADS
aten = torch.ops.aten
_KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


@dataclass(frozen=True)
class Sizes:
    """Features of a block, heads of queries and of keys, features of a head, hidden features."""

    width: int = WIDTH
    heads: int = HEADS
    key_heads: int = KEY_HEADS
    features: int = FEATURES
    hidden: int = 3 * WIDTH


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, queries = sizes.width, sizes.heads * sizes.features
        keys = sizes.key_heads * sizes.features
        self.features = sizes.features
        self.wq, self.wo = (
            nn.Linear(width, queries, bias=False),
            nn.Linear(queries, width, bias=False),
        )
        self.wk, self.wv = (nn.Linear(width, keys, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.features)) for w in (self.wq, self.wk, self.wv))
        q, k = (self.rotated(t, rotation) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    @staticmethod
    def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        (a, b), (cos, sin) = x.chunk(2, -1), rotation.unbind()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        sizes = sizes or Sizes()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.width) for _ in range(2))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


def rotation(length: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns cosines and sines, (2, S, 1, E / 2)."""
    speed = 1e4 ** (-torch.arange(0, features, 2) / features)
    angle = torch.outer(torch.arange(length), speed)[:, None]
    return torch.stack([angle.cos(), angle.sin()]).to(dtype)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rotated = rotation(tokens.shape[1], FEATURES, self.norm.weight.dtype)
        # A block that is compiled by itself must not be handed an AsyncCollectiveTensor: torch 2.13
        # then gives the embedding a gradient that is no DTensor.
        x = self.tok_embeddings(tokens) * 1.0
        for layer in self.layers.values():
            x = layer(x, rotated)
        return self.output(self.norm(x))


def block_plan() -> dict[str, Any]:
    """Tensor and sequence parallelism of a block."""
    rowwise = RowwiseParallel(output_layouts=Shard(1))
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": rowwise,
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "feed_forward.w2": rowwise,
    }


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor, sequence and loss parallelism."""
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    plan |= {f"layers.*.{name}": style for name, style in block_plan().items()}
    parallelize_module(model, mesh, plan)


def _contexts() -> Any:
    """torchtitan's selective checkpoint: keeps listed ops' results, but of every second matmul."""
    matmuls = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op == aten.mm.default:
            matmuls[ctx.is_recompute] += 1
        kept = op in _KEPT and not (op == aten.mm.default and matmuls[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpoint(model: Decoder) -> None:
    """Wraps each block."""
    for name, layer in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(
            layer, context_fn=_contexts, preserve_rng_state=False
        )
