"""Attention over a sequence that is spread over ranks, for direct use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.group.memory import GroupLike
from symm_cp.ops.attention.mesh_calls import reporting_to_peers
from symm_cp.ops.attention.methods import Method, MethodLike, split_by
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs, Unpack

_OP = "all_gather_attention"
_SEQ_DIM, _HEAD_DIM = 2, 1


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor; for plain tensors avoids DTensor's import (half a second)."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


class _Options(TypedDict, total=False):
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    load_balancer: LoadBalancer | torch.Tensor | None
    cu_seqlens: torch.Tensor | Sequence[int] | None
    window_left: int | None
    window_right: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    bias: torch.Tensor | None
    dropout_p: float
    dropout_seed: torch.Tensor | None
    document_ids: torch.Tensor | None
    key_mask: torch.Tensor | None
    query_load_balancer: LoadBalancer | None
    method: MethodLike | Method | None
    prefix_lengths: torch.Tensor | int | None


@overload
def all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: GroupLike,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: GroupLike,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@entry_point("fused_all_gather_attention")
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
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    query_load_balancer: LoadBalancer | None = None,
    method: MethodLike | Method | None = None,
    return_lse: bool = False,
    prefix_lengths: torch.Tensor | int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attends to the keys of all ranks without gathering them first.

    Same result as, with `q`, `k`, `v` the ranks' shards joined in sequence order::

        score = scale * q @ k.mT  # (B, H, S_q, S_k)
        score = softcap * torch.tanh(score / softcap)
        score = score + bias[:, kv_pos - q_pos + S_q - 1]
        score = score.masked_fill(hidden, -torch.inf)
        lse = torch.logaddexp(score.logsumexp(-1), sinks.unsqueeze(-1))
        out = F.dropout((score - lse.unsqueeze(-1)).exp(), dropout_p) @ v
        out[:, :, positions of this rank]

    without the lines for options that are not given.

    Args:
        query: (B, H, S_q, E), this rank's part of the sequence.
        key, value: (B, G, S_k, E) and (B, G, S_k, V); G is H, or a divisor of it with `enable_gqa`.
            S_q and S_k may differ if no mask but `key_mask` is given.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name; a 2-D DeviceMesh for two methods.
        is_causal: a query sees no later key.
        scale: of the scores; 1 / sqrt(E) by default.
        load_balancer: how the sequence is spread; by default rank r holds the r-th of W parts. In
            graphs also the encoded tensor of ops/attention/layouts.py.
        cu_seqlens: documents + 1 boundaries of packed documents, in positions of the whole
            sequence: a query sees only keys of its document. A sequence of ints, or a 1-D tensor of
            int32 or int64, best on CPU: the host reads it. For a tensor on a GPU the host waits for
            the GPU, once for each tensor and each change that torch sees (not changes by a replayed
            graph); while a graph is captured it is refused.
        window_left, window_right: how many positions before and after its own a query sees.
        softcap: bounds the scores, as in Gemma 2.
        sinks: (H,), a learned score of each head that takes a share of every row's weights, as in
            GPT-OSS and StreamingLLM.
        bias: (H, S_q + S_k - 1), added to the scores by distance, as in ALiBi and T5; S_q and S_k
            are the lengths of the whole sequences.
        dropout_p, dropout_seed: the share of the weights that is dropped, and an int64 tensor of
            one element on CPU, equal on all ranks. The dropped weights depend only on the seed, the
            sample, the head and both positions in the whole sequence: they are the same at every
            world size and in every layout (Philox4x32: see ops/attention/philox.py).
        document_ids: (B or 1, S) of int32 or int64, for the whole sequence: a query sees only keys
            of its document. A document's positions must be contiguous. The host reads it.
        key_mask: (B or 1, S_k) of bool, for the whole sequence: False hides a key from all queries
            (padding). The host reads it.
        query_load_balancer: how the queries' sequence is spread, if not like the keys' sequence.
            Without it, with methods "ulysses" and "auto", ranks exchange their query counts unless
            another argument gives these.
        method: "allgather" (each rank attends with its queries to all keys), "ulysses" (each rank
            attends with some heads to all positions; there must be at least one head per rank),
            "auto" (the faster one), or for a 2-D mesh the method of each dimension, as in
            ("ulysses", "allgather"). The default is set by `set_rotate_method`.
        return_lse: also return the log-sum-exp of the scores, (B, H, S_q), in float32 (or float64);
            it includes the sinks and not dropout.
        prefix_lengths: how many first keys of each sample all queries see, beside the keys that
            `is_causal` and the window show them: (B or 1,) of int32 or int64, or an int for all
            samples. The host reads it. Not together with documents.

    Inputs may be DTensors that are sharded along the sequence over this group; then the results
    are, too. Float64, float32, bfloat16 and float16; parts are merged in float32 (float64).
    All inputs get gradients, also through the log-sum-exp; gradients of keys and values are added
    in rank order (see `set_rotate_method`), so results are bitwise the same from run to run.
    Gradients of sinks and bias are this rank's part, to be summed over ranks like those of any
    replicated parameter. Rows that see no key are zero. Raises `ValueError` or `TypeError` for
    invalid arguments, before any communication; `RuntimeError` if a peer fails or calls it with
    other arguments. Source: ring attention (Liu et al., 2023) as one pipelined op,
    `symm_mem::fused_all_gather_attention`; FlashAttention (Dao et al., 2022) for dropout in the
    backward pass; Gemma 2 (2024), StreamingLLM (Xiao et al., 2023), ALiBi (Press et al., 2021), T5
    (Raffel et al., 2019) and Philox (Salmon et al., 2011) for the options.
    """
    name, split = split_by(_OP, group, method, argument="group")
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "load_balancer": load_balancer,
        "cu_seqlens": cu_seqlens,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": softcap,
        "sinks": sinks,
        "bias": bias,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "document_ids": document_ids,
        "key_mask": key_mask,
        "query_load_balancer": query_load_balancer,
        "prefix_lengths": prefix_lengths,
    }
    tensors = query, key, value
    if split.grid is None:
        out, lse = attend_over(name, split, *tensors, **options)
    else:  # the peers are those in this rank's row and column
        out, lse = reporting_to_peers(
            split.peers(name), attend_over, name, split, *tensors, **options
        )
    return (out, lse) if return_lse else out


def attend_over(
    group: str,
    method: Method,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    load_balancer: LoadBalancer | torch.Tensor | None = None,
    query_load_balancer: LoadBalancer | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    prefix_lengths: torch.Tensor | int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`all_gather_attention` with the log-sum-exp; callers report its errors to the peers."""
    like = query
    of_dtensors = not (type(query) is type(key) is type(value) is torch.Tensor) and (
        is_dtensor(query) or is_dtensor(key) or is_dtensor(value)
    )
    if of_dtensors:
        query, key, value = _local_parts(query, key, value, group)
        terms = options.get("sinks"), options.get("bias")
        options["sinks"], options["bias"] = _local_options(like, group, *terms, dropout_p)
    for name in [*options]:  # omitted arguments cost least
        if options[name] is None:
            del options[name]
    if isinstance(cu_seqlens, torch.Tensor):
        options["cu_seqlens"] = cu_seqlens
    elif cu_seqlens is not None:
        options["document_edges"] = _document_edges(cu_seqlens)
    if prefix_lengths is not None:
        given = isinstance(prefix_lengths, torch.Tensor)
        options["prefix_lengths"] = prefix_lengths if given else _prefix_option(prefix_lengths)
    if dropout_p:
        options["dropout_p"] = dropout_p
    out, lse = direct("fused_all_gather_attention")(
        query,
        key,
        value,
        group,
        **_layout_options(load_balancer, query_load_balancer),
        **options,
        **method.as_options(),
    )
    return (_dtensor(out, like), _dtensor(lse, like)) if of_dtensors else (out, lse)


def _layout_options(
    keys: LoadBalancer | torch.Tensor | None, queries: LoadBalancer | None
) -> dict[str, Any]:
    if isinstance(keys, torch.Tensor):
        return {"layouts": keys}
    options = {}
    if keys is not None:
        layout = keys.layout
        options["chunk_order"] = list(layout.chunk_order)
        options["chunk_lengths"] = list(layout.chunk_lengths)
    if queries is not None:
        layout = queries.layout
        options["query_chunk_order"] = list(layout.chunk_order)
        options["query_chunk_lengths"] = list(layout.chunk_lengths)
    return options


def _prefix_option(lengths: int) -> torch.Tensor:
    if not isinstance(lengths, int | torch.SymInt):
        raise TypeError(f"{_OP}: prefix_lengths must be a tensor or an int, is {lengths!r}")
    return torch.full((1,), lengths, dtype=torch.int64, device="cpu")


def _document_edges(cu_seqlens: Sequence[int]) -> list[int]:
    for edge in cu_seqlens:
        if not isinstance(edge, int | torch.SymInt):
            raise TypeError(
                f"{_OP}: cu_seqlens must be a tensor or a sequence of ints, has {edge!r}"
            )
    return list(cu_seqlens)


def _local_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: str
) -> tuple[torch.Tensor, ...]:
    if not is_dtensor(query):
        raise TypeError(f"{_OP}: key or value is a DTensor and query is not")
    return tuple(_local(tensor, group) for tensor in (query, key, value))


def _local_options(
    query: DTensor,
    group: str,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    dropout_p: float,
) -> tuple[torch.Tensor | None, ...]:
    """Returns sinks and bias of this rank's heads; their gradients are summed over ranks."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = query.device_mesh
    others = [
        Replicate() if _name_of(mesh, dim) == group else placement
        for dim, placement in enumerate(query.placements)
    ]
    if dropout_p and any(placement.is_shard() for placement in others):
        raise NotImplementedError(
            f"{_OP}: {dropout_p=} with DTensors sharded along samples or heads: pass local "
            "tensors, and a dropout_seed for each part"
        )
    placements = [Shard(0) if p.is_shard(_HEAD_DIM) else Replicate() for p in others]
    # Ranks with other positions or samples add to the gradient.
    grads = [
        Partial() if q.is_shard() and not p.is_shard() else p
        for q, p in zip(query.placements, placements, strict=True)
    ]
    local = []
    for name, tensor in (("sinks", sinks), ("bias", bias)):
        if is_dtensor(tensor):
            if tensor.device_mesh != mesh or list(tensor.placements) != placements:
                raise ValueError(
                    f"{_OP}: {name} is a DTensor with placements {tensor.placements}, must be on "
                    f"the mesh of query with placements {tuple(placements)}"
                )
            tensor = tensor.to_local(grad_placements=grads)
        local.append(tensor)
    return tuple(local)


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
