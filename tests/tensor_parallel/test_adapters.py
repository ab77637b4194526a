"""LoRA on a model that `apply` splits, against one process; refusals of other adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from symm_cp.tensor_parallel import apply
from symm_cp.tensor_parallel import save as save_whole
from symm_cp.testing import Ranks
from tests.exhaustive import pairs, some
from tests.tensor_parallel.common import mesh_of, whole
from tests.tensor_parallel.models import model_of, tokens_of

peft = pytest.importorskip("peft", reason="peft is not installed")

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Norms and rotary embeddings of transformers compute in float32: rounding changes values by 6e-8,
#: which adapters multiply by up to 8 / 2. A missing term changes them by 1e-3.
LIMITS = {"rtol": 1e-5, "atol": 1e-6}
#: Heads, features and vocabularies that no world size divides.
UNEVEN = {
    "hidden_size": 40,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "intermediate_size": 37,
    "vocab_size": 61,
}


def with_lora(model: nn.Module, **options: Any) -> Any:
    """Adds nonzero adapters, drawn from a separate seed."""
    config: dict[str, Any] = {
        "r": 3,
        "target_modules": EVERY,
        "init_lora_weights": False,
        "rank_pattern": {"v_proj": 2},
        "task_type": "CAUSAL_LM",
        **options,
    }
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return peft.get_peft_model(model, peft.LoraConfig(**config))


def two_models(
    group: dist.ProcessGroup, family: str = "llama", *, lora: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    """Returns a split model with adapters, and the same in one process."""
    sequence_parallel = options.pop("sequence_parallel", False)
    dense = with_lora(model_of(family, **options), **lora)
    model = copy.deepcopy(dense)
    if group.rank() > 0:  # all take the weights of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    applied = apply(model, mesh_of(group), sequence_parallel=sequence_parallel)
    assert applied is model
    return model, dense


def same_parameters(model: nn.Module, dense: nn.Module, of: Callable[[Any], Any]) -> None:
    others = dict(dense.named_parameters())
    for name, mine in model.named_parameters():
        other = others.pop(name)
        assert (of(mine) is None) == (of(other) is None), name
        if of(mine) is not None:
            torch.testing.assert_close(
                whole(of(mine)), of(other), msg=lambda m, name=name: f"{name}: {m}", **LIMITS
            )
    assert not others


def trains_as_one_process(
    group: dist.ProcessGroup, family: str, lora: dict[str, Any], options: dict[str, Any]
) -> None:
    model, dense = two_models(group, family, lora=lora, **options)
    for name, parameter in model.named_parameters():
        columns = not ("o_proj" in name or "down_proj" in name)
        if "proj.lora_" in name:
            assert parameter.placements[0].is_shard() == (("lora_B" in name) == columns), name
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3, eps=1e-2)
        for m in (model, dense)
    ]
    for m in (model, dense):
        m.train()
    for step in range(3):
        tokens, losses = tokens_of(dense), []
        for m, optimizer in zip((model, dense), optimizers, strict=True):
            torch.manual_seed(step)  # for dropout
            optimizer.zero_grad()
            losses.append(m(input_ids=tokens, labels=tokens, use_cache=False).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses, **LIMITS)
        same_parameters(model, dense, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
        same_parameters(model, dense, lambda p: p.detach())


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {}),
    "uneven, dropout": ("llama", {"lora_dropout": 0.3}, UNEVEN),
    "head, biases": (
        "llama",
        {"target_modules": [*EVERY, "lm_head"], "lora_bias": True, "bias": "lora_only"},
        {},
    ),
    "shared key heads": (
        "qwen3",
        {"modules_to_save": ["norm"], "lora_dropout": 0.2},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
    ),
    "gathered": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "down_proj"]}, {}),
    "some linears": ("llama", {"target_modules": ["q_proj", "v_proj"]}, UNEVEN),
}
PLAIN = [("uneven, dropout", 3, False), ("uneven, dropout", 2, True), ("head, biases", 2, False)]


@pytest.mark.parametrize(
    ("case", "world_size", "sequence_parallel"),
    some(*PLAIN, of=pairs(CASES, (2, 3), (False, True), also=PLAIN)),
)
def test_training(ranks: Ranks, case: str, world_size: int, sequence_parallel: bool) -> None:
    family, lora, options = CASES[case]
    options = {**options, "sequence_parallel": sequence_parallel}
    ranks.run(world_size, trains_as_one_process, family, lora, options)


def saves_and_loads(model: Any, dense: Any, folder: str) -> Any:
    """Saves adapters; loads them in one process and on ranks. Returns the model in one process."""
    model.save_pretrained(f"{folder}/adapters")
    base = copy.deepcopy(dense).unload()
    loaded = peft.PeftModel.from_pretrained(base, f"{folder}/adapters")
    same_parameters(model, loaded, lambda p: p.detach())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    model.load_adapter(f"{folder}/adapters", "default")
    same_parameters(model, loaded, lambda p: p.detach())
    return loaded


@pytest.mark.parametrize("world_size", some(3, of=(2, 3, 4)))
@pytest.mark.ranks
def test_saves_with_sequence_parallelism(
    group: dist.ProcessGroup, tmp_path: Path, world_size: int
) -> None:
    """With sequence parallelism: adapters that were trained, saved, loaded, and trained on."""
    folder = str(tmp_path)
    model, dense = two_models(group, lora={}, sequence_parallel=True, **UNEVEN)
    for _ in range(2):
        tokens = tokens_of(dense)
        for m in (model, dense):
            m.train().zero_grad()
            m(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        same_parameters(model, dense, lambda p: p.grad)
        with torch.no_grad():
            for m in (model, dense):
                for parameter in m.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
        loaded = saves_and_loads(model, dense, folder)
        same_parameters(loaded, dense, lambda p: p.detach())


def refuses_infinite(model: Any, rank: int) -> None:
    """All ranks refuse to merge if one rank's part is not finite."""
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    before, local = whole(layer.base_layer.weight).clone(), layer.lora_B.default.weight.to_local()
    kept = local[0, 0].clone()
    if rank == 1:
        local[0, 0] = torch.nan
    with pytest.raises(ValueError, match="would not be finite"):
        layer.merge(safe_merge=True)
    assert torch.equal(whole(layer.base_layer.weight), before)
    assert not layer.merged
    local[0, 0] = kept


@pytest.mark.ranks(3)
def test_generates_merges_and_saves(group: dist.ProcessGroup, tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, dense = two_models(group, lora={"target_modules": [*EVERY, "lm_head"]}, **UNEVEN)
    tokens = tokens_of(dense, 5)

    def generated(m: Any) -> torch.Tensor:
        return m.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)

    assert torch.equal(generated(model), generated(dense))
    with model.disable_adapter(), dense.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, dense(tokens).logits, **LIMITS)
    saves_and_loads(model, dense, folder)
    with pytest.raises(NotImplementedError, match="save: the model has adapters"):
        save_whole(model, folder)
    # Merged and unmerged, then merged permanently.
    with torch.no_grad():
        expected = dense(tokens).logits
        for m in (model, dense):
            m.merge_adapter()
        torch.testing.assert_close(model(tokens).logits, expected, **LIMITS)
        for m in (model, dense):
            m.unmerge_adapter()
        refuses_infinite(model, group.rank())
        model, dense = model.merge_and_unload(safe_merge=True), dense.merge_and_unload()
        torch.testing.assert_close(model(tokens).logits, expected, **LIMITS)
    assert torch.equal(generated(model), generated(dense))
    same_parameters(model, dense, lambda p: p.detach())
    model.save_pretrained(f"{folder}/merged")
    merged = type(dense).from_pretrained(f"{folder}/merged")
    same_parameters(model, merged, lambda p: p.detach())


@pytest.mark.ranks(2)
def test_plan_is_of_the_wrapped_model(group: dist.ProcessGroup) -> None:
    dense = with_lora(model_of("llama"))
    tokens = tokens_of(dense)
    with torch.no_grad():
        expected = dense(tokens).logits
        plan = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
        plan["model.layers.*.mlp.down_proj"] = "rowwise"
        full = {f"base_model.model.{name}": kind for name, kind in plan.items()}
        for given in (plan, full):
            model = apply(copy.deepcopy(dense), mesh_of(group), given)
            mlp = model.base_model.model.model.layers[0].mlp
            assert mlp.up_proj.base_layer.weight.placements[0].is_shard()
            torch.testing.assert_close(model(tokens).logits, expected, **LIMITS)
        model = copy.deepcopy(dense)
        apply(model.base_model.model, mesh_of(group))
        torch.testing.assert_close(model(tokens).logits, expected, **LIMITS)
        assert len({p for p in model.parameters() if p.placements[0].is_shard()}) > 14
    # Different inputs on ranks are noticed inside a PeftModel, too.
    with pytest.raises(RuntimeError, match="must get the same inputs"):
        model(tokens + group.rank())


@pytest.mark.ranks(2)
def test_unsupported_adapters_are_refused(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)

    def refused(config: Any, match: str, **options: Any) -> None:
        model = peft.get_peft_model(model_of("llama"), config)
        with pytest.raises(NotImplementedError, match=match):
            apply(model, mesh, **options)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    def lora(**options: Any) -> Any:
        return peft.LoraConfig(**{"target_modules": EVERY, "task_type": "CAUSAL_LM", **options})

    name = r"base_model\.model\.model\.layers\.0\.self_attn\.q_proj \(Linear\): "
    refused(lora(use_dora=True), name + "of LoRA, DoraLinearVariant is not supported")
    other = r"base_model\.model\.model\.layers\.0\..* only LoRA on linears is supported"
    ia3 = {"target_modules": ["k_proj"], "feedforward_modules": []}
    refused(peft.IA3Config(**ia3), other)
    refused(peft.LoHaConfig(target_modules=["k_proj"]), other)
    embedding = lora(target_modules=["embed_tokens"])
    refused(embedding, r"embed_tokens \(Embedding\): only LoRA on linears")
    refused(lora(modules_to_save=["lm_head"]), r"lm_head \(ModulesToSaveWrapper\): modules_to_save")
    refused(lora(trainable_token_indices=[1]), r"embed_tokens \(TrainableTokensWrapper\)")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    refused(prompt, "has a prompt encoder")
    base = {"model.layers.*.self_attn.q_proj.base_layer": "colwise"}
    refused(lora(), "q_proj.base_layer in it: name the adapter instead", plan=base)
    refused(lora(), "apply: the model has adapters .* from_pretrained", checkpoint="nowhere")
    partly = {
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    for sequence_parallel in (False, True):
        message = "LlamaMLP raises .*shape"
        refused(lora(), message, plan=partly, sequence_parallel=sequence_parallel)


@pytest.mark.ranks(2)
def test_adapters_come_first(group: dist.ProcessGroup) -> None:
    model = apply(model_of("llama"), mesh_of(group))
    with pytest.raises(NotImplementedError, match=r"split over ranks .* add adapters first"):
        with_lora(model)
    model, dense = two_models(group, lora={})
    tokens = tokens_of(dense)
    with pytest.raises(NotImplementedError, match="q_proj has been split, and the adapter 'more'"):
        model.add_adapter("more", peft.LoraConfig(target_modules=EVERY))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, dense(tokens).logits, **LIMITS)
    with pytest.raises(NotImplementedError, match=r"adapter_names, given to .*q_proj, is not"):
        model.eval()(input_ids=tokens, adapter_names=["default", "__base__"])


@pytest.mark.ranks(1)
def test_own_plan_without_effect_is_refused(group: dist.ProcessGroup) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner, self.config, self._tp_plan = model, model.config, model._tp_plan

    with pytest.raises(ValueError, match="Wrapper's own plan names none of its modules"):
        apply(Wrapper(model_of("llama")), mesh_of(group))
