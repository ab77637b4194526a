"""Flex attention whose sequence is spread over ranks: pipelined all-gather and consume.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), E
features of a head, S_q and S_k the lengths of this rank's shards, whose rows are the chunks of the
sequence that a layout gives the rank (see schedule/layout.py). W is the world size.

A rank attends to its own keys first and to each peer's where they lie, as in ops/attention.py. The
mask is evaluated with positions in the whole sequence, for one tile at a time and for those tiles
only that the `BlockMask` leaves undecided.

Source: `torch.nn.attention.flex_attention` for the interface.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask

from symm_cp import runtime
from symm_cp.memory import Group
from symm_cp.ops import autocast
from symm_cp.ops.attention import op as attention
from symm_cp.ops.attention.flex.captures import Captures, Rebinding
from symm_cp.ops.attention.flex.mask import MaskTiles, Modifier
from symm_cp.ops.attention.flex.scores import Indices, ScoreGradients, Scores, add_scores
from symm_cp.ops.attention.op import check_tensors, grad_shapes, shard_shapes
from symm_cp.ops.attention.tiles import Backward, Forward, Total, additive, dense_features, wide
from symm_cp.ops.common import attention_runs, new_result, what_is
from symm_cp.ops.transforms import check_transforms, once_differentiable
from symm_cp.schedule.layout import SequenceLayout

_OP = "flex_all_gather_attention"


def flex_all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: Group,
    layout: SequenceLayout,
    mask_mod: Modifier | None = None,
    score_mod: Modifier | None = None,
    block_mask: BlockMask | None = None,
    kv_layout: SequenceLayout | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flex attention of this rank's queries over the keys of all ranks. Collective.

    Same result as this rank's rows of:

        full_key, full_value = (in sequence order, from all ranks)
        flex_attention(full_query, full_key, full_value, score_mod, block_mask, scale, enable_gqa,
                       return_lse=True)

    with `block_mask` and all indices those of the whole sequence. query: (B, H, S_q, E); key and
    value: (B, G, S_k, E); returns out, as query, and lse: (B, H, S_q) of float32 (float64 for
    float64). Rows that see nothing are zero with lse -inf. `layout` tells which positions this
    rank's queries have, `kv_layout` (default: the same) those of its keys. `mask_mod` defaults to
    that of `block_mask`; a `block_mask` decides where `mask_mod` is asked.

    Differentiable, through lse too, and in tensors that `score_mod` captures: those get this rank's
    part of their gradient, to be summed over ranks as that of any parameter which all ranks hold.
    Masks take memory for one tile at a time. Raises `ValueError`, `TypeError` and
    `NotImplementedError` before any communication.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = autocast.cast((query, key, value), device)
    kv_layout = layout if kv_layout is None else kv_layout
    check_flex(query, key, value, group, (layout, kv_layout), block_mask, enable_gqa)
    if mask_mod is None and block_mask is not None:
        mask_mod = block_mask.mask_mod
    score_mod = None if _is_identity(score_mod) else score_mod
    heads = (query.shape[0], query.shape[1])
    masks = MaskTiles(mask_mod, block_mask, heads, layout, kv_layout, group.rank)
    captures: Captures | None = None
    if score_mod is not None and torch.is_grad_enabled() and layout.length:
        captures = Captures(score_mod)
    call = FlexCall(group, masks, score_mod, captures, kv_layout, scale)
    tensors = captures.tensors if captures is not None else []
    check_transforms(_OP, query, key, value, *tensors)
    with torch.autocast(device, enabled=False):
        out, lse = _FlexAttention.apply(query, key, value, call, *tensors)
    return out, lse


def _is_identity(score_mod: Modifier | None) -> bool:
    # What torch's flex_attention takes for None.
    return getattr(score_mod, "__module__", "").startswith("torch.") and (
        getattr(score_mod, "__name__", "") == "_identity"
    )


def check_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group,
    layouts: tuple[SequenceLayout, SequenceLayout],
    block_mask: BlockMask | None,
    enable_gqa: bool,
) -> None:
    """Raises unless tensors, layouts of queries and keys, and the mask's blocks fit together."""
    check_tensors(_OP, query, key, value, enable_gqa)
    if query.device.type != "cpu":
        raise NotImplementedError(f"{_OP}: query is on {query.device}: only CPU is supported")
    for name, tensor, layout in zip(("layout", "kv_layout"), (query, key), layouts, strict=True):
        if layout.world_size != group.world_size:
            raise ValueError(
                f"{_OP}: {name} is for {layout.world_size} ranks, the group has {group.world_size}"
            )
        if tensor.shape[2] != layout.lengths[group.rank]:
            raise ValueError(
                f"{_OP}: {name} gives rank {group.rank} {layout.lengths[group.rank]} rows, "
                f"{'query' if name == 'layout' else 'key'} has {tensor.shape[2]}"
            )
    if block_mask is None:
        return
    lengths = (layouts[0].length, layouts[1].length)
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"{_OP}: block_mask is for {tuple(block_mask.seq_lengths)} queries and keys: needs "
            f"those of the whole sequence, {lengths}"
        )
    shape = block_mask.kv_num_blocks.shape[:-1]
    if len(shape) != 2 or any(
        given not in (1, size) for given, size in zip(shape, query.shape[:2], strict=True)
    ):
        raise ValueError(
            f"{_OP}: block_mask is for batch and heads {list(shape)}, query has "
            f"{list(query.shape[:2])}: they must agree, or be 1 in block_mask"
        )


class FlexCall:
    """What the two passes of a call share."""

    def __init__(
        self,
        group: Group,
        masks: MaskTiles,
        score_mod: Modifier | None,
        captures: Rebinding | None,
        keys: SequenceLayout,
        scale: float | None,
    ) -> None:
        self.group, self.masks, self.score_mod, self.captures = group, masks, score_mod, captures
        self.keys, self.scale = keys, scale

    def what(self, name: str, query: torch.Tensor, key: torch.Tensor) -> bytes:
        """Names a pass, for errors and for ranks to notice that they disagree."""
        B, G, _, E = key.shape
        detail = repr((self.masks.queries, self.keys, query.shape[1], attention._rotate_method))
        shape = [B, G, self.keys.length, E]
        text = f"{str(key.dtype)[6:]}{shape} layout {zlib.crc32(detail.encode()):08x}"
        return what_is(name, detail=text)

    def indices(self, owner: int) -> Indices:
        """Gives the positions of the queries and keys of a tile."""
        kv_idx = self.masks.kv_idx(owner)
        return lambda tile: (self.masks.q_idx(tile), kv_idx[tile.k_begin : tile.k_end])


def forward(
    call: FlexCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and its log-sum-exp. Collective."""
    if isinstance(query, FakeTensor):
        return attention.fake_results(query)
    attention_runs.count += 1
    query = dense_features(query)
    merged = Forward(query, call.scale)
    scores = Scores(query, call.scale, call.score_mod) if call.score_mod is not None else None

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        k, v = shards
        indices = call.indices(owner)
        for tile, visible in call.masks.tiles(owner):
            if scores is not None:
                add_scores(merged, scores, tile, visible, shards, indices)
            elif visible is None:
                merged.add(tile, k, v)
            else:
                blind = visible.any(-1).logical_not()
                merged.add_masked(tile, k, v, additive(visible, query.dtype), blind)

    shard = [dense_features(key), dense_features(value)]
    what = call.what(_OP, query, key)
    runtime.of(key, call.group).all_gather_and_consume(
        call.group, shard, consume, what, shapes=shard_shapes(key, call.keys)
    )
    return merged.result()


def backward(
    call: FlexCall,
    saved: tuple[torch.Tensor, ...],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key, value and the captured tensors. Collective."""
    query, key, value, out, lse, *captured = saved
    if isinstance(query, FakeTensor):
        return *attention.fake_gradients(query, key, value), *map(torch.empty_like, captured)
    query = dense_features(query)
    kernels: Backward | None = None
    if call.score_mod is None and grad_lse is None:
        kernels = Backward(grad_out, query, out, lse, call.scale)
    else:
        score_mod, inputs = call.score_mod, captured
        if call.captures is not None:
            score_mod, inputs = call.captures.bound(captured)
        scores = Scores(query, call.scale, score_mod)
        written = ScoreGradients(scores, grad_out, grad_lse, out, lse, inputs)

    def consume(shards: list[torch.Tensor], owner: int, partial: torch.Tensor) -> None:
        totals = Total(partial[0].transpose(1, 2)), Total(partial[1].transpose(1, 2))
        indices = call.indices(owner)
        for tile, visible in call.masks.tiles(owner):
            if kernels is not None:
                mask = None if visible is None else additive(visible, query.dtype)
                kernels.add(tile, shards[0], shards[1], totals, mask)
            else:
                written.add(tile, visible, shards, indices, totals)
        for total in totals:
            total.finish()

    partials = grad_shapes(key, call.keys)
    total = new_result(key, partials[call.group.rank], wide(key.dtype))
    runtime.of(key, call.group).consume_and_reduce_scatter(
        call.group,
        [dense_features(key), dense_features(value)],
        consume,
        total,
        call.what(f"{_OP}_backward", query, key),
        shapes=shard_shapes(key, call.keys),
        partials=partials,
        ring=attention._rotate_method == "alltoall",
    )
    grad_key, grad_value = (t.transpose(1, 2).to(key.dtype) for t in total)
    if kernels is not None:
        return kernels.grad_query(), grad_key, grad_value
    of_captured = (g.to(t.dtype) for g, t in zip(written.grad_captured, captured, strict=True))
    return written.grad_query.total.to(query.dtype), grad_key, grad_value, *of_captured


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: FlexCall,
        *captured: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(call, query, key, value)
        ctx.call = call
        ctx.set_materialize_grads(False)  # mostly, nobody uses the log-sum-exp
        ctx.save_for_backward(query, key, value, out, lse, *captured)
        return out, lse

    @staticmethod
    @once_differentiable(_OP)
    def backward(  # type: ignore[override]
        ctx: Any,
        saved: tuple[torch.Tensor, ...],
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        # Collective: every rank takes part, whatever it has a gradient of.
        given = torch.zeros_like(saved[3]) if grad_out is None else grad_out
        with torch.autocast(given.device.type, enabled=False):
            query, key, value, *captured = backward(ctx.call, saved, given, grad_lse)
        return query, key, value, None, *captured
