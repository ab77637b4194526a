"""Attention whose keys and values are spread over ranks: pipelined all-gather and consume.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), E
features of a head. S_q and S_k are the lengths of this rank's shards, and a shard is the
concatenation of the rank's chunks of the sequence (see schedule/layout.py). W is the world size.

A rank attends to its own keys first and to each peer's where they lie, merging by log-sum-exp. The
backward pass gathers keys and values again and sends each owner its gradients. What the mask rules
out is neither computed nor waited for longer than its flag.

Source: ring attention (Liu et al., 2023); FlashAttention (Dao et al., 2022) for the merging.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from symm_cp import runtime
from symm_cp.memory import Group
from symm_cp.ops.attention import arrival as arrival_attention
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.tiles import DTYPES, Backward, Forward, dense_features, wide
from symm_cp.ops.common import attention_runs, group_of, lib, new_result, what_is
from symm_cp.ops.transforms import check_transforms, once_differentiable
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import Mask, Tile, tiles

_FORWARD = "fused_all_gather_attention"
_BACKWARD = "fused_all_gather_attention_backward"

_OPTIONS = (
    "bool is_causal=False, float? scale=None, bool enable_gqa=False, int[]? chunk_order=None, "
    "SymInt[]? chunk_lengths=None, Tensor? cu_seqlens=None, int? window_left=None, "
    "int? window_right=None"
)
lib.define(
    f"{_FORWARD}(Tensor query, Tensor key, Tensor value, str group_name, *, {_OPTIONS})"
    " -> (Tensor out, Tensor logsumexp)"
)
lib.define(
    f"{_BACKWARD}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor logsumexp, str group_name, *, Tensor? grad_logsumexp=None, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)"
)

_ROTATE_METHODS = ("allgather", "alltoall")
_rotate_method = _ROTATE_METHODS[0]


def set_rotate_method(rotate_method: str) -> None:
    """Chooses how many remote shards the ops keep at a time: all ("allgather") or one ("alltoall").

    On CPU keys and values are read where they lie and none is kept. What differs are the gradients
    of keys and values: "allgather" (the default) has room for those of all ranks and adds them in
    rank order, "alltoall" passes them on in a ring and has room for two. Set it alike on all ranks;
    it holds for backward passes from then on. Raises `ValueError` for another name. Source: torch's
    `set_rotate_method`.
    """
    global _rotate_method
    if rotate_method not in _ROTATE_METHODS:
        raise ValueError(f"set_rotate_method: {rotate_method=} must be one of {_ROTATE_METHODS}")
    _rotate_method = rotate_method


# --- checks ----------------------------------------------------------------------------------


def check_tensors(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """Raises unless queries, keys and values fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{op}: {name} must be (batch, heads, sequence, features), has shape "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} is {tensor.dtype}: needs float64, float32 or a 16-bit")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype} and query {query.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and query on {query.device}")
        if tensor.shape[0] != query.shape[0] or tensor.shape[3] != query.shape[3]:
            raise ValueError(
                f"{op}: {name} of shape {list(tensor.shape)} needs batch {query.shape[0]} and "
                f"{query.shape[3]} features, as query of shape {list(query.shape)}"
            )
    if key.shape != value.shape:
        raise ValueError(
            f"{op}: key {list(key.shape)} and value {list(value.shape)} must have one shape"
        )
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared and not enable_gqa:
        raise ValueError(
            f"{op}: query has {heads} heads and key {shared}: needs as many, or enable_gqa=True"
        )
    if heads != shared and (shared == 0 or heads % shared != 0):
        raise ValueError(f"{op}: {shared} key heads do not divide the {heads} heads of query")


@lru_cache(maxsize=512)
def _layout(world_size: int, order: tuple[int, ...], lengths: tuple[int, ...]) -> SequenceLayout:
    return SequenceLayout(world_size, order, lengths)


def layout_of(
    op: str,
    world_size: int,
    rank: int,
    local_length: int,
    chunk_order: list[int] | None,
    chunk_lengths: list[int] | None,
) -> SequenceLayout:
    """Returns how keys are spread; raises `ValueError` when that does not fit this rank's shard."""
    count = len(chunk_order or chunk_lengths or range(world_size))
    order = tuple(range(count)) if chunk_order is None else tuple(chunk_order)
    each = max(1, count // world_size)
    if chunk_lengths is None:
        if local_length % each != 0:
            raise ValueError(
                f"{op}: the {each} chunks of a rank do not divide its {local_length} keys: give "
                "chunk_lengths"
            )
        lengths = (local_length // each,) * count
    else:
        lengths = tuple(chunk_lengths)
    try:
        layout = _layout(world_size, order, lengths)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    if layout.lengths[rank] != local_length:
        raise ValueError(
            f"{op}: chunk_lengths give rank {rank} {layout.lengths[rank]} keys, key has "
            f"{local_length}"
        )
    return layout


def _documents(op: str, cu_seqlens: torch.Tensor | None, length: int) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cu_seqlens must be a 1-D tensor of int32 or int64, is {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    edges = tuple(cu_seqlens.tolist())
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != length or list(edges) != sorted(edges):
        raise ValueError(
            f"{op}: cu_seqlens={list(edges)} must ascend from 0 to {length}, the length of the "
            "whole sequence"
        )
    return edges


def _check_window(op: str, window_left: int | None, window_right: int | None) -> None:
    for name, size in (("window_left", window_left), ("window_right", window_right)):
        if size is not None and size < 0:
            raise ValueError(f"{op}: {name}={size} must not be negative; None is no limit")


def _check_lengths(op: str, query: torch.Tensor, key: torch.Tensor, masked: bool) -> None:
    if masked and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{op}: query has {query.shape[2]} rows and key {key.shape[2]}: is_causal, windows and "
            "cu_seqlens need equally many"
        )


class _Call:
    """A checked call: how its keys are spread, and which tiles its mask leaves.

    `options` are the keyword arguments of the op as torch passes them: without defaults.
    """

    def __init__(
        self,
        op: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Group,
        options: dict[str, Any],
    ) -> None:
        causal, documents = options.get("is_causal", False), options.get("cu_seqlens")
        left, right = options.get("window_left"), options.get("window_right")
        check_tensors(op, query, key, value, options.get("enable_gqa", False))
        _check_window(op, left, right)
        _check_lengths(op, query, key, causal or (left, right, documents) != (None, None, None))
        self.layout = layout_of(
            op,
            group.world_size,
            group.rank,
            key.shape[2],
            options.get("chunk_order"),
            options.get("chunk_lengths"),
        )
        self.mask = Mask(
            left, 0 if causal else right, _documents(op, documents, self.layout.length)
        )
        self.group, self.rows = group, query.shape[2]
        detail = zlib.crc32(repr((self.layout, self.mask, _rotate_method)).encode())
        B, G, _, E = key.shape
        shape = [B, G, self.layout.length, E]
        self.what = what_is(op, detail=f"{str(key.dtype)[6:]}{shape} layout+mask {detail:08x}")

    def tiles(self, owner: int) -> tuple[Tile, ...]:
        """The tiles of this rank's queries and the keys of a rank."""
        if self.mask:
            return tiles(self.layout, self.mask, self.group.rank, owner)
        keys = self.layout.lengths[owner]
        return (Tile(0, self.rows, 0, keys),) if keys and self.rows else ()


def shard_shapes(key: torch.Tensor, layout: SequenceLayout) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of each rank's keys and values."""
    B, G, _, E = key.shape
    return [((B, G, length, E),) * 2 for length in layout.lengths]


def grad_shapes(key: torch.Tensor, layout: SequenceLayout) -> list[tuple[int, ...]]:
    """The shapes of the gradients of each rank's keys and values, side by side."""
    B, G, _, E = key.shape
    return [(2, B, length, G, E) for length in layout.lengths]


# --- kernels ---------------------------------------------------------------------------------


def _attention_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    attention_runs.count += 1
    group = group_of(group_name)
    call = _Call(_FORWARD, query, key, value, group, options)
    scale = options.get("scale")
    if arrival_attention.takes(group, query, key, call.layout, call.mask, scale):
        return arrival_attention.attend(
            group, query, key, value, call.layout, call.mask, scale, call.what
        )
    parts = sum(len(call.tiles(owner)) for owner in range(group.world_size))
    forward = Forward(dense_features(query), scale, parts)

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        for tile in call.tiles(owner):
            forward.add(tile, *shards)

    shard = [dense_features(key), dense_features(value)]
    runtime.of(key, group).all_gather_and_consume(
        group, shard, consume, call.what, shapes=shard_shapes(key, call.layout)
    )
    return forward.result()


def _attention_backward_kernel(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    group_name: str,
    *,
    grad_logsumexp: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    features, scale = query.shape[-1], options.get("scale")
    if grad_logsumexp is not None:
        # The kernel takes weight * (grad_out . v - grad_out . out) for the gradient of a score.
        # One more feature, 0 in v, 1 in grad_out, -grad_logsumexp in out, adds what belongs to lse.
        scale = factor_of(query, scale)
        more = -features % 8 or 8 if query.device.type != "cpu" else 1  # kernels there like eights
        query, key, value = (F.pad(t, (0, more)) for t in (query, key, value))
        grad_out = F.pad(F.pad(grad_out, (0, 1), value=1.0), (0, more - 1))
        extra = -grad_logsumexp.unsqueeze(-1).to(out.dtype)
        out = F.pad(torch.cat((out, extra), -1), (0, more - 1))
    group = group_of(group_name)
    call = _Call(_BACKWARD, query, key, value, group, options)
    backward = Backward(grad_out, dense_features(query), out, logsumexp, scale)

    def consume(shards: list[torch.Tensor], owner: int, partial: torch.Tensor) -> None:
        backward.add_tiles(call.tiles(owner), shards[0], shards[1], partial)

    shapes = grad_shapes(key, call.layout)
    total = new_result(key, shapes[group.rank], wide(key.dtype))
    runtime.of(key, group).consume_and_reduce_scatter(
        group,
        [dense_features(key), dense_features(value)],
        consume,
        total,
        call.what,
        shapes=shard_shapes(key, call.layout),
        partials=shapes,
        ring=_rotate_method == "alltoall",
    )
    # Copies: the results of an op share no memory.
    grads = (t.transpose(1, 2).to(key.dtype, copy=True) for t in total)
    # Heads within a row, also where a feature was added: the strides that the fake kernel promises.
    grad_q, grad_k, grad_v = (
        t[..., :features].transpose(1, 2).contiguous().transpose(1, 2)
        for t in (backward.grad_query(), *grads)
    )
    return grad_q, grad_k, grad_v


def fake_results(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tensors like the output and the log-sum-exp, without computing them."""
    lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    return torch.empty_like(dense_features(query)), lse


def fake_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns tensors like the gradients of queries, keys and values."""
    return tuple(
        t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in tensors
    )


def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(_FORWARD, query, key, value, options.get("enable_gqa", False))
    return fake_results(query)


def _attention_backward_fake(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    return fake_gradients(query, key, value)


# --- gradients -------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """By hand, because `register_autograd` takes no op with tensors among its keyword arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        group_name: str,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, logsumexp = torch.ops.symm_mem.fused_all_gather_attention(
                query, key, value, group_name, cu_seqlens=cu_seqlens, **options
            )
        ctx.group_name, ctx.options = group_name, options
        ctx.set_materialize_grads(False)  # mostly, nobody uses the log-sum-exp
        # One tensor more than torch's attention saves: where a checkpointed region is recomputed
        # out of its context and takes that one instead, torch notices the difference.
        extra = query.new_empty(0)
        ctx.save_for_backward(query, key, value, out, logsumexp, cu_seqlens, extra)
        return out, logsumexp

    @staticmethod
    @once_differentiable(_FORWARD)
    def backward(  # type: ignore[override]
        ctx: Any,
        saved: tuple[Any, ...],
        grad_out: torch.Tensor | None,
        grad_logsumexp: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        query, key, value, out, logsumexp, cu_seqlens, _ = saved
        # Collective: every rank takes part, whatever it has a gradient of.
        grads = torch.ops.symm_mem.fused_all_gather_attention_backward(
            torch.zeros_like(out) if grad_out is None else grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            ctx.group_name,
            grad_logsumexp=grad_logsumexp,
            cu_seqlens=cu_seqlens,
            **ctx.options,
        )
        return (*grads, None, None, None)


def _attention_autograd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_transforms(_FORWARD, query, key, value)
    cu_seqlens = options.pop("cu_seqlens", None)
    return _Attention.apply(query, key, value, cu_seqlens, group_name, options)


def _attention_backward_autograd(
    keyset: torch._C.DispatchKeySet, *args: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    check_transforms(_BACKWARD, *args)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **options):
        raise NotImplementedError(
            f"{_BACKWARD}: has no gradient: call it under torch.no_grad() or on detached tensors"
        )
    with torch._C._AutoDispatchBelowAutograd():
        op = torch.ops.symm_mem.fused_all_gather_attention_backward.default
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)


def register() -> None:
    """Adds the kernels, the fake kernels and the gradient."""
    for name, kernel, fake in (
        (_FORWARD, _attention_kernel, _attention_fake),
        (_BACKWARD, _attention_backward_kernel, _attention_backward_fake),
    ):
        for device in ("CPU", "CUDA"):
            lib.impl(name, kernel, device)
        lib.impl(name, fake, "Meta")
    lib.impl(_FORWARD, _attention_autograd, "Autograd")
    lib.impl(_BACKWARD, _attention_backward_autograd, "Autograd", with_keyset=True)
