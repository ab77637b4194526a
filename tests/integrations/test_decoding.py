"""`generate` over a spread cache against the same model in one process with transformers' cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.cache_utils import DynamicCache

from symm_cp import tensor_parallel
from symm_cp.integrations.transformers.decoding import SpreadCache, SpreadLayer, decoding
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, pairs, some
from tests.integrations.common import VOCABULARY
from tests.integrations.decoders import CLIENTS

NEW = 12
BLOCK = 3
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sequences": {"do_sample": True, "num_return_sequences": 2},
}
MODELS = ("llama", "qwen3", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "gpt2")


def model_of(name: str) -> Any:
    """Makes a model in float32: in float64, transformers' eager attention makes padding NaN."""
    return replace(CLIENTS[name], dtype=torch.float32).make("eager")


def prompt(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 17))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Adds a mask of ones: transformers would treat generated pad ids as padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model: Any, batch: dict[str, torch.Tensor], cache: Any, **how: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**batch, cache=cache, max_new_tokens=NEW, min_new_tokens=NEW, **how)


def in_one_process(name: str, batch: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    model = model_of(name)
    return generated(model, batch, DynamicCache(config=model.config), **how)


def spread(
    group: dist.ProcessGroup, name: str, batch: dict[str, torch.Tensor], how: dict[str, Any]
) -> tuple[torch.Tensor, list[int], int]:
    model = model_of(name)
    with decoding(model, group, block_size=BLOCK) as cache:
        ids = generated(model, batch, cache, **how)
    assert model.config._attn_implementation == "eager"
    kept = [layer.keys.shape[2] for layer in cache.layers if isinstance(layer, SpreadLayer)]
    return ids, kept, cache.get_seq_length()


@pytest.mark.parametrize(
    ("name", "world_size", "how", "padded"),
    some(
        ("llama", 2, "greedy", True),
        ("gemma2", 3, "beams", False),
        ("gpt-oss", 2, "sampled", True),
        of=pairs(
            MODELS,
            (1, 2, 3, 4),
            HOW,
            (False, True),
            also=[
                ("llama", 2, "greedy", True),
                ("gemma2", 3, "beams", False),
                ("gpt-oss", 2, "sampled", True),
            ],
        ),
    ),
)
def test_tokens_of_one_process(
    ranks: Ranks, name: str, world_size: int, how: str, padded: bool
) -> None:
    batch = prompt(padded)
    expected = in_one_process(name, batch, **HOW[how])
    results = ranks.run(world_size, spread, name, batch, HOW[how])
    for ids, _, length in results:
        assert torch.equal(ids, expected)
        assert length == 17 + NEW - 1
    # Ranks' parts differ by at most a block.
    for counts in zip(*(kept for _, kept, _ in results), strict=True):
        assert sum(counts) == 17 + NEW - 1
        assert max(counts) - min(counts) <= BLOCK


def beside_tensor_parallelism(
    group: dist.ProcessGroup, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = model_of("llama").requires_grad_(requires_grad=False)
    tensor_parallel.apply(model, mesh["tp"])
    with decoding(model, mesh["cp"], block_size=BLOCK) as cache:
        return generated(model, batch, cache)


@exhaustive
def test_beside_tensor_parallelism(ranks: Ranks) -> None:
    batch = prompt(padded=True)
    expected = in_one_process("llama", batch)
    for ids in ranks.run(4, beside_tensor_parallelism, batch):
        assert torch.equal(ids, expected)


def reuse(group: dist.ProcessGroup, batch: dict[str, torch.Tensor], more: torch.Tensor) -> Any:
    """Continues a conversation, then removes the generated tokens and continues differently."""
    model = model_of("llama")
    with decoding(model, group, block_size=BLOCK, capacity=50) as cache:
        first = generated(model, batch, cache)
        longer = torch.cat((first, more), 1)
        second = generated(model, whole(longer), cache)
        cache.crop(17 - cache.get_seq_length())
        assert cache.get_seq_length() == 17
        other = torch.cat((batch["input_ids"], more), 1)
        third = generated(model, whole(other), cache)
        cache.reset()
        fresh = generated(model, whole(other), cache)
    assert torch.equal(third, fresh)
    return longer, second, other, third


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_a_prefix_is_reused(ranks: Ranks, world_size: int) -> None:
    batch, more = prompt(False), torch.randint(3, VOCABULARY, (2, 5))
    expected = in_one_process("llama", batch)
    for longer, second, other, third in ranks.run(world_size, reuse, batch, more):
        assert torch.equal(longer[:, :-5], expected)
        assert torch.equal(second, in_one_process("llama", whole(longer)))
        assert torch.equal(third, in_one_process("llama", whole(other)))


@pytest.mark.ranks(2)
def test_refusals(group: dist.ProcessGroup) -> None:
    batch = prompt(False)
    model = model_of("llama")
    cache = SpreadCache(model.config, group)
    with pytest.raises(ValueError, match=r"decoding\(model, mesh\)"):
        generated(model, batch, cache)
    cache.reset()
    with decoding(model, group):
        generated(model, batch, cache)  # a cache that was made before
        ids, other = batch["input_ids"] + group.rank(), SpreadCache(model.config, group)
        with pytest.raises(RuntimeError, match="seed all ranks alike"):
            model(input_ids=ids, cache=other)
        cache.reset()
        with pytest.raises(NotImplementedError, match="output_attentions"):
            model(**batch, cache=cache, output_attentions=True)
    with pytest.raises(ValueError, match="nothing to spread"):
        SpreadCache(model_of("mistral").config, group)
    with pytest.raises(ValueError, match="block_size"):
        SpreadCache(model.config, group, block_size=0)
