"""A decoder with torchtitan's conventions: its modules' names, plan of styles and checkpoints."""

from __future__ import annotations

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


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KEY_HEADS * FEATURES, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, FEATURES)) for w in (self.wq, self.wk, self.wv))
        q, k = (self.rotated(t, rotation) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    @staticmethod
    def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        (a, b), (cos, sin) = x.chunk(2, -1), rotation.unbind()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        speed = 1e4 ** (-torch.arange(0, FEATURES, 2) / FEATURES)
        angle = torch.outer(torch.arange(tokens.shape[1]), speed)[:, None]
        rotation = torch.stack([angle.cos(), angle.sin()]).to(self.norm.weight.dtype)
        # A block that is compiled by itself must not be handed an AsyncCollectiveTensor: torch 2.13
        # then gives the embedding a gradient that is no DTensor.
        x = self.tok_embeddings(tokens) * 1.0
        for layer in self.layers.values():
            x = layer(x, rotation)
        return self.output(self.norm(x))


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor, sequence and loss parallelism."""
    rowwise = RowwiseParallel(output_layouts=Shard(1))
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    of_block = {
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
    plan |= {f"layers.*.{name}": style for name, style in of_block.items()}
    parallelize_module(model, mesh, plan)


def _contexts() -> Any:
    """torchtitan's selective checkpoint: the listed ops are kept, of matmuls every second."""
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
