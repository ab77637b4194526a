"""Real models within `context_parallel`: as in one process, or refused with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.module import _has_any_global_hook

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of

VOCABULARY, LENGTH = 61, 64
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
    "attn_implementation": "sdpa",
}
GEMMA3 = {"config": "TextConfig"}
UNPASSED = r"has config\._attn_implementation='{}': .* Pass the model to context_parallel"

#: Models that are not passed to the context, and a pattern of each refusal's message.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {}, "LlamaForCausalLM " + UNPASSED.format("sdpa")),
    ("Llama", {"attn_implementation": "eager"}, UNPASSED.format("eager")),
    ("Mistral", {"attn_implementation": "flex_attention"}, UNPASSED.format("flex_attention")),
    ("Mistral", {"attn_implementation": "symm_cp"}, UNPASSED.format("symm_cp")),
    ("Doge", {"keep_window_size": 40}, r"config\.model_type='doge': it is not among .*FAMILIES"),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, r"config\.model_type='lfm2'"),
]


def build(name: str, *, head: str = "ForCausalLM", config: str = "Config", **options: Any) -> Any:
    """A small model with random weights, the same on all ranks."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = getattr(transformers, name + config)(**{**SIZES, **options})
    model = getattr(transformers, name + head)(made)
    # Grouped matrix products take no float64.
    return model if "num_experts" in options or "num_local_experts" in options else model.double()


def tokens(length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator)


def local_batch(group: dist.ProcessGroup, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = tokens(length)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return symm_cp.shard_batch(mesh_of(group), batch)[0]


def layout(group: dist.ProcessGroup, length: int = LENGTH) -> symm_cp.LoadBalancer:
    return symm_cp.HeadTail(length, group.size())


def assert_same(
    group: dist.ProcessGroup,
    model: nn.Module,
    *,
    call: Callable[..., Any] | None = None,
    balancer: symm_cp.LoadBalancer | None = None,
) -> None:
    """Compares logits and gradients with one process."""
    dense, batch = copy.deepcopy(model), local_batch(group)
    rows = layout(group).positions(group.rank())
    full = dense(input_ids=tokens(), attention_mask=torch.ones_like(tokens())).logits
    weights = torch.randn(full.shape, generator=torch.Generator().manual_seed(3))
    (full * weights).sum().backward()
    with symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=balancer):
        logits = (call or model)(**batch).logits
        (logits * weights[:, rows]).sum().backward()
    # transformers computes rotary embeddings in float32, and some models as a whole.
    torch.testing.assert_close(logits, full[:, rows], rtol=1e-4, atol=1e-4)
    for (name, got), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        if want.grad is not None:
            dist.all_reduce(got.grad, group=group)
            torch.testing.assert_close(
                got.grad, want.grad, rtol=1e-3, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.ranks(2)
def test_what_would_be_wrong_is_refused(group: dist.ProcessGroup) -> None:
    for name, options, message in REFUSED:
        model = build(name, **options)
        with (
            pytest.raises(NotImplementedError, match=message),
            symm_cp.context_parallel(mesh_of(group), load_balancer=layout(group)),
        ):
            model(**local_batch(group))
        assert not _has_any_global_hook()
    model = build("Llama")
    with symm_cp.context_parallel(mesh_of(group), on_unfused="ignore"):
        for _ in range(2):  # a caller that catches the error runs it again
            with pytest.raises(NotImplementedError, match="LlamaForCausalLM has config"):
                model(**local_batch(group))
    # Modules of other libraries may mean something else by these names.
    linear, q = nn.Linear(32, 32), torch.zeros(1, 8, 32)
    linear.sliding_window = 4
    with symm_cp.context_parallel(mesh_of(group)):
        q = linear(q).view(1, 8, 4, 8).transpose(1, 2)
        F.scaled_dot_product_attention(q, q, q)


class WithHidden(transformers.LlamaForCausalLM):
    """Runs a model that is not registered in it."""

    def forward(self, **inputs: Any) -> Any:
        for hidden in self.hidden:  # type: ignore[union-attr]
            hidden(**inputs)
        return super().forward(**inputs)


@pytest.mark.ranks(2)
def test_modules_in_a_plain_list_are_judged(group: dist.ProcessGroup) -> None:
    for hidden, message in [
        ([build("Mistral", sliding_window=40)], "MistralForCausalLM has config"),
        ([], None),
    ]:
        model = build("Llama")
        model.__class__ = WithHidden
        model.hidden = hidden
        refused = pytest.raises(NotImplementedError, match=message) if message else nullcontext()
        context = symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=layout(group))
        with refused, context:
            model(**local_batch(group))


@pytest.mark.ranks(2)
def test_positions_of_roberta_that_count_from_zero_are_refused(group: dist.ProcessGroup) -> None:
    model = build("Roberta", head="ForMaskedLM", pad_token_id=1)
    context = symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=layout(group))
    local, q = local_batch(group), torch.randn(1, 2, 8, 8)
    if group.rank() == 1:  # the numbers of its positions are larger
        with context:
            model(**local)
        with pytest.raises(RuntimeError, match="rank 0 failed: NotImplementedError on rank 0"):
            symm_cp.all_gather_attention(q, q, q, group=group)
        return
    message = r"it counts from 2 \(padding_idx \+ 1\)"
    with pytest.raises(NotImplementedError, match=message), context:
        model(**local)


@pytest.mark.ranks(2)
def test_the_style_refuses_the_same(group: dist.ProcessGroup) -> None:
    style = symm_cp.ContextParallel(load_balancer=layout(group))
    plan = {f"model.layers.{n}.self_attn": style for n in range(2)}
    model = parallelize_module(build("Mistral"), mesh_of(group), plan)
    with pytest.raises(NotImplementedError, match="MistralAttention " + UNPASSED.format("sdpa")):
        model(**local_batch(group))


def compiled(group: dist.ProcessGroup) -> None:
    mesh, batch = mesh_of(group), local_batch(group)
    model = build("Llama")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for _ in range(2):
        model.zero_grad()
        assert_same(group, model, balancer=layout(group))

    windowed = build("Mistral", sliding_window=40)

    def function(**options: Any) -> Any:
        return windowed(**options)

    calls = [torch.compile(windowed, backend="eager"), torch.compile(function, backend="eager")]
    for call in calls:
        for balancer in (layout(group), None):
            with (
                pytest.raises(NotImplementedError, match=UNPASSED.format("sdpa")),
                symm_cp.context_parallel(mesh, load_balancer=balancer),
            ):
                call(**batch)


@pytest.mark.exhaustive
def test_compiled_models_are_judged_too(ranks: Ranks) -> None:
    ranks.run(2, compiled, timeout=300)


@pytest.mark.ranks(1)
def test_one_rank_may_do_everything(group: dist.ProcessGroup) -> None:
    """On one rank nothing is spread: whatever a model does with its own masks is right."""
    for name, options in [
        ("Mistral", {"sliding_window": 40}),
        ("Gemma3", {**GEMMA3, "sliding_window": 40}),
        ("Llama", {"attn_implementation": "eager"}),
    ]:
        assert_same(group, build(name, **options), balancer=layout(group))
