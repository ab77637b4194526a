"""Records which load balancers cut the shards of a group, so that later calls need not guess."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from symm_cp.context_parallel.load_balancers import LoadBalancer

# By length of this rank's shard; they live as long as the process group.
_Kept = weakref.WeakKeyDictionary
_used: _Kept[dist.ProcessGroup, dict[int, set[LoadBalancer]]] = _Kept()
_last_cut: _Kept[dist.ProcessGroup, dict[int, LoadBalancer]] = _Kept()


def remember(group: dist.ProcessGroup, balancer: LoadBalancer, *, shards: bool) -> None:
    """Records that a load balancer was used, and whether the caller got `shards` cut by it."""
    length = balancer.lengths[group.rank()]
    used = _used.setdefault(group, {}).setdefault(length, set())
    if len(used) < 2:  # two are enough to know that it is ambiguous
        used.add(balancer)
    if shards:
        _last_cut.setdefault(group, {})[length] = balancer


def remembered(group: dist.ProcessGroup, local_length: int) -> set[LoadBalancer]:
    """Returns the load balancers (two at most) that were used for shards of this length."""
    return _used.get(group, {}).get(local_length, set())


def last_cut(group: dist.ProcessGroup, local_length: int) -> LoadBalancer | None:
    """Returns the load balancer of the last shards of this length that the caller got."""
    return _last_cut.get(group, {}).get(local_length)


def cut(op: str, tensor: torch.Tensor, seq_dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Selects positions of a tensor: `rows` is (S,), or (B, S) for each sample of dimension 0."""
    rows = rows.to(tensor.device)
    if rows.dim() == 1:
        return tensor.index_select(seq_dim, rows)
    samples = len(rows)
    if seq_dim == 0 or tensor.shape[0] != samples:
        raise ValueError(
            f"{op}: a tensor of shape {list(tensor.shape)} with {seq_dim=} has no batch of "
            f"{samples} samples in dimension 0: the load balancer has a layout for each sample"
        )
    parts = zip(tensor, rows, strict=True)
    return torch.stack([part.index_select(seq_dim - 1, own) for part, own in parts])
