"""Greedy generation, one token after the other, with a cache of keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from symm_cp.commands.demo.decoding import llama
from symm_cp.commands.demo.decoding.variants import DecodeVariant


class Generator:
    """Generates with one variant: what it gave so far, and how long each token took."""

    def __init__(self, variant: DecodeVariant, prompt: torch.Tensor, tokens: int) -> None:
        self.variant = variant
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []  # of each token, (vocabulary,)
        self.seconds: list[float] = []
        self._prompt = prompt
        self._cache = llama.static_cache(variant.model, prompt.shape[1] + tokens)

    def prefill(self) -> None:
        """Processes the prompt, which gives the first token."""
        # As it is written, also for compiled variants: it happens once, with a shape of its own.
        self._take(self.variant.model, self._prompt, 0)

    def step(self, token: int) -> None:
        """Processes a token, which gives the next one."""
        position = self._prompt.shape[1] + len(self.tokens) - 1
        self._take(self.variant.run, torch.tensor([[token]]), position)

    @torch.no_grad()
    def _take(self, run: Callable[..., Any], ids: torch.Tensor, position: int) -> None:
        positions = torch.arange(position, position + ids.shape[1])[None]
        start = time.perf_counter()
        out = run(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{llama.cache_argument(self.variant.model): self._cache},
        )
        logits = out.logits[0, -1]
        self.tokens.append(int(logits.argmax()))
        self.seconds.append(time.perf_counter() - start)
        self.logits.append(logits.float())
