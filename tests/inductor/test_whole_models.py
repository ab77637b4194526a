"""Whole models as torchtitan trains them: per block and whole, all fused, and as in one process."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import symm_cp
from symm_cp import inductor
from symm_cp.inductor.decisions import recording
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive
from tests.inductor.graphs import without_kernels
from tests.inductor.titan import VOCABULARY, Decoder, checkpoint, parallelize

LENGTH, SAMPLES = 16, 4


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trains(group: dist.ProcessGroup, whole: bool, selective: bool, fsdp: bool, seed: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(seed)
    alone = Decoder().double()
    tokens, labels = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH))
    expected = loss_of(alone(tokens), labels)
    expected.backward()

    model, mesh = copy.deepcopy(alone), None
    model.zero_grad()
    tp = mesh_of(group)
    if fsdp:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh["tp"]
    parallelize(model, tp)
    if selective:
        checkpoint(model)
    if whole:
        model.compile(fullgraph=True)
    else:
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    if mesh is not None:
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=mesh["dp"])
        rank = mesh["dp"].get_local_rank()
        tokens, labels = tokens.chunk(2)[rank], labels.chunk(2)[rank]
    with without_kernels(), inductor.enable(strict=True), recording() as report, loss_parallel():
        loss = loss_of(model(tokens), labels)
        loss.backward()

    if not fsdp:
        torch.testing.assert_close(loss.full_tensor(), expected.detach())  # type: ignore[operator]
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor), name
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, msg=name)
    # One graph serves both blocks: two gathers and two scatters forward, as many backward.
    again = 2 if selective else 0  # gathers whose matmul the backward pass recomputes
    of_blocks = Counter(fused_all_gather_matmul=4 + again, fused_matmul_reduce_scatter=4)
    fused = Counter(str(decision.fused_into) for decision in report.fused)
    if whole:
        # The ops of two blocks, and of the output layer.
        assert fused == {name: 2 * count + 1 for name, count in of_blocks.items()}, report
        # Left alone: the sum of the embeddings, and its gradient.
        assert [d.reason for d in report.left] == [
            "the reduced tensor is not the product of a matmul",
            "it feeds no matmul",
        ], report
    else:
        assert fused == of_blocks, report
        assert not report.left, report
    assert not counters["graph_break"]
    torch._dynamo.reset()


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "whole", "selective", "fsdp"),
    [
        (2, False, False, False),
        (2, True, True, False),
        (4, False, False, True),
        (4, False, True, True),
    ],
)
def test_torchtitan(
    ranks: Ranks, world_size: int, whole: bool, selective: bool, fsdp: bool
) -> None:
    seed = int(torch.randint(1 << 30, ()))
    ranks.run(world_size, trains, whole, selective, fsdp, seed, timeout=300)


def caches(group: dist.ProcessGroup, folder: str) -> dict[str, int]:
    """Compiles attention over a spread sequence; returns the compiler's cache hits and misses."""
    counters.clear()
    where = mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{group.rank()}"})
    plain = inductor_config.patch(fallback_by_default=True)
    x = torch.randn(2, 8, 16, requires_grad=True)
    balancer = symm_cp.HeadTail(8 * group.size(), group.size())
    context = symm_cp.context_parallel(mesh_of(group), load_balancer=balancer)
    with where, plain, inductor.enable(strict=True), context:
        torch.compile(attention_of)(x).sum().backward()
    names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
    hits = {name: counters["inductor"][name] for name in names}
    return hits | {"autograd_cache_hit": counters["aot_autograd"]["autograd_cache_hit"]}


def attention_of(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@exhaustive
def test_caches_hit_in_a_second_process(ranks: Ranks, tmp_path: Path) -> None:
    """torch's caches do not hit where parameters are DTensors: see the README of the passes."""
    for again in (False, True):
        with ranks.own(2, caches, str(tmp_path)) as running:
            for outcome in running.outcomes(300):
                assert not outcome.failure, outcome.failure
                counted = outcome.result
                if again:
                    assert counted["fxgraph_cache_miss"] == 0, counted
                    assert counted["fxgraph_cache_hit"] == 2, counted
                    assert counted["autograd_cache_hit"] == 1, counted
                else:
                    assert counted["fxgraph_cache_miss"] == 2, counted
