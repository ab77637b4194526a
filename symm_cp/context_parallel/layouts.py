"""Which load balancers shards of a group were cut by, so that nobody has to guess later."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from symm_cp.context_parallel.load_balancers import LoadBalancer

# By length of this rank's shard, and whether tensors were cut. It goes with the process group.
_used: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dict[LoadBalancer, bool]]] = (
    weakref.WeakKeyDictionary()
)

# So many are enough to know that it is not known which; each may be a large layout.
_MOST = 8


def remember(group: dist.ProcessGroup, balancer: LoadBalancer, *, has_cut: bool) -> None:
    """Notes that a load balancer was used, and whether tensors were cut by it."""
    used = _used.setdefault(group, {}).setdefault(balancer.lengths[group.rank()], {})
    if balancer in used or len(used) < _MOST:
        used[balancer] = has_cut or used.get(balancer, False)


def remembered(group: dist.ProcessGroup, local_length: int) -> list[LoadBalancer]:
    """Returns the load balancers (some of them) that were used for shards of this length."""
    return list(_used.get(group, {}).get(local_length, {}))


def remembered_cuts(group: dist.ProcessGroup, local_length: int) -> list[LoadBalancer]:
    """Returns those that tensors were cut by."""
    used = _used.get(group, {}).get(local_length, {})
    return [balancer for balancer, has_cut in used.items() if has_cut]


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
