"""The process group's own collectives, for parts of any sizes of dimension 0.

They return at once; `wait_tensor` waits for the result.
"""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.group.one_process import rank_of
from symm_cp.tensors.shards import Split

_ops = torch.ops._c10d_functional


def all_gather(shard: torch.Tensor, split: Split, group_name: str) -> torch.Tensor:
    """All-gathers shards, rank r's of `split.sizes[r]` rows."""
    ranks = len(split.sizes)
    if split.is_equal:
        return _ops.all_gather_into_tensor(shard.contiguous(), ranks, group_name)
    # gloo's all-gather takes equal parts only. Here each rank sends its shard to every rank.
    copies = shard.repeat(ranks, *(1 for _ in shard.shape[1:]))
    sent = [shard.shape[0]] * ranks
    return _ops.all_to_all_single(copies, list(split.sizes), sent, group_name)


def reduce_scatter(
    whole: torch.Tensor, reduce_op: str, split: Split, group_name: str
) -> torch.Tensor:
    """Reduce-scatters a tensor; rank r gets `split.sizes[r]` rows."""
    ranks = len(split.sizes)
    if split.is_equal:
        return _ops.reduce_scatter_tensor(whole.contiguous(), reduce_op, ranks, group_name)
    # torch's op takes equal parts only: parts are padded to the length of the largest.
    padded = whole.new_zeros((ranks, *split.largest_shape(whole.shape)))
    for rank, size in enumerate(split.sizes):
        padded[rank, :size] = split.of(rank, whole)
    scattered = _ops.reduce_scatter_tensor(padded.flatten(0, 1), reduce_op, ranks, group_name)
    rank = rank_of(_resolve_process_group(group_name))  # type: ignore[arg-type]
    return scattered[: split.sizes[rank]]
