"""Ranks of a model split by `apply` compare its inputs: different prompts raise on all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symm_cp
from symm_cp.tensor_parallel import apply
from tests.exhaustive import some
from tests.tensor_parallel.common import mesh_of
from tests.tensor_parallel.models import VOCABULARY, model_of, tokens_of

SAME = "must get the same inputs"


@pytest.mark.parametrize(
    ("world_size", "sequence_parallel"),
    some((2, False), (3, True), of=[(2, False), (3, True), (4, False)]),
)
@pytest.mark.ranks
def test_other_prompts_are_refused_on_all_ranks(
    group: dist.ProcessGroup, world_size: int, sequence_parallel: bool
) -> None:
    other = group.rank() == group.size() - 1
    dense = model_of("llama")
    model = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    ids = tokens_of(dense)
    expected = model(ids, use_cache=False).logits
    embeds = dense.get_input_embeddings()(ids).detach()
    changed = ids.clone()
    changed[1, 3] = (changed[1, 3] + 1) % VOCABULARY
    calls: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"input_ids": ids}, {"input_ids": changed}, "input_ids"),
        ({"input_ids": ids}, {"input_ids": ids[:1]}, "input_ids"),
        ({"input_ids": ids}, {"input_ids": ids.int()}, "input_ids"),
        ({"inputs_embeds": embeds}, {"inputs_embeds": embeds.flip(1)}, "inputs_embeds"),
        ({"input_ids": ids}, {"inputs_embeds": embeds}, "the set of tensors (here in"),
        ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": changed}, "labels"),
        (
            {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)},
            {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids).triu()},
            "attention_mask",
        ),
        # Also without labels, as at the beginning of generation.
        (
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            {"input_ids": ids, "attention_mask": torch.ones_like(ids).triu()},
            "attention_mask",
        ),
        (
            {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]},
            {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None] + 1},
            "position_ids",
        ),
    ]
    for usual, of_other, name in calls:
        with pytest.raises(RuntimeError, match=SAME) as caught:
            model(**(of_other if other else usual), use_cache=False)
        text = str(caught.value)
        assert f"and rank {group.size() - 1} in {name}" in text, text
        assert "SYMM_CP_COMPARE_INPUTS=0" in text
    with pytest.raises(RuntimeError, match=SAME):
        model(changed if other else ids, use_cache=False)
    # Ranks compute embeddings separately: rounding errors do not count as different inputs.
    model(inputs_embeds=embeds * (1 + 1e-6 * other), use_cache=False)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SYMM_CP_COMPARE_INPUTS", "0")
        model(changed if other else ids, use_cache=False)


@pytest.mark.ranks(2)
def test_other_samples_are_refused_on_all_ranks(group: dist.ProcessGroup) -> None:
    """Ranks with different seeds draw different tokens, which raises an error."""
    dense = model_of("llama")
    model: Any = apply(copy.deepcopy(dense), mesh_of(group))
    ids = tokens_of(dense)
    how = {"max_new_tokens": 8, "do_sample": True, "temperature": 5.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = model.generate(ids, **how)
        torch.manual_seed(group.rank())
        with pytest.raises(RuntimeError, match=r"seed all ranks identically"):
            model.generate(ids, **how)
        torch.manual_seed(0)
        assert torch.equal(model.generate(ids, **how), made)


@pytest.mark.parametrize(("generates", "first"), [(True, True), (True, False), (False, False)])
@pytest.mark.ranks(2)
def test_a_call_on_one_rank_only(group: dist.ProcessGroup, generates: bool, first: bool) -> None:
    """A call of one rank, while the other makes another call."""
    dense = model_of("llama")
    model: Any = apply(copy.deepcopy(dense), mesh_of(group))
    ids = tokens_of(dense)
    if not first:
        model(ids)
    if group.rank() == 0:
        what = "generate" if generates else "the model"
        with pytest.raises(RuntimeError, match=f"{what} was called on rank 0 only, "):
            model.generate(ids, max_new_tokens=2) if generates else model(ids)
    else:
        with pytest.raises(RuntimeError):
            symm_cp.matmul_all_reduce(torch.ones(2, 3), torch.ones(3, 2), group=mesh_of(group))
    dist.barrier(group)
    model(ids)


class Adapter(nn.Module):
    def __init__(self, base: nn.Module, size: int) -> None:
        super().__init__()
        self.base, self.up = base, nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.base(x))


@pytest.mark.ranks(2)
def test_modules_that_are_added_later(group: dist.ProcessGroup) -> None:
    """Modules that are added after `apply` must have the same weights on all ranks."""
    dense = model_of("llama")
    ids = tokens_of(dense)
    model, other = (apply(copy.deepcopy(dense), mesh_of(group)) for _ in range(2))
    copied = copy.deepcopy(model)
    model(ids)
    with mock.patch.object(model, "named_parameters", side_effect=AssertionError):
        model(ids)  # though it registers layers in a slice of them
    nn.Linear(2 + group.rank(), 2)  # a module on this rank that is not part of the model
    with torch.random.fork_rng():
        models = (dense, 0), (model, 0), (other, group.rank()), (copied, group.rank())
        for each, seed in models:
            torch.manual_seed(seed)
            for layer in each.model.layers:
                layer.mlp = Adapter(layer.mlp, dense.config.hidden_size)
    expected = dense(ids).logits
    torch.testing.assert_close(model(ids).logits, expected)
    for each in (copied, other):
        with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.up\.weight and .*seed all ranks"):
            each(ids)
    for parameter in other.parameters():
        if type(parameter) is nn.Parameter:
            dist.broadcast(parameter.data, group=group, group_src=0)
    torch.testing.assert_close(other(ids).logits, expected)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(12, 8), nn.Linear(8, 16)
        self.down = nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(ids)).relu())


@pytest.mark.parametrize("backend", some("aot_eager", of=["aot_eager", "inductor"]))
@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_graphs_compare_inputs(group: dist.ProcessGroup, backend: str) -> None:
    """The comparison is in the graph, and runs whenever the graph does."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = Head()
    model = apply(copy.deepcopy(dense), mesh_of(group), {"up": "colwise", "down": "rowwise"})
    call = torch.compile(model, backend=backend, fullgraph=True)
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        torch.testing.assert_close(call(ids), dense(ids))
        with pytest.raises(RuntimeError, match=SAME):
            call(ids.flip(group.rank()) if group.rank() else ids)
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=SAME):
        copied(ids + group.rank())
    assert pickle.loads(pickle.dumps(next(iter(model._forward_pre_hooks.values()))))
