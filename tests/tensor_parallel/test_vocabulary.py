"""Embeddings and output layers split by vocabulary, against dense ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from symm_cp.tensor_parallel import FusedColwiseParallel, FusedRowwiseParallel
from symm_cp.testing import Ranks
from tests.exhaustive import pairs, some
from tests.tensor_parallel.common import Recorder, local, mesh_of, part, same, same_grads

DIM = 6
LAYOUTS = {"sequence": Shard(1), "replicated": Replicate()}


class Model(nn.Module):
    """Tokens to logits, with a norm between; `tied`: one weight for both ends."""

    def __init__(self, vocabulary: int, *, tied: bool, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, DIM, padding_idx=padding)
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def plan(layout: str, output: Any, *, local_output: bool = True) -> dict[str, Any]:
    kept = LAYOUTS[layout]
    return {
        "embed": FusedRowwiseParallel(output_layouts=kept),
        "head": FusedColwiseParallel(
            input_layouts=kept, output_layouts=output, use_local_output=local_output
        ),
    }


PLAIN = [
    (3, 7, "sequence", True, False),
    (2, 12, "replicated", False, False),
    (4, 5, "replicated", True, False),
    (4, 5, "sequence", False, False),
]
# World sizes, vocabularies (of 5 tokens, the last of 4 ranks has none), layouts, tied, compiled.
CASES = pairs(
    (1, 2, 3, 4), (7, 12, 5), LAYOUTS, (False, True), (False, True),
    also=[*PLAIN, (4, 5, "sequence", True, True)],
)  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "vocabulary", "layout", "tied", "compiled"), some(*PLAIN, of=CASES)
)
@pytest.mark.ranks
def test_trains(
    group: dist.ProcessGroup,
    world_size: int,
    vocabulary: int,
    layout: str,
    tied: bool,
    compiled: bool,
) -> None:
    torch._dynamo.reset()  # or the models of earlier tests count as recompilations
    world_size = group.size()
    tokens = torch.randint(vocabulary, (3, 4 * world_size))
    tokens[0, :2] = vocabulary - 1
    padding = int(tokens[1, 1])
    dense = Model(vocabulary, tied=tied, padding=padding).double()
    for output in (Replicate(), Shard(-1)):
        dense.zero_grad()
        model = parallelize_module(copy.deepcopy(dense), mesh_of(group), plan(layout, output))
        assert (model.head.weight is model.embed.weight) == tied
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        factor = torch.randn(3, 4 * world_size, vocabulary, dtype=torch.float64)
        expected = dense(tokens)
        (expected * factor).sum().backward()
        logits = run(tokens)
        rows = local(model.head.weight).shape[0]
        if output == Replicate():
            same(logits, expected)
            (logits * factor).sum().backward()
        else:
            begin = group.rank() * -(-vocabulary // world_size)
            own = slice(begin, begin + rows)
            same(logits, expected[..., own])
            (logits * factor[..., own]).sum().backward()
        if layout == "sequence":
            dist.all_reduce(model.norm.weight.grad, group=group)
        same_grads(model, dense)


@pytest.mark.parametrize("layout", some("replicated", of=LAYOUTS))
@pytest.mark.ranks(2)
def test_loss_parallel(group: dist.ProcessGroup, layout: str) -> None:
    """torch's `loss_parallel` on logits that stay split by vocabulary."""
    mesh, vocabulary = mesh_of(group), 4 * group.size()
    dense = Model(vocabulary, tied=True).double()
    split = plan(layout, Shard(-1), local_output=False)
    model = parallelize_module(copy.deepcopy(dense), mesh, split)
    tokens = torch.randint(vocabulary, (3, 2 * group.size()))
    expected = nn.functional.cross_entropy(dense(tokens).flatten(0, 1), tokens.flatten())
    expected.backward()
    with loss_parallel():
        logits = model(tokens)
        assert logits.placements == (Shard(2),)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    same(loss.full_tensor(), expected)
    if layout == "sequence":
        dist.all_reduce(model.norm.weight.grad, group=group)
    same_grads(model, dense)


def sums_once(group: dist.ProcessGroup) -> None:
    mesh, tokens = mesh_of(group), torch.randint(12, (2, 4))
    for layout, op in (
        (Replicate(), "_fused_matmuls_all_reduce"),
        (Shard(1), "_fused_matmuls_reduce_scatter"),
    ):
        style = FusedRowwiseParallel(output_layouts=layout)
        embed = parallelize_module(nn.Embedding(12, DIM), mesh, style)
        with Recorder() as recorder:
            embed(tokens)
        assert recorder.communicating() == [f"symm_mem::{op}"]


def communicates_at_each_end(group: dist.ProcessGroup) -> None:
    model = parallelize_module(
        Model(12, tied=False), mesh_of(group), plan("replicated", Replicate())
    )
    for grad in (False, True):
        with torch.set_grad_enabled(grad), Recorder() as recorder:
            model(torch.randint(12, (2, 3)))
        names = [name for name in recorder.communicating() if name.startswith("symm_mem::")]
        assert names == [
            "symm_mem::_fused_matmuls_all_reduce",
            "symm_mem::fused_all_gather_matmul",  # without a weight
        ]


@pytest.mark.parametrize("check", [sums_once, communicates_at_each_end])
def test_communicates_once(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks.run(2, check)


@pytest.mark.ranks(3)
def test_errors(group: dist.ProcessGroup) -> None:
    own = dist.new_group(list(range(group.size())))
    mesh, bad = mesh_of(own), own.rank() == 0
    style = FusedRowwiseParallel(output_layouts=Replicate())
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(NotImplementedError, match="cannot be split by vocabulary"):
            parallelize_module(nn.Embedding(8, 4, **option), mesh, style)
    with pytest.raises(ValueError, match="multiple_of=2 is for linears only"):
        parallelize_module(nn.Embedding(8, 4), mesh, FusedRowwiseParallel(multiple_of=2))
    with pytest.raises(ValueError, match=r"must be Shard\(-1\) or Replicate\(\)"):
        FusedColwiseParallel(output_layouts=Shard(1))
    tied = nn.ModuleDict({"a": nn.Linear(4, 8, bias=False), "b": nn.Linear(4, 8, bias=False)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(
        ValueError, match=r"FusedRowwiseParallel: weight of shape \[8, 4\] is tied to"
    ):
        parallelize_module(tied, mesh, {"a": FusedColwiseParallel(), "b": FusedRowwiseParallel()})

    by_sequence = parallelize_module(nn.Embedding(7, 4), mesh, FusedRowwiseParallel())
    with pytest.raises(ValueError, match="length 4 is not divisible by world size 3; pad it"):
        by_sequence(torch.zeros(1, 4, dtype=torch.long))
    embed = parallelize_module(nn.Embedding(7, 4), mesh, style)
    tokens = torch.tensor([[0, 6, 3]])
    embed(tokens)
    sharded = DTensor.from_local(tokens, mesh, [Shard(1)])
    for wrong, error, message in (
        (torch.tensor([[0, 7]]), IndexError, "index out of range"),
        (torch.tensor([[-1, 0]]), IndexError, "index out of range"),
        (sharded, ValueError, "the tokens are a DTensor placed"),
    ):
        with pytest.raises(error if bad else RuntimeError, match=message):
            embed(wrong if bad else tokens)
        assert embed(tokens).shape == (1, 3, 4)
    with pytest.raises(IndexError, match="index out of range"):
        embed(torch.tensor([[0, 7]]))  # on all ranks
    assert embed(tokens).shape == (1, 3, 4)


@pytest.mark.ranks(3)
def test_inference_then_training(group: dist.ProcessGroup) -> None:
    dense = Model(7, tied=True).double()
    model = parallelize_module(
        copy.deepcopy(dense), mesh_of(group), plan("replicated", Replicate())
    )
    tokens = torch.randint(7, (2, 3))
    with torch.inference_mode():
        same(model(tokens), dense(tokens))
    dense(tokens).square().sum().backward()
    model(DTensor.from_local(tokens, mesh_of(group), [Replicate()])).square().sum().backward()
    same_grads(model, dense)
    expected = part(dense.embed.weight, group, 0)
    assert local(model.embed.weight).shape[1] == expected.shape[1]
