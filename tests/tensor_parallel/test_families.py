"""`apply` with a model's own plan: each family of transformers is as in one process, or refused."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from symm_cp.tensor_parallel import apply
from tests.exhaustive import some
from tests.integrations.common import WideTensors, assert_near
from tests.integrations.decoders import CLIENTS as DECODERS
from tests.integrations.decoders import STRANGERS
from tests.integrations.test_recurrent import CLIENTS as RECURRENT
from tests.tensor_parallel.common import mesh_of, whole

CLIENTS = {**DECODERS, **STRANGERS, **RECURRENT}
CLIENTS["nemotron-h-dense"] = RECURRENT["nemotron-h"].having(
    layers_block_type=["linear_attention", "full_attention"]
)
WITHOUT_PLAN = (
    *("gpt2", "stablelm", "persimmon", "bitnet", "jetmoe", "gpt-neo", "gpt-neo-global", "opt"),
    *("xglm", "biogpt", "bloom", "mpt", "falcon", "falcon-alibi", "ctrl", "openai", "mamba"),
    *("recurrent-gemma", "rwkv", "moshi", "jetmoe-router-loss", "mamba2", "zamba2"),
    *("gpt-bigcode", "modernbert-decoder"),
)
#: Refused families, and a pattern of each refusal's message.
REFUSED = {
    **dict.fromkeys(WITHOUT_PLAN, "no tensor-parallel plan of its own"),
    "deepseek-v2": "the kind 'mla_kv_a_proj', which symm_cp does not have",
    "doge": "DogeAttention raises RuntimeError",
    "doge-whole": "DogeAttention raises RuntimeError",
    "llama4": "Llama4TextExperts raises TypeError",
    "llama4-temperature": "Llama4TextExperts raises TypeError",
}
#: Refused with `sequence_parallel=True` only.
NO_BLOCKS = dict.fromkeys(
    ("hunyuan", "diffllama", "lfm2", "bamba", "falcon-h1", "nemotron-h-dense"),
    "names no module in a ModuleList",
)
WHOLE_ONLY = {
    "gemma3n": "Gemma3nTextDecoderLayer raises ValueError: .* shape .4, 2, 16, 32.",
    "gemma4": "Gemma4TextDecoderLayer raises RuntimeError",
    **NO_BLOCKS,
}
#: They have dropout or noise in training.
RANDOM = ("seed-oss", "phimoe")


#: A parameter used outside of its module, in a method other than `forward`; activations with
#: parameters between split linears; linears that the plan splits in one of two mixers.
PLAIN = [
    ("nemotron-h-dense", 3, False),
    ("gemma3n", 2, False),
    ("gemma3n", 2, True),
    ("apertus", 3, True),
    ("qwen3.5", 2, True),
    ("doge", 2, False),
]


@pytest.mark.parametrize(
    ("family", "world_size", "sequence_parallel"),
    some(*PLAIN, of=dict.fromkeys((*PLAIN, *product(CLIENTS, (2,), (False, True))))),
)
@pytest.mark.ranks
def test_own_plan(
    group: dist.ProcessGroup, world_size: int, family: str, sequence_parallel: bool
) -> None:
    client = CLIENTS[family]
    dense = client.make("eager").train(family not in RANDOM)
    model = copy.deepcopy(dense)
    refused = {**REFUSED, **(WHOLE_ONLY if sequence_parallel else {})}
    if family in refused:
        with pytest.raises((NotImplementedError, ValueError), match=refused[family]):
            apply(model, mesh_of(group), sequence_parallel=sequence_parallel)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        return
    apply(model, mesh_of(group), sequence_parallel=sequence_parallel)
    ids = torch.randint(3, 60, (2, 12))
    labels = torch.tensor([0, 1]) if family == "classifier" else ids
    results: list[Any] = []
    for each in (model, dense):
        with WideTensors():
            results.append(each(input_ids=ids, labels=labels, **client.call))
            results[-1].loss.backward()
    tolerance = client.tolerance if client.dtype == torch.float32 else 1e-7
    assert_near("logits", results[0].logits, results[1].logits, tolerance)
    others = dict(dense.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in others.values() if p.grad is not None)
    for name, mine in model.named_parameters():
        expected = others.pop(name).grad
        if expected is None:
            assert mine.grad is None or not whole(mine.grad).any(), name
        else:
            grad = whole(mine.grad).view_as(expected)
            assert_near(name, grad, expected, 100 * tolerance, 1e-3 * largest)


@pytest.mark.ranks(3)
def test_ranks_refuse_together(group: dist.ProcessGroup) -> None:
    """Heads are uneven: the forward would fail on one of three ranks.

    Layers without keys of their own (`num_kv_shared_layers`) divide query heads differently.
    """
    with pytest.raises(NotImplementedError, match=r"the input of shape .* has 16 features on this"):
        apply(CLIENTS["gemma3n"].make("eager"), mesh_of(group))


class Scaled(nn.Module):
    """A feed-forward whose hidden features are scaled: by parameters, or by a linear of the input.

    Two linears are split, `out` row-wise.
    """

    def __init__(self, by_linear: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up, self.out = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Linear(8, 1) if by_linear else nn.PReLU()
        self.by_linear = by_linear

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        hidden = self.up(x)
        return self.out(hidden * self.scale(x) if self.by_linear else self.scale(hidden))


@pytest.mark.parametrize("world_size", some(2, of=(2, 3)))
@pytest.mark.ranks
def test_gradients_between_split_linears(group: dist.ProcessGroup, world_size: int) -> None:
    plan, mesh = {"up": "colwise", "out": "rowwise"}, mesh_of(group)
    dense = Scaled(by_linear=False).double()
    model = apply(copy.deepcopy(dense), mesh, plan)
    ids = torch.randint(11, (2, 6))
    for each in (model, dense):
        each(ids).square().sum().backward()
    for mine, other in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), whole(other.grad), rtol=1e-10, atol=1e-10)
    with pytest.raises(NotImplementedError, match=r"Scaled raises .* each rank a part of its grad"):
        apply(Scaled(by_linear=True), mesh, plan)
