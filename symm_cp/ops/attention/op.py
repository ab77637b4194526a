"""Attention whose keys and values are spread over ranks: pipelined all-gather and consume.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), E
features of a head, V features of a value. S_q and S_k are the lengths of this rank's shards, and a
shard is the concatenation of the rank's chunks of the sequence (see schedule/layout.py). W is the
world size.

A rank attends to its own keys first and to each peer's where they lie, merging by log-sum-exp. The
backward pass gathers keys and values again and sends each owner its gradients. Keys that the mask
hides are not computed, and not waited for beyond the flag of their shard.

Options are passed on as torch gives them; `AttentionSpec.of` alone knows what they mean.

Source: ring attention (Liu et al., 2023); FlashAttention (Dao et al., 2022) for the merging.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from symm_cp.ops import autocast
from symm_cp.ops.attention import arrival
from symm_cp.ops.attention.checks import check_scores, check_tensors
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.options import OPTIONS, Options
from symm_cp.ops.attention.pipeline import (
    Grad,
    Tensors,
    consume_keys,
    fake_like,
    fake_results,
    heads_in_rows,
    reduce_gradients,
)
from symm_cp.ops.attention.scored import ScoredTiles
from symm_cp.ops.attention.spec import AttentionSpec, value_features_of
from symm_cp.ops.attention.tiles import Backward, Forward, dense_features, grad_of_sinks
from symm_cp.ops.common import attention_runs, group_of, lib, register_kernel
from symm_cp.ops.compiled import called_in_order
from symm_cp.ops.transforms import check_transforms, once_differentiable

_FORWARD = "fused_all_gather_attention"
_BACKWARD = "fused_all_gather_attention_backward"

lib.define(
    f"{_FORWARD}(Tensor query, Tensor key, Tensor value, str group_name, *, {OPTIONS})"
    " -> (Tensor out, Tensor logsumexp)"
)
# Gradients of sinks and bias are empty unless both given and wanted: torch.func.vmap takes no ops
# with optional results.
lib.define(
    f"{_BACKWARD}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor logsumexp, str group_name, *, Tensor? grad_logsumexp=None, {OPTIONS}, "
    "bool sinks_grad=True, bool bias_grad=True)"
    " -> (Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor bias)"
)


# --- kernels ---------------------------------------------------------------------------------


def _attention_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    attention_runs.count += 1
    group = group_of(group_name)
    spec = AttentionSpec.of(_FORWARD, group, query, key, value, **options)
    if arrival.takes(group, query, key, spec):
        return arrival.attend(group, query, key, value, spec, spec.call_name(_FORWARD, key))
    ranks, rows = range(group.world_size), query.shape[2]
    tiles = [spec.tiles(group.rank, owner, rows) for owner in ranks]
    query, parts = dense_features(query), sum(map(len, tiles))
    scored = ScoredTiles.of(query, spec, group.rank, options.get("bias"))
    forward = Forward(query, spec, parts, sinks=options.get("sinks"), scored=scored)

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        for tile in tiles[owner]:
            forward.add(tile, shards[0], shards[1], owner)

    consume_keys(_FORWARD, spec, group, key, value, consume)
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
    sinks_grad: bool = True,
    bias_grad: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    group, E, V = group_of(group_name), query.shape[3], value.shape[3]
    spec = AttentionSpec.of(_BACKWARD, group, query, key, value, **options)
    query, sinks, bias = dense_features(query), options.get("sinks"), options.get("bias")
    grad_sinks, grad_bias = query.new_empty(0), query.new_empty(0)
    if sinks is not None and sinks_grad:
        grad_sinks = grad_of_sinks(sinks, grad_out, grad_logsumexp, out, logsumexp)
    scored = ScoredTiles.of(query, spec, group.rank, bias)
    if grad_logsumexp is not None and scored is None:
        spec, query, key, value, grad_out, out = _with_grad_lse(
            spec, query, key, value, grad_out, out, grad_logsumexp
        )
        grad_logsumexp = None
    rows = query.shape[2]
    backward = Backward(
        grad_out, query, out, logsumexp, spec, scored=scored, grad_lse=grad_logsumexp
    )

    def consume(shards: list[torch.Tensor], owner: int, partials: Tensors) -> None:
        tiles = spec.tiles(group.rank, owner, rows)
        backward.add_tiles(tiles, shards[0], shards[1], partials, owner)

    grad_key, grad_value = reduce_gradients(_BACKWARD, spec, group, key, value, consume)
    grads = (backward.grad_query(), grad_key, grad_value)
    of_inputs = (
        heads_in_rows(grad[..., :features], own_memory=True)
        for grad, features in zip(grads, (E, E, V), strict=True)
    )
    if bias is not None and bias_grad:
        grad_bias = backward.grad_bias(bias)
    return *of_inputs, grad_sinks, grad_bias


def _with_grad_lse(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[AttentionSpec, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a backward pass for torch's kernels that adds what flows back to the log-sum-exp.

    They take weight * (grad_out . v - grad_out . out) for the gradient of a score. One more
    feature, 0 in v, 1 in grad_out and -grad_lse in out, adds weight * grad_lse.
    """
    # CUDA kernels need a multiple of 8 features.
    padding = 1 if query.device.type == "cpu" else -value.shape[3] % 8 or 8
    scale = factor_of(query, spec.scale)
    if query.shape[3] == value.shape[3]:  # as most kernels require
        query, key = F.pad(query, (0, padding)), F.pad(key, (0, padding))
    value = F.pad(value, (0, padding))
    spec = replace(spec, scale=scale, value_features=value_features_of(query, value))
    grad_out = F.pad(F.pad(grad_out, (0, 1), value=1.0), (0, padding - 1))
    extra = -grad_lse.unsqueeze(-1).to(out.dtype)
    out = F.pad(torch.cat((out, extra), -1), (0, padding - 1))
    return spec, query, key, value, grad_out, out


def _attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group_name: str,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = Options(**options)
    check_tensors(_FORWARD, query, key, value, given.enable_gqa)
    check_scores(_FORWARD, query, given)
    return fake_results(query, value)


def _attention_backward_fake(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks_grad: bool = True,
    bias_grad: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    of_options = (
        tensor.new_empty(tensor.shape) if tensor is not None and wanted else query.new_empty(0)
        for tensor, wanted in ((sinks, sinks_grad), (bias, bias_grad))
    )
    return fake_like(query), fake_like(key), fake_like(value), *of_options


# --- gradients -------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """By hand, because `register_autograd` takes no op with tensors among its keyword arguments.

    `named` are the names of these tensors, `options` the other keyword arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group_name: str,
        options: dict[str, Any],
        named: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, logsumexp = torch.ops.symm_mem.fused_all_gather_attention(
                query, key, value, group_name, **options, **dict(zip(named, tensors, strict=True))
            )
        ctx.group_name, ctx.options, ctx.named = group_name, options, named
        ctx.set_materialize_grads(False)  # the log-sum-exp is rarely used
        # One tensor more than torch's attention saves: when a checkpointed region is recomputed
        # outside its context and calls that one instead, torch notices the difference.
        marker = query.new_empty(0)
        ctx.save_for_backward(query, key, value, out, logsumexp, marker, *tensors)
        return out, logsumexp

    @staticmethod
    @once_differentiable(_FORWARD)
    def backward(ctx: Any, saved: Tensors, grad_out: Grad, grad_lse: Grad) -> tuple[Grad, ...]:  # type: ignore[override]
        query, key, value, out, logsumexp, _, *tensors = saved
        wanted = dict(zip(ctx.named, ctx.needs_input_grad[6:], strict=True))
        # Collective: every rank takes part, also without a gradient of its own.
        *grads, of_sinks, of_bias = torch.ops.symm_mem.fused_all_gather_attention_backward(
            torch.zeros_like(out) if grad_out is None else grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            ctx.group_name,
            grad_logsumexp=grad_lse,
            sinks_grad=wanted.get("sinks", False),
            bias_grad=wanted.get("bias", False),
            **ctx.options,
            **dict(zip(ctx.named, tensors, strict=True)),
        )
        found = {"sinks": of_sinks, "bias": of_bias}
        of_options = (found[name] if wanted[name] else None for name in ctx.named)
        return *grads, None, None, None, *of_options


def _attention_autograd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_transforms(_FORWARD, query, key, value, options.get("sinks"), options.get("bias"))
    tensors = {name: t for name, t in options.items() if isinstance(t, torch.Tensor)}
    for name in tensors:
        del options[name]
    return _Attention.apply(  # type: ignore[no-any-return]
        query, key, value, group_name, options, tuple(tensors), *tensors.values()
    )


def _attention_backward_autograd(
    keyset: torch._C.DispatchKeySet, *args: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    check_transforms(_BACKWARD, *args, *options.values())
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
        register_kernel(name, kernel)
        # Not as a kernel for "Meta", for which tensors, cu_seqlens too, must be on one device.
        torch.library.register_fake(f"symm_mem::{name}", called_in_order(name, fake), lib=lib)
    autocast.register(autocast.cast, _FORWARD)
    autocast.register(autocast.as_they_are, _BACKWARD)
    lib.impl(_FORWARD, _attention_autograd, "Autograd")
    lib.impl(_BACKWARD, _attention_backward_autograd, "Autograd", with_keyset=True)
