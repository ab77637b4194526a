"""Positions that see no key: eager attention gives them the mean of all values, ours zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp

transformers = pytest.importorskip("transformers")

PADDED = 5  # positions of the first sample, on the left


def model(name: str, implementation: str | None) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
    }
    if name == "Gemma2":
        sizes["query_pre_attn_scalar"] = 8
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=implementation)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def padded_batch(first_labels: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(16) >= torch.tensor([[PADDED], [0]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    if not first_labels:
        labels[0, PADDED] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("Gemma2", None), ("VaultGemma", None), ("Llama", "eager"), ("Llama", None)],
)
@pytest.mark.ranks(2)
def test_labels_of_positions_after_padding(
    group: dist.ProcessGroup, name: str, implementation: str | None
) -> None:
    for first_labels in (True, False):
        batch, one, spread = (
            padded_batch(first_labels),
            model(name, implementation),
            model(name, implementation),
        )
        if first_labels and one.config._attn_implementation == "eager":
            with pytest.raises(NotImplementedError, match=r"hides all keys.*eager.*\(-100\)"):
                symm_cp.shard_batch(group, batch, model=spread)
            with (
                pytest.raises(NotImplementedError, match="hides all keys"),
                symm_cp.training_step(spread, batch, group),
            ):
                pass
            continue
        wanted = one(**batch).loss
        wanted.backward()
        with symm_cp.training_step(spread, batch, group) as step:
            step.loss.backward()
        torch.testing.assert_close(step.loss, wanted)
        for mine, whole in zip(spread.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Gemma2", "VaultGemma", "Llama"])
@pytest.mark.ranks(2)
def test_outside_of_a_region_it_is_the_same(group: dist.ProcessGroup, name: str) -> None:
    batch = padded_batch(first_labels=False)
    del batch["labels"]
    made = model(name, "symm_cp")
    with torch.no_grad():
        outside = made(**batch).logits
        part, _ = symm_cp.shard_batch(group, batch, model=made)
        (expected,) = symm_cp.context_parallel_shard(group, [outside], [1])
        with symm_cp.context_parallel(group, model=made):
            inside = made(**part).logits
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-5)
