"""Llama and Qwen3-MoE of transformers, compiled whole and per layer: what is fused, and results."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._dynamo.utils import counters

from symm_cp import inductor, tensor_parallel
from symm_cp.inductor.decisions import Report, recording
from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive
from tests.inductor.graphs import without_kernels
from tests.integrations.common import causal_batch, check_client
from tests.integrations.decoders import CLIENTS
from tests.integrations.test_compiled import compilable, decoder_layers
from tests.tensor_parallel.common import whole
from tests.tensor_parallel.models import VOCABULARY, config_of
from tests.tensor_parallel.test_transformers_plans import load_in_parallel, own_meshes

LENGTH = 16
#: Collectives of `apply` and `context_parallel` that are next to no matmul.
CALLED = {"called by the program"}
FUSED_ATTENTION = {"fused_all_gather_attention", "fused_all_gather_attention_backward"}


def compile_parts(model: nn.Module, per: str) -> None:
    """Compiles the model, or each decoder layer, without graph breaks."""
    for part in decoder_layers(model) if per == "layer" else [model]:
        part.compile(fullgraph=True)


def build(family: str) -> nn.Module:
    """Returns a model whose experts, if any, Dynamo can trace."""
    sizes = config_of("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    options = {name: sizes[name] for name in (*names, "num_attention_heads", "pad_token_id")}
    options |= {"num_key_value_heads": 2, "tie_word_embeddings": False}
    if family == "qwen3-moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config: Any = transformers.Qwen3MoeConfig(
            **options, decoder_sparse_step=1, experts_implementation="batched_mm"
        )
        return transformers.Qwen3MoeForCausalLM(config).double()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).double()


def split_over_ranks(
    group: dist.ProcessGroup, family: str, per: str, plan: str, folder: str, seed: int
) -> None:
    with world(group, "symm_cp") as inner, own_meshes():
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(seed)
        alone = build(family)
        if plan == "apply":
            model = build(family)
            model.load_state_dict(alone.state_dict())
            tensor_parallel.apply(model, mesh_of(inner))
        else:
            if inner.rank() == 0:
                alone.save_pretrained(folder)
            dist.barrier()
            options = {"experts_implementation": "batched_mm"} if family != "llama" else {}
            model = load_in_parallel(folder, inner, dtype="auto", **options)
        tokens = torch.randint(1, VOCABULARY, (2, LENGTH))
        expected = alone(tokens, labels=tokens, use_cache=False)
        expected.loss.backward()
        compile_parts(model, per)
        with without_kernels(), inductor.enable(strict=True), recording() as report:
            out = model(tokens, labels=tokens, use_cache=False)
            out.loss.backward()
        # The rotary embedding and the norms of transformers are computed in float32.
        near = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(out.logits, expected.logits, **near)
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert other.grad is not None
            grad = whole(mine.grad).reshape(other.shape)  # `apply` keeps gate and up apart
            torch.testing.assert_close(grad, other.grad, **near, msg=name)
        check_report(report, family, per, plan)


def check_report(report: Report, family: str, per: str, plan: str) -> None:
    """Every product of a split linear is summed in a fused op, in both passes."""
    assert not counters["graph_break"]
    sums = [decision for decision in report.fused if "matmul" in str(decision.fused_into)]
    # Each layer has two sums forward in Llama, one (of attention) in Qwen3-MoE, and more backward.
    layers, linears = (2 if per == "model" else 1), (2 if family == "llama" else 1)
    assert len(sums) >= 2 * layers * linears, report
    reasons = {decision.reason for decision in report.left} - CALLED
    if plan == "apply":
        assert not reasons, report
    else:
        # Not fused: sums of weighted experts' products, embeddings, and the gather of the logits.
        of_sums = "the reduced tensor is not the product of a matmul"
        allowed = {of_sums} if per == "layer" else {of_sums, "it feeds no matmul"}
        assert reasons <= allowed, report
        assert reasons or (family, per) == ("llama", "layer"), report


@exhaustive
@pytest.mark.parametrize(
    ("family", "per", "plan"),
    list(itertools.product(("llama", "qwen3-moe"), ("layer", "model"), ("apply", "auto"))),
)
def test_split_over_ranks(ranks: Ranks, family: str, per: str, plan: str, tmp_path: Path) -> None:
    seed = int(torch.randint(1 << 30, ()))
    ranks.run(2, split_over_ranks, family, per, plan, str(tmp_path), seed, timeout=300)


def spread(group: dist.ProcessGroup, name: str, per: str, checkpointed: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    client = compilable(CLIENTS[name])

    def prepare(model: nn.Module) -> None:
        if checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            model.train()
        compile_parts(model, per)

    allowed = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=checkpointed)
    with without_kernels(), allowed, inductor.enable(strict=True), recording() as report:
        # Recomputation is in float32, without the modes of the forward pass.
        tolerance = client.tolerance if checkpointed else None
        check_client(group, client, causal_batch(48), prepare=prepare, tolerance=tolerance)
    assert not counters["graph_break"]
    fused = [str(decision.fused_into) for decision in report.decisions]
    assert set(fused) >= FUSED_ATTENTION, report
    # The backward pass of a checkpoint attends again.
    forward, backward = (fused.count(name) for name in sorted(FUSED_ATTENTION))
    assert forward == backward * (2 if checkpointed else 1), report
    assert {decision.reason for decision in report.left} <= CALLED, report


@exhaustive
@pytest.mark.parametrize(
    ("name", "per", "checkpointed"),
    [
        ("llama", "model", False),
        ("llama", "layer", True),
        ("qwen3-moe", "model", False),
        ("qwen3-moe", "layer", False),
    ],
)
def test_spread_sequence(ranks: Ranks, name: str, per: str, checkpointed: bool) -> None:
    ranks.run(2, spread, name, per, checkpointed, timeout=300)
