"""If one rank refuses a call before it calls an op, its peers learn of it at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp.ops import error_reports
from tests.context_parallel.common import mesh_of
from tests.patience import patient

Call = Callable[[bool], object]


def calls(mesh: Any) -> dict[str, tuple[Call, str]]:
    """Calls by name, each with the error that it raises if called with `bad`."""
    q = torch.randn(1, 2, 8, 16)
    sharded = DTensor.from_local(q, mesh, [Shard(2)])
    crossed = DTensor.from_local(q, mesh, [Shard(1)])
    x = torch.randn(1, 8 * mesh.size())
    whole = torch.ones(8 * mesh.size(), 8 * mesh.size())

    def sdpa(**options: Any) -> object:
        with symm_cp.context_parallel(mesh):
            return F.scaled_dot_product_attention(q, q, q, **options)

    def flex(bad: bool) -> object:
        with symm_cp.context_parallel(mesh):
            return flex_attention(q, q, q, return_aux=AuxRequest(lse=True, max_scores=bad))

    def cut(bad: bool) -> object:
        with symm_cp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2 if bad else 1]):
            return F.scaled_dot_product_attention(q, q, q)

    def shard(bad: bool) -> object:
        symm_cp.context_parallel_shard(mesh, [x], [2 if bad else 1])
        return sdpa()

    def batch(bad: bool) -> object:
        symm_cp.shard_batch(mesh, {"other" if bad else "input_ids": x})
        return sdpa()

    def direct(bad: bool) -> object:
        key = crossed if bad else sharded
        return symm_cp.all_gather_attention(sharded, key, sharded, group=mesh)

    return {
        "dropout": (
            lambda bad: sdpa(dropout_p=0.1 * bad, attn_mask=whole if bad else None),
            "a floating attn_mask within context_parallel",
        ),
        "mask": (lambda bad: sdpa(attn_mask=q[0, 0] if bad else None), "attn_mask of shape"),
        "flex": (flex, "max_scores within context_parallel"),
        "buffers": (cut, "seq_dim=2 is out of range"),
        "shard": (shard, "seq_dim=2 is out of range"),
        "batch": (batch, "must have input_ids, inputs_embeds"),
        "DTensor": (direct, r"must be Shard\(2\)"),
    }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_peers_hear_of_a_refusal_at_once(group: dist.ProcessGroup, world_size: int) -> None:
    mesh = mesh_of(group)
    for name, (call, why) in calls(mesh).items():
        call(False)
        begin, bad = time.monotonic(), group.rank() == 0
        error = (ValueError, NotImplementedError) if bad else RuntimeError
        with pytest.raises(error, match=why) as caught:
            call(bad)
        assert bad or "on rank 0" in str(caught.value), name
        assert time.monotonic() - begin < patient(2), name
        call(False)


@pytest.mark.ranks(2)
def test_the_end_of_a_recomputation_is_no_refusal(group: dist.ProcessGroup) -> None:
    """A checkpoint ends its recomputation by an exception, which is not told as a refusal."""
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    told: list[BaseException] = []
    refuse = error_reports.refuse
    error_reports.refuse = lambda group, channel, error: told.append(error)
    try:
        with symm_cp.context_parallel(mesh_of(group)):
            out = checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=False)
            out.sum().backward()
    finally:
        error_reports.refuse = refuse
    assert told == []
