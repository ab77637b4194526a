"""Attention over a sequence that is spread over ranks, for direct use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.context_parallel.refusals import telling_peers
from symm_cp.memory import GroupLike, group_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_OP = "all_gather_attention"
_SEQ_DIM, _HEAD_DIM = 2, 1


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Tells whether a tensor is a DTensor; avoids the import of DTensor, half a second."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: GroupLike,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    load_balancer: LoadBalancer | torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Attends to the keys of all ranks without gathering them first.

    Same result as, for shards cut by `load_balancer`::

        q, k, v = (torch.cat(shards, 2)[:, :, inverse] for shards in all ranks' shards)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
        out[:, :, positions of this rank]

    Args:
        query: (B, H, S_q, E), this rank's part of the sequence.
        key, value: (B, G, S_k, E) and (B, G, S_k, V); G is H, or a divisor of it with `enable_gqa`.
            S_q and S_k may differ where no mask is given.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        is_causal: a query sees no later key.
        scale: of the scores; 1 / sqrt(E) by default.
        load_balancer: how the sequence is spread; by default rank r holds the r-th of W parts. In
            graphs also the tensor of ops/attention/layouts.py.
        cu_seqlens: documents + 1 boundaries of packed documents, in positions of the whole
            sequence: a query sees only keys of its document. A sequence of ints, or a 1-D tensor of
            int32 or int64, best on CPU: the host reads it. For one on a GPU the host waits for the
            GPU, once for each tensor and each change that torch sees (not those by a replayed
            graph); while a graph is captured it is refused.
        window_left, window_right: how many positions before and after its own a query sees.
        return_lse: also return the log-sum-exp of the scores, (B, H, S_q), in float32 (or float64).

    Inputs may be DTensors that are sharded along the sequence over this group; then the results
    are, too. Float64, float32, bfloat16 and float16; parts are merged in float32 (float64).
    Gradients of all inputs, also through the log-sum-exp; those of keys and values are added in
    rank order (see `set_rotate_method`), so results are bitwise the same from run to run. Rows that
    see no key are zero. Raises `ValueError` or `TypeError` for invalid arguments, before any
    communication; `RuntimeError` if a peer fails or calls it with other arguments. Source: ring
    attention (Liu et al., 2023) as one pipelined op, `symm_mem::fused_all_gather_attention`.
    """
    name = group_name(group)
    like = query
    query, key, value = telling_peers(name, _local_parts, query, key, value, name)
    documents = telling_peers(name, _document_options, cu_seqlens)
    features, value_features = (t.shape[-1] if t.dim() > 0 else 0 for t in (query, value))
    if features != value_features:
        # The kernels take one size; zeros change neither scores nor the other features.
        scale = max(features, 1) ** -0.5 if scale is None else scale
        padding = value_features - features
        if padding > 0:
            query, key = F.pad(query, (0, padding)), F.pad(key, (0, padding))
        else:
            value = F.pad(value, (0, -padding))
    out, lse = torch.ops.symm_mem.fused_all_gather_attention(
        query,
        key,
        value,
        name,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        **_layout_options(load_balancer),
        **documents,
    )
    out = out[..., :value_features]
    if is_dtensor(like):
        out, lse = _dtensor(out, like), _dtensor(lse, like)
    return (out, lse) if return_lse else out


def _layout_options(load_balancer: LoadBalancer | torch.Tensor | None) -> dict[str, Any]:
    """Returns how the sequence is spread as the op takes it."""
    if load_balancer is None:
        return {}
    if isinstance(load_balancer, torch.Tensor):
        return {"layouts": load_balancer}
    return {
        "chunk_order": load_balancer.chunk_order,
        "chunk_lengths": load_balancer.chunk_lengths,
    }


def _document_options(cu_seqlens: torch.Tensor | Sequence[int] | None) -> dict[str, Any]:
    """Returns the boundaries of documents as the op takes them."""
    if cu_seqlens is None or isinstance(cu_seqlens, torch.Tensor):
        return {"cu_seqlens": cu_seqlens}
    for edge in cu_seqlens:
        if not isinstance(edge, int | torch.SymInt):
            raise TypeError(
                f"{_OP}: cu_seqlens must be a tensor or a sequence of ints, has {edge!r}"
            )
    return {"document_edges": list(cu_seqlens)}


def _local_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: str
) -> tuple[torch.Tensor, ...]:
    """Returns the shards of DTensors, and tensors as they are."""
    if is_dtensor(query):
        return tuple(_local(tensor, group) for tensor in (query, key, value))
    if is_dtensor(key) or is_dtensor(value):
        raise TypeError(f"{_OP}: key or value is a DTensor and query is not")
    return query, key, value


def _dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)


def _local(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the shard of a DTensor that is sharded along the sequence over the group."""
    from torch.distributed.tensor import Replicate, Shard

    if not is_dtensor(tensor):
        raise TypeError(f"{_OP}: query is a DTensor, key and value must be DTensors, too")
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        over_group = _name_of(mesh, dim) == group
        allowed = (
            (Shard(_SEQ_DIM), Shard(_SEQ_DIM - tensor.dim()))
            if over_group
            else (Replicate(), Shard(0), Shard(_HEAD_DIM))
        )
        if placement not in allowed:
            required = f"Shard({_SEQ_DIM})" if over_group else "Replicate, Shard(0) or Shard(1)"
            raise ValueError(
                f"{_OP}: a DTensor is {placement} over mesh dimension {dim}, must be {required}"
            )
    if group not in [_name_of(mesh, dim) for dim in range(mesh.ndim)]:
        raise ValueError(f"{_OP}: the mesh of a DTensor has no dimension of group {group!r}")
    return tensor.to_local()


def _name_of(mesh: DeviceMesh, dim: int) -> str:
    return str(mesh.get_group(dim).group_name)
