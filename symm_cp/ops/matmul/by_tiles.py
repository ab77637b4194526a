"""Fused matmuls on CUDA as one kernel each, which waits or signals by tiles.

`all_gather_matmul` multiplies shards as they arrive, and `matmul_reduce_scatter` sends parts of the
product while it computes the others. The kernels for shards do the same, but here the tiles of a
single launch keep the GPU busy. See symm_cp/cuda/kernels/tile_matmul.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from symm_cp import runtime
from symm_cp.cuda import kernels_count
from symm_cp.group.memory import Group
from symm_cp.ops.matmul.products import Terms
from symm_cp.runtime.calls import CountCall, PollCall
from symm_cp.tensors.dtypes import NARROW
from symm_cp.tensors.shards import Split

_DTYPES = (*NARROW, torch.float32)


def gathers(
    group: Group, x_shard: torch.Tensor, weights: Sequence[torch.Tensor], split: Split
) -> bool:
    """Returns whether `gather` may run a call; all ranks get the same answer.

    The gathered dimension is not the last one.
    """
    return (
        split.is_equal
        and len(weights) > 0
        and x_shard.dtype in _DTYPES
        and x_shard.numel() > 0
        and all(weight.shape[1] > 0 for weight in weights)
        and group.world_size > 1
        and kernels_count(group, x_shard.device)
    )


def gather(
    group: Group,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    gathered: torch.Tensor | None,
    call_name: bytes,
) -> None:
    """Writes the products of the gathered shards to `outs`. Collective.

    Dimension 0 is gathered, also to `gathered`, if given. The first weight's tiles wait for the
    shards; when the other weights' tiles begin, all shards have arrived.
    """
    rows, rank = shard.contiguous().flatten(0, -2), group.rank
    # The place of the next rank's shard, which is pulled first.
    first_place = 0 if gathered is None else rank + 1

    def kernel(pulled: torch.Tensor, words: torch.Tensor, step: int, epoch: int) -> None:
        from symm_cp.cuda.kernels.tile_matmul import Words, arrival_matmul

        arrivals = Words(words, step, epoch)
        for weight, out in zip(weights, outs, strict=True):
            arrival_matmul(rows, pulled, first_place, weight, out.flatten(0, -2), rank, arrivals)

    whole = None if gathered is None else gathered.flatten(0, -2)
    runtime.run(PollCall(group, rows, kernel, call_name, gathered=whole))


def scatters(group: Group, terms: Terms) -> bool:
    """Returns whether `scatter` may run a call; all ranks get the same answer.

    It may run one product whose equal parts are consecutive rows. The inner dimension, which may
    differ from rank to rank, does not matter.
    """
    return (
        len(terms.lefts) == 1
        and terms.addend is None
        and not terms.by_columns
        and terms.split.is_equal
        and math.prod(terms.shape[: terms.split.dim]) == 1
        and math.prod(terms.shape) > 0
        and terms.like.dtype in _DTYPES
        and group.world_size > 1
        and kernels_count(group, terms.like.device)
    )


def scatter(group: Group, terms: Terms, out: torch.Tensor, call_name: bytes, *, mean: bool) -> None:
    """Writes this rank's part of the sum of all ranks' products to `out`. Collective."""
    (left,), (weight,) = terms.lefts, terms.rights
    a, rank = left.flatten(0, -2).contiguous(), group.rank

    def kernel(
        partials: torch.Tensor, own: torch.Tensor, words: torch.Tensor, step: int, epoch: int
    ) -> None:
        from symm_cp.cuda.kernels.tile_matmul import Words, counted_matmul

        stacked, mine = partials.flatten(1, -2), own.flatten(0, -2)
        counted_matmul(a, weight, stacked, mine, rank, Words(words, step, epoch))

    runtime.run(CountCall(group, kernel, out, call_name, mean=mean))
