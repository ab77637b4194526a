"""Sizes of models, as their authors published them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder with grouped-query attention and a gated feed-forward layer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @property
    def query(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Features of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """The number of weights in a layer's matrices."""
        attention = self.hidden * (2 * self.query + 2 * self.shared)
        return attention + 3 * self.hidden * self.feed_forward


#: Sources: the models' configurations as published by Meta (Llama 3) and Alibaba (Qwen 3).
MODELS = {
    model.name: model
    for model in (
        Model("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Model("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        Model("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
    )
}
