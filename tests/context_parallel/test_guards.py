"""Real models within `context_parallel`: as in one process, or refused with a reason."""

from __future__ import annotations

import copy
import threading
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
BERT = {"head": "ForMaskedLM", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {"head": "ForMaskedLM", "global_attn_every_n_layers": 2}
MODERN |= {f"{name}_token_id": 1 for name in ("cls", "sep", "bos", "eos")}
LLAMA4 = {"config": "TextConfig", "num_local_experts": 2, "intermediate_size_mlp": 32}
GEMMA3 = {"config": "TextConfig"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
NO_WINDOW = ["full_attention"] * 2

# Harmless settings must work: windows over the whole sequence, windows that are not used.
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Mistral", {"sliding_window": LENGTH}),
    ("Mistral", {"sliding_window": None}),
    ("Ministral", {"sliding_window": 40, "layer_types": NO_WINDOW}),
    ("Gemma3", {**GEMMA3, "sliding_window": LENGTH}),
    ("Gemma3", {**GEMMA3, "sliding_window": 40, "layer_types": NO_WINDOW}),
    ("Qwen2", {"sliding_window": 40}),  # use_sliding_window is False
    ("Qwen3", {"sliding_window": 40}),
    ("Phi3", {"sliding_window": None}),
    ("ModernBert", {**MODERN, "local_attention": 2 * LENGTH}),
    ("Llama4", {**LLAMA4, "attention_chunk_size": LENGTH}),
    ("Bert", BERT),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Mistral", {"sliding_window": 40}, r"MistralForCausalLM has config\.sliding_window=40.*64"),
    ("Phi3", {"sliding_window": 40}, r"config\.sliding_window=40"),
    ("Gemma3", {**GEMMA3, "sliding_window": 40}, r"config\.sliding_window=40"),
    (
        "Qwen2",
        {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1},
        r"config\.sliding_window=40",
    ),
    ("ModernBert", {**MODERN, "local_attention": 80}, r"sliding_window=40"),
    ("Llama4", {**LLAMA4, "attention_chunk_size": 40}, r"config\.attention_chunk_size=40"),
    ("Doge", {"keep_window_size": 40}, r"config\.keep_window_size=40"),
    ("Llama", {"attn_implementation": "eager"}, r"'eager'.*set_attn_implementation"),
    ("Gemma2", {"attn_implementation": "eager", "sliding_window": 40}, r"'eager'"),
    ("GptOss", {"attn_implementation": "eager", "num_local_experts": 4}, r"'eager'"),
    (
        "Qwen3Next",
        {**EXPERTS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        r"'linear_attention' in config\.layer_types",
    ),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, r"'conv' in config\.layer_types"),
    ("Bart", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, "takes no position_ids"),
    ("Roberta", BERT, r"it counts from 1 \(padding_idx \+ 1\)"),
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
    with symm_cp.context_parallel(mesh_of(group), load_balancer=balancer):
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


def are_right(group: dist.ProcessGroup) -> None:
    for name, options in RIGHT:
        assert_same(group, build(name, **options), balancer=layout(group))
    # Without a load balancer, the length follows from the call of attention.
    assert_same(group, build("Mistral", sliding_window=LENGTH))
    assert not _has_any_global_hook()


@pytest.mark.exhaustive
def test_what_is_harmless_is_as_in_one_process(ranks: Ranks) -> None:
    ranks.run(2, are_right)


def are_refused(group: dist.ProcessGroup) -> None:
    for name, options, message in REFUSED:
        model = build(name, **options)
        with (
            pytest.raises(NotImplementedError, match=message),
            symm_cp.context_parallel(mesh_of(group), load_balancer=layout(group)),
        ):
            model(**local_batch(group))
        assert not _has_any_global_hook()
    with (
        pytest.raises(NotImplementedError, match=r"sliding_window=40.*64 positions"),
        symm_cp.context_parallel(mesh_of(group)),
    ):
        build("Mistral", sliding_window=40)(**local_batch(group))
    model = build("Llama")
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with symm_cp.context_parallel(mesh_of(group), load_balancer=layout(group)):
        for _ in range(2):  # a caller that catches the error runs it again
            with pytest.raises(NotImplementedError, match="LlamaAttention has sinks"):
                model(**local_batch(group))


def test_what_would_be_wrong_is_refused(ranks: Ranks) -> None:
    ranks.run(2, are_refused)


def judged_by_attributes(group: dist.ProcessGroup) -> None:
    mesh, q = mesh_of(group), torch.zeros(1, 8, 32, dtype=torch.float64)
    for change, message in [
        ({"sinks": nn.Parameter(torch.zeros(4))}, "LlamaAttention has sinks"),
        ({"sliding_window": 40}, "LlamaAttention has sliding_window=40"),
        ({"sliding_window": 40, "is_sliding": False}, None),
        ({"mix": nn.Conv1d(1, 1, 3)}, "has a Conv1d"),
        ({"mix": nn.Conv1d(1, 1, 1)}, None),
    ]:
        model = build("Llama")
        for name, value in change.items():
            setattr(model.model.layers[1].self_attn, name, value)
        refused = pytest.raises(NotImplementedError, match=message) if message else nullcontext()
        with refused, symm_cp.context_parallel(mesh, load_balancer=layout(group)):
            model(**local_batch(group))
    capped = build("Llama")
    capped.config.attn_logit_softcapping = 50.0
    with (
        pytest.raises(NotImplementedError, match=r"config\.attn_logit_softcapping=50\.0"),
        symm_cp.context_parallel(mesh, load_balancer=layout(group)),
    ):
        capped(**local_batch(group))
    # Modules of other libraries may mean something else by these names.
    linear = nn.Linear(32, 32, dtype=torch.float64)
    linear.sliding_window = 4
    with symm_cp.context_parallel(mesh):
        q = linear(q).view(1, 8, 4, 8).transpose(1, 2)
        F.scaled_dot_product_attention(q, q, q)


def test_attention_modules_are_judged_by_what_they_use(ranks: Ranks) -> None:
    ranks.run(2, judged_by_attributes)


class WithHidden(transformers.LlamaForCausalLM):
    """Runs a model that is not registered in it."""

    def forward(self, **inputs: Any) -> Any:
        for hidden in self.hidden:  # type: ignore[union-attr]
            hidden(**inputs)
        return super().forward(**inputs)


def unregistered(group: dist.ProcessGroup) -> None:
    for hidden, message in [
        ([build("Mistral", sliding_window=40)], "MistralForCausalLM has config"),
        ([], None),
    ]:
        model = build("Llama")
        model.__class__ = WithHidden
        model.hidden = hidden
        refused = pytest.raises(NotImplementedError, match=message) if message else nullcontext()
        with refused, symm_cp.context_parallel(mesh_of(group), load_balancer=layout(group)):
            model(**local_batch(group))


def test_modules_in_a_plain_list_are_judged(ranks: Ranks) -> None:
    ranks.run(2, unregistered)


def positions(group: dist.ProcessGroup) -> None:
    mesh, model = mesh_of(group), build("Llama")
    # Copies: shards remember how they were cut, and a context of another layout would refuse them.
    ids, ones, at = (shard.clone() for shard in local_batch(group).values())
    straight = symm_cp.Sequential(LENGTH, 2)
    cases: list[tuple[symm_cp.LoadBalancer, dict[str, Any], str]] = [
        (layout(group), {"attention_mask": ones}, "LlamaModel was called without position_ids"),
        # Two documents, one on each rank: no rank sees a jump, and attention would cross them.
        (straight, {"position_ids": torch.arange(LENGTH // 2).expand(2, -1)}, "packed documents"),
        (symm_cp.HeadTail(3, 2), {"position_ids": at, "attention_mask": ones}, "one position"),
    ]
    for balancer, options, message in cases:
        packed = message == "packed documents"
        if packed and group.rank() == 0:  # these are its own positions; its peer refuses
            q = torch.randn(1, 2, 8, 8)
            with pytest.raises(RuntimeError, match="rank 1 failed: NotImplementedError on rank 1"):
                symm_cp.all_gather_attention(q, q, q, group=group)
            continue
        # No layers, so no collectives, where the other rank does not call the model.
        model.model.config.num_hidden_layers = 0 if packed else 2
        with (
            pytest.raises(NotImplementedError, match=message),
            symm_cp.context_parallel(mesh, load_balancer=balancer),
            torch.no_grad(),
        ):
            model(ids, use_cache=False, **options)


def test_positions_that_are_missing_or_of_other_documents_are_refused(ranks: Ranks) -> None:
    ranks.run(2, positions)


def kept(group: dist.ProcessGroup) -> None:
    mesh, model = mesh_of(group), build("Llama")
    for choice, given in ((1, "1"), (torch.tensor([-1]), "positions")):
        with (
            pytest.raises(NotImplementedError, match=f"LlamaForCausalLM .*logits_to_keep={given}:"),
            symm_cp.context_parallel(mesh, load_balancer=layout(group)),
        ):
            model(**local_batch(group), logits_to_keep=choice)
    with symm_cp.context_parallel(mesh, load_balancer=layout(group)):
        model(**local_batch(group), logits_to_keep=0)


def test_positions_are_not_chosen_from_a_part(ranks: Ranks) -> None:
    """`logits_to_keep=1` would keep another token on each rank."""
    ranks.run(2, kept)


def styled(group: dist.ProcessGroup) -> None:
    def parallel(model: Any, balancer: symm_cp.LoadBalancer | None) -> Any:
        style = symm_cp.ContextParallel(load_balancer=balancer)
        plan = {f"model.layers.{n}.self_attn": style for n in range(2)}
        return parallelize_module(model, mesh_of(group), plan)

    batch = local_batch(group)
    for balancer in (None, layout(group)):
        with pytest.raises(NotImplementedError, match=r"MistralAttention has config\.sliding_w"):
            parallel(build("Mistral", sliding_window=40), balancer)(**batch)
        for name, window in (("Mistral", LENGTH), ("Mistral", None)):
            model = build(name, sliding_window=window)
            expected = model(input_ids=tokens()).logits
            found = parallel(model, balancer)(**batch).logits
            rows = layout(group).positions(group.rank())
            torch.testing.assert_close(found, expected[:, rows], rtol=1e-5, atol=1e-5)
        with pytest.raises(NotImplementedError, match="'eager'"):
            parallel(build("Llama", attn_implementation="eager"), balancer)(**batch)


def test_the_style_refuses_the_same(ranks: Ranks) -> None:
    ranks.run(2, styled)


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
                pytest.raises(NotImplementedError, match=r"config\.sliding_window=40"),
                symm_cp.context_parallel(mesh, load_balancer=balancer),
            ):
                call(**batch)


@pytest.mark.exhaustive
def test_compiled_models_are_judged_too(ranks: Ranks) -> None:
    ranks.run(2, compiled, timeout=300)


def one_rank(group: dist.ProcessGroup) -> None:
    """On one rank nothing is spread: whatever a model does with its own masks is right."""
    for name, options in [
        ("Mistral", {"sliding_window": 40}),
        ("Gemma3", {**GEMMA3, "sliding_window": 40}),
        ("Llama", {"attn_implementation": "eager"}),
    ]:
        assert_same(group, build(name, **options), balancer=layout(group))


def test_one_rank_may_do_everything(ranks: Ranks) -> None:
    ranks.run(1, one_rank)


def only_this_thread(group: dist.ProcessGroup) -> None:
    model, results = build("Mistral", sliding_window=40), []
    expected = model(input_ids=tokens()).logits
    with symm_cp.context_parallel(mesh_of(group)):
        thread = threading.Thread(target=lambda: results.append(model(input_ids=tokens()).logits))
        thread.start()
        thread.join()
    assert torch.equal(results[0], expected)


def test_models_of_other_threads_are_left_alone(ranks: Ranks) -> None:
    ranks.run(2, only_this_thread)
