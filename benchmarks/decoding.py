"""A token after a long context, whose keys and values are spread over the ranks.

    python benchmarks/decoding.py --json benchmarks/results/decoding.json

Two layers of a Llama, with 16 heads of 64 features that share 8 key heads, in float32. The cache
holds 32,768 random keys of each layer; each step adds a token and takes it back. "one rank" is the
same cache on rank 0 alone, with one thread, while the others wait. "own keys only" is the limit of
a spread cache: all ranks at once process the token with as many keys as a rank's part has, and
exchange nothing. It includes work that every rank repeats (the weights), and the shared memory bus.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from benchmarks.llama import ONE_PROCESS, in_one_process

CONTEXT = 32768
HIDDEN, HEADS, KEY_HEADS, LAYERS = 1024, 16, 8, 2
BY_TRANSFORMERS = "DynamicCache, all threads"
ALONE = "one rank"
REACHABLE = "own keys only"

Step = Callable[[], torch.Tensor]


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=2 * CONTEXT,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def _fill(cache: Any, context: int) -> None:
    """Adds the same random keys and values on all ranks."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, KEY_HEADS, context, HIDDEN // HEADS)
    for number in range(LAYERS):
        cache.update(*(torch.randn(shape, generator=generator) for _ in range(2)), number)
        if hasattr(cache, "turn"):
            cache.turn.layer = None  # nothing attends to these


def _step(model: Any, cache: Any, context: int = CONTEXT) -> Step:
    """Returns the step that processes a token and forgets it."""
    from symm_cp.integrations.transformers import kinds

    _fill(cache, context)
    token, at = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), context)
    model.set_attn_implementation("symm_cp")  # transformers' own caches use sdpa

    @torch.no_grad()
    def step() -> torch.Tensor:
        logits = model(input_ids=token, position_ids=at, **{kinds.CACHE: cache}).logits
        cache.crop(-1)
        return logits

    return step


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the case."""
    from transformers.cache_utils import DynamicCache

    import symm_cp.integrations.transformers  # noqa: F401
    from symm_cp.integrations.transformers.decoding import SpreadCache

    model = _model()
    model.set_attn_implementation("symm_cp")
    own = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    steps: dict[str, Step] = {ALONE: lambda: torch.zeros(())}
    if group.rank() == 0:
        steps[ALONE] = _step(model, SpreadCache(model.config, own))
    steps["spread"] = _step(model, SpreadCache(model.config, group))
    part = CONTEXT // group.size()
    steps[REACHABLE] = _step(model, SpreadCache(model.config, own), part)
    steps |= in_one_process(lambda: steps[ALONE], group)
    by_transformers = in_one_process(lambda: _step(model, DynamicCache(config=model.config)), group)
    steps[BY_TRANSFORMERS] = by_transformers[ONE_PROCESS]

    def check() -> None:
        results = {name: step() for name, step in steps.items()}
        if group.rank() == 0:
            for name, result in results.items():
                if name != REACHABLE:  # it has seen fewer keys
                    torch.testing.assert_close(result, results[ALONE], rtol=1e-4, atol=1e-4)

    yield Case(
        f"Llama, a token after {CONTEXT} tokens, float32",
        steps,
        check,
        threaded=[ONE_PROCESS, BY_TRANSFORMERS],
    )


if __name__ == "__main__":
    main(cases, __doc__)
