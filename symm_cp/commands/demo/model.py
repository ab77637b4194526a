"""A small Llama-style transformer over bytes.

S, B, D: sequence, batch, features; H heads of E features. Activations are (S, B, D): with the
sequence first, the shards of a split sequence are contiguous.

The model is independent of ranks. When it is split over ranks, projections have fewer features, and
activations between blocks are a part of the sequence; attention takes both sizes from its
projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
_ROPE_BASE = 10000.0
_INIT_STD = 0.02

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.dim // self.heads


def rotation(length: int, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Returns cosines and sines, (S, E / 2), of the rotary embedding."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, _ROPE_BASE**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotates the pairs (i, i + E / 2) of x, (B, H, S, E), by angles that grow with position."""
    cos, sin = by
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention: (B, H, S, E) from queries with H heads, keys and values with fewer."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal self-attention with grouped queries: several query heads share a key/value head.

    `attend` is replaced when the sequence is split over ranks.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_features = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_features, bias=False)
        self.wv = nn.Linear(config.dim, kv_features, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.attend = attend

    def forward(self, x: torch.Tensor, positions: Rotation) -> torch.Tensor:
        """Maps (S, B, D) to (S, B, D)."""
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for projected in (self.wq(x), self.wk(x), self.wv(x))
        )
        q, k = rotate(q, positions), rotate(k, positions)
        mixed = self.attend(q, k, v)
        return self.wo(mixed.permute(2, 0, 1, 3).flatten(2))


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (S, B, D) to (S, B, D)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, positions: Rotation) -> torch.Tensor:
        """Maps (S, B, D) to (S, B, D)."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Predicts the next byte at each position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that add to the residual stream start smaller in deeper models.
                residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=_INIT_STD / (2 * config.layers) ** (0.5 * residual))

    def forward(self, tokens: torch.Tensor, positions: Rotation) -> torch.Tensor:
        """Maps bytes (S, B) to logits (S, B, 256); `positions` covers the whole sequence."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))
