"""Batches of a language model, cut with the positions, labels and loss of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.context_parallel.layouts import cut, remember
from symm_cp.context_parallel.lengths import balancer_for
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.memory import GroupLike, group_name
from symm_cp.ops.common import tells_peers

_OP = "shard_batch"


class _GlobalMean(torch.autograd.Function):
    """Sums shares over ranks; each rank's gradient is that of its own share."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, share: float, gain: float, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.factor = share * gain
        # A rank without targets has a mean of 0 / 0.
        total = loss.detach() * share if share else torch.zeros_like(loss)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad * ctx.factor, None, None, None


@partial(tells_peers, group="mesh")
def shard_batch(
    mesh: GroupLike,
    batch: Mapping[str, torch.Tensor],
    *,
    seq_dim: int = 1,
    load_balancer: LoadBalancer | None = None,
    shift_labels: bool = True,
    ignore_index: int = -100,
    average_gradients: bool = False,
) -> tuple[dict[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Cuts a batch of a language model to this rank's part of the sequence.

    Same loss as the model has on the whole batch in one process::

        local, reduce_loss = shard_batch(mesh, {"input_ids": ids, "labels": ids})
        with context_parallel(mesh, load_balancer=...):
            logits = model(local["input_ids"], position_ids=local["position_ids"])
            loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten()))
            loss.backward()

    Args:
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name.
        batch: tensors by name, the same on all ranks. `input_ids` (or else `labels`) gives the
            length of the sequence, and every tensor of that length in `seq_dim` is cut; others are
            returned unchanged. `labels` are shifted first (label t becomes label t + 1, the last
            one `ignore_index`), unless `shift_labels` is False: shifting shards would lose one
            label at the end of each chunk. `position_ids` are added if missing.
        load_balancer: as in `context_parallel`; head-tail by default.
        average_gradients: set it if gradients of parameters are averaged over this group
            afterwards (as DDP and FSDP do) instead of summed.

    Returns the local batch, and a function that takes the mean loss over this rank's labels and
    returns the mean over all ranks' labels: the same on all ranks, and such that the gradients
    summed over ranks are the gradient. Raises `ValueError` for a batch without a sequence or of
    another length than the load balancer's. Source: the recipes of torchtitan and transformers.
    """
    group = _resolve_process_group(group_name(mesh))  # type: ignore[arg-type]
    length = _length(batch, seq_dim)
    balancer = balancer_for(_OP, load_balancer, length, group.size())
    whole = dict(batch)
    if shift_labels and "labels" in whole:
        labels = whole["labels"].roll(-1, seq_dim)
        labels.select(seq_dim, length - 1).fill_(ignore_index)
        whole["labels"] = labels
    if "position_ids" not in whole:
        whole["position_ids"] = _positions(_sequence(batch), seq_dim)
    rows = balancer.positions(group.rank())
    local = {
        name: cut(_OP, tensor, seq_dim, rows)
        if tensor.dim() > seq_dim and tensor.shape[seq_dim] == length
        else tensor
        for name, tensor in whole.items()
    }
    remember(group, balancer, shards=True)
    share = 1.0 / group.size()
    if "labels" in whole:
        counted = int((local["labels"] != ignore_index).sum())
        share = counted / max(1, int((whole["labels"] != ignore_index).sum()))
    gain = float(group.size()) if average_gradients else 1.0

    def reduce_loss(loss: torch.Tensor) -> torch.Tensor:
        return _GlobalMean.apply(loss, share, gain, group)

    return local, reduce_loss


def _sequence(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the tensor that gives the length of the sequence."""
    sequence = batch.get("input_ids", batch.get("labels"))
    if sequence is None:
        raise ValueError(f"{_OP}: batch has {sorted(batch)}, must have input_ids or labels")
    return sequence


def _length(batch: Mapping[str, torch.Tensor], seq_dim: int) -> int:
    sequence = _sequence(batch)
    if not 0 <= seq_dim < sequence.dim():
        raise ValueError(f"{_OP}: {seq_dim=} is out of range for shape {list(sequence.shape)}")
    return sequence.shape[seq_dim]


def _positions(like: torch.Tensor, seq_dim: int) -> torch.Tensor:
    """Returns the positions along `seq_dim`, in the shape of a tensor."""
    shape = [1] * like.dim()
    shape[seq_dim] = -1
    return torch.arange(like.shape[seq_dim], device=like.device).view(shape).expand(like.shape)
