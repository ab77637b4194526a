"""Sequences shorter than the ranks: ranks without a position take part and add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, mesh_of
from tests.exhaustive import exhaustive, pairs, some
from tests.integrations.common import BALANCERS, Client, causal_batch, check_client
from tests.integrations.decoders import CLIENTS, STRANGERS
from tests.integrations.encoders import ENCODERS, SEQ2SEQ, check_encoder, masked_batch, pair_batch
from tests.integrations.test_recurrent import CLIENTS as DELTA_RULES
from tests.integrations.test_recurrent import MAMBAS

#: Batches by length and kind; no kind leaves a batch without labels.
BATCHES: dict[tuple[int, str], dict[str, Any]] = {
    **{(length, "mask of ones"): {} for length in (1, 2, 3)},
    **{(length, "no mask"): {"masked": False} for length in (1, 2, 3)},
    **{(length, "padded right"): {"padding": "right"} for length in (2, 3)},
    (3, "padded left"): {"padding": "left"},
    (3, "packed"): {"documents": [1, 2]},
    (3, "packed otherwise"): {"documents": [2, 1]},
}
MODELS = {
    **{name: CLIENTS[name] for name in ("llama", "gemma3", "gpt-oss", "llama4", "gpt2")},
    # They read a largest element, or reshape twice, which no tensor without elements allows.
    **{name: STRANGERS[name] for name in ("phimoe", "llama4-temperature", "opt", "llama-dynamic")},
}
RECURRENT = {
    **{name: DELTA_RULES[name] for name in ("qwen3.5", "kimi-linear")},
    "mamba2": MAMBAS["mamba2"],
}
MODELS |= RECURRENT
PLAIN = (("llama", (2, "mask of ones"), 3, "HeadTail"), ("llama", (3, "packed"), 4, "Sequential"))


def checks(
    group: dist.ProcessGroup, client: Client, length: int, kind: str, layout: str, **how: Any
) -> None:
    batch = causal_batch(length, **BATCHES[length, kind])
    # The only label of a sequence of one token is that of its own position.
    check_client(group, client, batch, layout=layout, shift=length > 1, **how)


@pytest.mark.parametrize(
    ("name", "batch", "world_size", "layout"),
    some(
        *PLAIN,
        of=[
            case
            for case in pairs(MODELS, BATCHES, (2, 3, 4), BALANCERS, also=PLAIN)
            if case[0] not in RECURRENT or "padded" not in case[1][1]  # see test_refusals
        ],
    ),
)
def test_decoders(
    ranks: Ranks, name: str, batch: tuple[int, str], world_size: int, layout: str
) -> None:
    ranks.run(world_size, checks, MODELS[name], *batch, layout)


@exhaustive
@pytest.mark.ranks(3)
def test_encoders(group: dist.ProcessGroup) -> None:
    for layout in BALANCERS:
        for name in ("bert", "roberta"):
            check_encoder(group, ENCODERS[name], masked_batch(2, padding=False), layout)
        for name in ("t5", "bart"):
            batch = pair_batch(6, 2, padding=False)  # 3 ranks hold two rows, and one or padding
            check_encoder(group, SEQ2SEQ[name], batch, layout)


@exhaustive
@pytest.mark.parametrize("batch", BATCHES)
def test_by_heads_compiled_and_by_flex_attention(ranks: Ranks, batch: tuple[int, str]) -> None:
    ranks.run(3, checks, CLIENTS["llama"], *batch, "HeadTail", method="ulysses")
    ranks.run(3, checks, CLIENTS["llama"], *batch, "Sequential", prepare=compiled)
    flex = {"implementation": "flex_attention"}
    ranks.run(3, checks, CLIENTS["gemma3"], *batch, "HeadTail", **flex)


def compiled(model: nn.Module) -> None:
    torch._dynamo.reset()
    model.compile()


@exhaustive
@pytest.mark.parametrize("name", ["llama", "qwen3.5", "mamba2"])
def test_compiled_layers(ranks: Ranks, name: str) -> None:
    """On a rank without a position only empty tensors come from the peers and go to them."""
    how: dict[str, Any] = {"prepare": layer_compiled, "timeout": 600}
    ranks.run(3, checks, MODELS[name], 2, "mask of ones", "HeadTail", **how)


def layer_compiled(model: nn.Module) -> None:
    torch._dynamo.reset()
    model.base_model.layers[0].compile(fullgraph=True)


# --- attention of torch ------------------------------------------------------------------------

HEADS, FEATURES, VOCABULARY = 2, 8, 13


class Layer(nn.Module):
    """One layer of attention that a user could have written: it reshapes by -1."""

    def __init__(self, kind: str, length: int) -> None:
        super().__init__()
        self.kind, self.length = kind, length
        self.embedding = nn.Embedding(VOCABULARY, HEADS * FEATURES)
        self.projection = nn.Linear(HEADS * FEATURES, 3 * HEADS * FEATURES)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        shape, length = input_ids.shape, self.length
        x = self.projection(self.embedding(input_ids)).view(*shape, 3, -1, FEATURES)
        q, k, v = x.transpose(1, 3).unbind(2)
        if self.kind == "causal":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "whole":
            out = F.scaled_dot_product_attention(q, k, v)
        elif self.kind == "mask":
            mask = torch.arange(length) % 2 == torch.arange(length)[:, None] % 2
            out = F.scaled_dot_product_attention(q, k, v, mask)
        elif self.kind == "flex":
            out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * (1 + h) + i - j)
        else:
            rows = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
            cu_seq = torch.arange(shape[0] + 1, dtype=torch.int32) * length
            packed = varlen_attn(*rows, cu_seq, cu_seq, length, length)
            out = packed.view(*shape, HEADS, FEATURES).transpose(1, 2)
        return out.transpose(1, 2).reshape(*shape, -1) @ self.embedding.weight.t()


def mean_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def layer(kind: str, length: int) -> Layer:
    torch.manual_seed(1)
    return Layer(kind, length).double()


KINDS = ["causal", "whole", "mask", "flex", "varlen"]


@pytest.mark.parametrize(
    ("kind", "length", "world_size"),
    some(
        ("causal", 2, 3),
        ("varlen", 1, 3),
        of=pairs(KINDS, (1, 2, 3), (2, 3, 4), also=(("causal", 2, 3), ("varlen", 1, 3))),
    ),
)
@pytest.mark.ranks
def test_attention_of_torch(
    group: dist.ProcessGroup, world_size: int, kind: str, length: int
) -> None:
    ids = torch.randint(VOCABULARY, (2, length))
    batch = {"input_ids": ids, "labels": torch.randint(VOCABULARY, ids.shape)}
    one = symm_cp.Sequential(length, 1)
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    results = []
    for ranks_of_it, balancer in (
        (alone, one),
        *((group, make(length, group.size())) for make in BALANCERS.values()),
    ):
        model, mesh = layer(kind, length), mesh_of(ranks_of_it)
        arguments = {"loss_function": mean_loss, "load_balancer": balancer, "shift_labels": False}
        with symm_cp.training_step(model, batch, mesh, **arguments) as step:
            step.loss.backward()
        assert step.output.shape[1] == max(1, balancer.lengths[ranks_of_it.rank()])
        (logits,) = symm_cp.context_parallel_unshard(mesh, [step.output], [1], balancer)
        grads = [parameter.grad for parameter in model.parameters()]
        results.append([step.loss.detach(), logits.detach(), *grads])
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want, **CLOSE)


# --- refusals ----------------------------------------------------------------------------------


def refuses_what_the_caller_cut(group: dist.ProcessGroup) -> None:
    model = CLIENTS["llama"].make("sdpa")
    ids = torch.randint(VOCABULARY, (2, 2))
    with (
        pytest.raises(NotImplementedError, match="give some of 3 ranks none, and models cannot"),
        symm_cp.context_parallel(mesh_of(group), model=model, buffers=[ids], buffer_seq_dims=[1]),
    ):
        pass


def refuses_rows_of_two_sequences(group: dist.ProcessGroup) -> None:
    batch = {"input_ids": torch.ones(2, 3).long(), "decoder_input_ids": torch.ones(2, 2).long()}
    with pytest.raises(ValueError, match=r"has 1 rows of .* and of .* pad the sequence"):
        symm_cp.shard_batch(mesh_of(group), batch)


def refuses_padding_that_layers_miss(group: dist.ProcessGroup, name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"rank . holds one position"):
        checks(group, RECURRENT[name], 3, "padded left", "Sequential")


@exhaustive
def test_refusals(ranks: Ranks) -> None:
    for name in RECURRENT:
        ranks.run(3, refuses_padding_that_layers_miss, name)
    ranks.run(3, refuses_what_the_caller_cut)
    ranks.run(3, refuses_rows_of_two_sequences)
