"""Flex attention over a sequence that is spread over ranks: pipelined all-gather and consume.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), E
features of a head, S_q and S_k the lengths of this rank's shards, whose rows are the chunks of the
sequence that a layout gives the rank (see schedule/layout.py). W is the world size.

A rank attends to its own keys first, then to each peer's in place, as in attention/op.py. It
evaluates the mask with positions in the whole sequence, one tile at a time, and only for tiles that
the `BlockMask` leaves undecided.

Source: `torch.nn.attention.flex_attention` for the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.group.memory import Group
from symm_cp.ops import autocast
from symm_cp.ops.attention import choice
from symm_cp.ops.attention.attend import (
    Attention,
    BackwardPass,
    Results,
    place_of,
    with_grad_of_lse,
)
from symm_cp.ops.attention.checks import check_scores, check_tensors
from symm_cp.ops.attention.flex.captures import Captures, Rebinding
from symm_cp.ops.attention.flex.mask import MaskTiles, Modifier, check_lengths
from symm_cp.ops.attention.flex.scores import Indices, ScoreGradients, Scores, add_scores
from symm_cp.ops.attention.mesh_calls import propagates_failure
from symm_cp.ops.attention.methods import ALLGATHER, Method, rotate_method
from symm_cp.ops.attention.options import ScoreOptions
from symm_cp.ops.attention.pipeline import (
    AttentionInputs,
    Grad,
    ScoreTerms,
    Tensors,
    fake_like,
    fake_results,
)
from symm_cp.ops.attention.scoring import ScoredTiles
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import (
    Backward,
    Forward,
    Total,
    as_dtype,
    grad_of_sinks,
)
from symm_cp.ops.common import count_attention_run
from symm_cp.ops.tensor_checks import with_memory
from symm_cp.ops.transforms import check_transforms, once_differentiable
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.dtypes import wide

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
    method: Method = ALLGATHER,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flex attention of this rank's queries over the keys of all ranks. Collective.

    Same result as this rank's rows of:

        full_key, full_value = (in sequence order, from all ranks)
        flex_attention(full_query, full_key, full_value, score_mod, block_mask, scale, enable_gqa,
                       return_lse=True)

    where `block_mask` and all indices are of the whole sequence. query: (B, H, S_q, E); key:
    (B, G, S_k, E); value: (B, G, S_k, V); returns out: (B, H, S_q, V), and lse: (B, H, S_q) of
    float32 (float64 for float64). Rows that see no key are zero with lse -inf. `layout` gives the
    positions of this rank's queries, `kv_layout` (default: the same) the positions of its keys.
    `mask_mod` defaults to `block_mask.mask_mod`; the blocks decide where `mask_mod` is evaluated.

    `head_offset` is the number of the call's first query head among the model's heads:
    `mask_mod`, `score_mod` and dropout count heads from it. `block_mask` is for these heads only.

    `options` are `ScoreOptions`, `method` is as in `all_gather_attention`. A `score_mod`
    excludes all options that change scores, except sinks.

    Differentiable, also through lse, in sinks and bias and in tensors that `score_mod` captures:
    these get this rank's part of their gradient, to be summed over ranks as for any replicated
    parameter. Masks take memory for one tile at a time. Raises `ValueError`, `TypeError`
    and `NotImplementedError` before any communication.
    """
    check_transforms(_OP, query, key, value)
    query, key, value = _with_memory(query, key, value)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = autocast.cast((query, key, value), device)
    kv_layout = layout if kv_layout is None else kv_layout
    parsed = ScoreOptions(**options, **method.as_options())
    if mask_mod is None and block_mask is not None:
        mask_mod = block_mask.mask_mod
    score_mod = None if _is_identity(score_mod) else score_mod
    captures: Captures | None = None
    with propagates_failure(*parsed.method_groups or ()):
        check_flex(query, key, value, group, (layout, kv_layout), block_mask, parsed.enable_gqa)
        if score_mod is not None and torch.is_grad_enabled() and layout.length:
            captures = Captures(score_mod)
        attention = flex_attention_of(
            group,
            (query, key, value),
            (layout, kv_layout),
            mask_mod=mask_mod,
            block_mask=block_mask,
            score_mod=score_mod,
            captures=captures,
            options=parsed,
        )
    tensors = captures.tensors if captures is not None else []
    terms = ScoreTerms(parsed.sinks, parsed.bias)
    check_transforms(_OP, *terms, *tensors)
    with torch.autocast(device, enabled=False):
        out, lse = _FlexFunction.apply(query, key, value, attention, *terms, *tensors)
    return out, lse


def _with_memory(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    fakes = [isinstance(tensor, FakeTensor) for tensor in tensors]
    if any(fakes) and not all(fakes):
        raise TypeError(f"{_OP}: query, key and value must all be FakeTensors, or none of them")
    return (
        with_memory(_OP, *each) for each in zip(("query", "key", "value"), tensors, strict=True)
    )


def _is_identity(score_mod: Modifier | None) -> bool:
    # torch's flex_attention substitutes `_identity` for None.
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
    """Raises unless tensors, layouts of queries and keys, and the block mask fit together."""
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
    check_lengths(block_mask, layouts[0].length, layouts[1].length)
    shape = block_mask.kv_num_blocks.shape[:-1]
    if len(shape) != 2 or any(
        masked not in (1, size) for masked, size in zip(shape, query.shape[:2], strict=True)
    ):
        raise ValueError(
            f"{_OP}: block_mask is for batch and heads {list(shape)}, query has "
            f"{list(query.shape[:2])}: must be equal, or 1 in block_mask"
        )


def flex_spec(
    query: torch.Tensor,
    value: torch.Tensor,
    layouts: tuple[SequenceLayout, SequenceLayout],
    score_mod: Modifier | None,
    options: ScoreOptions,
) -> AttentionSpec:
    """Returns the spec of a call; raises for options that clash. `layouts`: of queries and keys."""
    check_scores(_OP, query, options)
    queries, keys = layouts
    others = None if queries == keys else queries
    spec = AttentionSpec.over(_OP, query, value, options, keys, others)
    if score_mod is not None and spec.rescores:
        raise NotImplementedError(
            f"{_OP}: softcap, bias and dropout_p cannot be used together with a score_mod: compute "
            "the soft cap and the bias in score_mod; dropout with a score_mod is not supported"
        )
    return spec


@dataclass(frozen=True, eq=False)
class FunctionTiles:
    """Attends by a mask, and maybe scores, that are functions of positions: see `TileKernel`.

    `captures` are the tensors of `score_mod` that need gradients.
    """

    spec: AttentionSpec
    rank: int
    masks: MaskTiles
    score_mod: Modifier | None = None
    captures: Rebinding | None = None

    @property
    def details(self) -> tuple[object, ...]:
        """See `TileKernel`."""
        return self.masks.queries, self.masks.heads

    def forward(
        self, query: torch.Tensor, terms: ScoreTerms
    ) -> tuple[Callable[[list[torch.Tensor], int], None], Callable[[], Results]]:
        """See `TileKernel`."""
        scored = ScoredTiles.of(query, self.spec, self.rank, terms.bias)
        merged = Forward(query, self.spec, sinks=terms.sinks, scored=scored)
        scores = None
        if self.score_mod is not None:
            scores = Scores(query, self.spec.scale, self.score_mod, self.masks.head_offset)

        def consume(shards: list[torch.Tensor], owner: int) -> None:
            key, value = shards
            indices = self._indices(owner)
            for tile, visible in self.masks.tiles(owner):
                if scores is not None:
                    add_scores(merged, scores, tile, visible, shards, indices)
                elif visible is None:
                    merged.add(tile, key, value, owner)
                else:
                    merged.add_masked(tile, key, value, visible, owner)

        return consume, merged.result

    def backward(
        self, inputs: AttentionInputs, terms: ScoreTerms, bias_grad: bool, *more: Any
    ) -> BackwardPass:
        """See `TileKernel`; `more` are the captured tensors, and sums of their gradients."""
        captured, of_captured = more
        query, key, value, out, lse, grad_out = inputs
        spec = replace(self.spec, method=rotate_method())  # the current method
        bias = terms.bias if bias_grad else None
        kernels: Backward | None = None
        scored = ScoredTiles.of(query, spec, self.rank, terms.bias)
        if self.score_mod is None:
            kernels = Backward(grad_out, query, out, lse, spec, scored=scored, bias=bias)
        else:
            score_mod, leaves = self.score_mod, captured
            if self.captures is not None:
                score_mod, leaves = self.captures.bound(captured)
            scores = Scores(query, spec.scale, score_mod, self.masks.head_offset)
            gradients = ScoreGradients(scores, grad_out, out, lse, leaves)

        def consume(shards: list[torch.Tensor], owner: int, partials: Tensors) -> None:
            totals = Total(partials[0]), Total(partials[1])
            indices = self._indices(owner)
            for tile, visible in self.masks.tiles(owner):
                if kernels is not None:
                    kernels.add_masked(tile, shards[0], shards[1], totals, visible, owner)
                else:
                    gradients.add(tile, visible, shards, indices, totals)
            for total in totals:
                total.finish()

        def result() -> tuple[torch.Tensor, Grad]:
            if kernels is not None:
                return kernels.grad_query(), None if bias is None else kernels.grad_bias(bias)
            for total, grad in zip(of_captured, gradients.grad_captured, strict=True):
                total.add_(grad)
            return as_dtype(gradients.grad_query.total, query.dtype), None

        return BackwardPass(spec, key, value, consume, result)

    def _indices(self, owner: int) -> Indices:
        """Returns a function for the positions of a tile's queries and of rank `owner`'s keys."""
        kv_idx = self.masks.kv_idx(owner)
        return lambda tile: (self.masks.q_idx(tile), kv_idx[tile.k_begin : tile.k_end])


def flex_attention_of(
    group: Group,
    tensors: Tensors,
    layouts: tuple[SequenceLayout, SequenceLayout],
    *,
    mask_mod: Modifier | None,
    block_mask: BlockMask | None,
    score_mod: Modifier | None,
    captures: Rebinding | None,
    options: ScoreOptions,
) -> Attention:
    """Returns the call of a group that `check_flex` has checked; raises for options that clash.

    `tensors` are query, key and value; `layouts` are for queries and for keys.
    """
    query, key, value = tensors
    spec = flex_spec(query, value, layouts, score_mod, options)
    # Fake tensors need only the results' shapes; a choice would communicate.
    method = ALLGATHER
    if not isinstance(query, FakeTensor):
        method = choice.settled(_OP, group, query, key, spec, options)

    def kernel_of(
        spec: AttentionSpec,
        of_keys: Group | None,
        heads: tuple[int, int],
        layouts: tuple[SequenceLayout, SequenceLayout],
    ) -> FunctionTiles:
        rank, first = place_of(of_keys)[0], options.head_offset + heads[0]
        sizes = len(query), heads[1] - heads[0]
        masks = MaskTiles(mask_mod, block_mask, sizes, *layouts, rank, first, heads)
        return FunctionTiles(spec, rank, masks, score_mod, captures)

    return Attention.of(_OP, group, spec, method, query, key, layouts, kernel_of)


def flex_backward(
    attention: Attention, saved: Tensors, terms: ScoreTerms, grad_out: torch.Tensor, grad_lse: Grad
) -> tuple[Tensors, tuple[Grad, Grad], Tensors]:
    """Returns the gradients of query, key and value; sinks and bias; the captured tensors.

    Collective. `saved` are query, key, value, the results, and the captured tensors.
    """
    query, key, value, out, lse, *captured = saved
    if isinstance(query, FakeTensor):
        of_inputs = fake_like(query), fake_like(key), fake_like(value)
        return of_inputs, terms, tuple(torch.empty_like(t) for t in captured)
    grad_out, out = with_grad_of_lse(grad_out, out, grad_lse)
    inputs = AttentionInputs(query, key, value, out, lse, grad_out)
    sums = [torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in captured]
    grads, of_bias = attention.backward(f"{_OP}_backward", inputs, terms, captured, sums)
    of_sinks = None
    if terms.sinks is not None:
        of_sinks = grad_of_sinks(terms.sinks, grad_out, out, lse)
    of_captured = (grad.to(tensor.dtype) for grad, tensor in zip(sums, captured, strict=True))
    return grads, (of_sinks, of_bias), tuple(of_captured)


class _FlexFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: Attention,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None,
        *captured: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _RecordFunctionFast(f"symm_mem::{_OP}"):  # as in graphs, where it is an op
            if isinstance(query, FakeTensor):
                out, lse = fake_results(query, value)
            else:
                count_attention_run()
                out, lse = attention.forward(_OP, (query, key, value), ScoreTerms(sinks, bias))
        ctx.attention = attention
        ctx.set_materialize_grads(False)  # the log-sum-exp is rarely used
        ctx.save_for_backward(sinks, bias, query, key, value, out, lse, *captured)
        return out, lse

    @staticmethod
    @once_differentiable(_OP)
    def backward(ctx: Any, saved: Tensors, grad_out: Grad, grad_lse: Grad) -> tuple[Grad, ...]:  # type: ignore[override]
        sinks, bias, *tensors = saved
        # Collective: every rank takes part, even without a gradient of its own.
        grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
        grad_out = with_memory(_OP, "grad_out", grad_out)
        if grad_lse is not None:
            grad_lse = with_memory(_OP, "grad_lse", grad_lse)
        event = _RecordFunctionFast(f"symm_mem::{_OP}_backward")
        with torch.autocast(grad_out.device.type, enabled=False), event:
            of_inputs, of_options, of_captured = flex_backward(
                ctx.attention, tuple(tensors), ScoreTerms(sinks, bias), grad_out, grad_lse
            )
        return *of_inputs, None, *of_options, *of_captured
