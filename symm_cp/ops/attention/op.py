"""Attention whose keys and values are spread over ranks: pipelined all-gather and consume.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), E
features of a head, V features of a value. S_q and S_k are the lengths of this rank's shards, and a
shard is the concatenation of the rank's chunks of the sequence (see schedule/layout.py). W is the
world size.

A rank attends to its own keys first, then to each peer's in place, merging by log-sum-exp. The
backward pass gathers keys and values again and sends each owner its gradients. A rank skips
keys that the mask hides, and waits only for the flag of their shard.

The op passes options on as torch gives them; only `AttentionSpec.of` interprets them.

Source: ring attention (Liu et al., 2023); FlashAttention (Dao et al., 2022) for the merging.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from symm_cp.group.memory import Group
from symm_cp.ops import autocast
from symm_cp.ops.attention import choice, few_tokens, mesh_calls, ulysses
from symm_cp.ops.attention.attend import AttentionInputs, ScoreTerms, attend, attend_backward
from symm_cp.ops.attention.checks import check_scores, check_tensors
from symm_cp.ops.attention.options import OPTIONS, Options
from symm_cp.ops.attention.pipeline import Grad, Tensors, fake_like, fake_results, heads_in_rows
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.spread import spread_of_queries
from symm_cp.ops.attention.tiles import grad_of_sinks
from symm_cp.ops.common import count_attention_run, group_of
from symm_cp.ops.op import LEFT_TO_TORCH, BackwardOp, Caller, GradientByHand, Op, arguments, declare
from symm_cp.ops.transforms import check_transforms

_FORWARD = "fused_all_gather_attention"
_BACKWARD = "fused_all_gather_attention_backward"


# --- kernels ---------------------------------------------------------------------------------


def _by_heads(
    op: str,
    group: Group,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    options: dict[str, Any],
    *,
    backward: bool = False,
) -> ulysses.UlyssesCall | None:
    """Returns the call of a method that exchanges heads; None for other methods."""
    parsed = Options(**options)
    if parsed.method == "allgather":
        return None
    queries = spread_of_queries(op, group, query, (spec.layout, spec.queries), parsed)
    method = choice.settled(op, group, query, key, spec, parsed, queries=queries, backward=backward)
    if method.name == "allgather":
        return None
    heads, layouts = (query.shape[1], key.shape[1]), (queries, spec.layout)
    return ulysses.call_of(op, method, group, spec, heads, layouts, query.device)


def _attend_heads(
    call: ulysses.UlyssesCall, index: int, tensors: Tensors, terms: ScoreTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(_FORWARD, call.specs[index], call.of_keys, tensors, terms)


def _backward_of_heads(
    call: ulysses.UlyssesCall,
    bias_grad: bool,
    index: int,
    inputs: AttentionInputs,
    terms: ScoreTerms,
    wide_keys: bool,
) -> tuple[Tensors, Grad]:
    spec, of_keys = call.specs[index], call.of_keys
    return attend_backward(_BACKWARD, spec, of_keys, inputs, terms, wide_keys, bias_grad)


def _attention_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    group = group_of(group_name)
    count_attention_run()
    tensors = query, key, value
    with mesh_calls.propagates_failure(*options.get("method_groups") or ()):
        spec = AttentionSpec.of(_FORWARD, group, *tensors, **options)
        if few_tokens.serves(group, *tensors, spec, Options(**options)):
            return few_tokens.attend(_FORWARD, group, spec, *tensors)
        call = _by_heads(_FORWARD, group, spec, query, key, options)
    terms = ScoreTerms(options.get("sinks"), options.get("bias"))
    if call is not None:
        attend_heads = partial(_attend_heads, call)
        with mesh_calls.propagates_failure(*call.mesh_groups):
            return call.attend(_FORWARD, tensors, terms, attend_heads)
    at_once = choice.algorithm(group, query, key, spec) == "together"
    return attend(_FORWARD, spec, group, tensors, terms, at_once=at_once)


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
    group = group_of(group_name)
    with mesh_calls.propagates_failure(*options.get("method_groups") or ()):
        spec = AttentionSpec.of(_BACKWARD, group, query, key, value, **options)
        if few_tokens.serves(group, query, key, value, spec, Options(**options)):
            saved = grad_out, out, logsumexp
            tensors = query, key, value
            found = few_tokens.attend_backward(
                _BACKWARD, group, spec, tensors, saved, grad_logsumexp
            )
            return *found, query.new_empty(0), query.new_empty(0)
        call = _by_heads(_BACKWARD, group, spec, query, key, options, backward=True)
    sinks, _ = terms = ScoreTerms(options.get("sinks"), options.get("bias"))
    inputs = AttentionInputs(query, key, value, out, logsumexp, grad_out, grad_logsumexp)
    if call is not None:
        backward_of_heads = partial(_backward_of_heads, call, bias_grad)
        with mesh_calls.propagates_failure(*call.mesh_groups):
            grads, of_bias = call.attend_backward(_BACKWARD, inputs, terms, backward_of_heads)
    else:
        at_once = choice.algorithm(group, query, key, spec, backward=True) == "together"
        grads, of_bias = attend_backward(
            _BACKWARD, spec, group, inputs, terms, bias_grad=bias_grad, at_once=at_once
        )
    grad_sinks, grad_bias = query.new_empty(0), query.new_empty(0)
    if sinks is not None and sinks_grad:
        grad_sinks = grad_of_sinks(sinks, grad_out, grad_logsumexp, out, logsumexp)
    if of_bias is not None:
        grad_bias = of_bias
    of_inputs = (heads_in_rows(grad, own_memory=True) for grad in grads)
    return *of_inputs, grad_sinks, grad_bias


def _attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group_name: str,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    parsed = Options(**options)
    check_tensors(_FORWARD, query, key, value, parsed.enable_gqa)
    check_scores(_FORWARD, query, parsed)
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


def _example(on: Caller, tensors: int) -> list[torch.Tensor]:
    return [on.rand(1, 2, 4, 8) for _ in range(tensors)]


declare(
    Op(
        name=_FORWARD,
        schema=(
            f"(Tensor query, Tensor key, Tensor value, str group_name, *, {OPTIONS})"
            " -> (Tensor out, Tensor logsumexp)"
        ),
        kernel=_attention_kernel,
        fake=_attention_fake,
        gradient=BackwardOp(_BACKWARD, once=True),
        autocast=autocast.cast,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(*_example(on, 3), on.group_name, is_causal=True),
        mixes_devices=True,  # cu_seqlens
    ),
    # Gradients of sinks and bias are empty unless both given and wanted: torch.func.vmap takes no
    # ops with optional results.
    Op(
        name=_BACKWARD,
        schema=(
            "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
            f"Tensor logsumexp, str group_name, *, Tensor? grad_logsumexp=None, {OPTIONS}, "
            "bool sinks_grad=True, bool bias_grad=True)"
            " -> (Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor bias)"
        ),
        kernel=_attention_backward_kernel,
        fake=_attention_backward_fake,
        gradient=GradientByHand(_attention_backward_autograd, with_keyset=True),
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(*_example(on, 5), on.rand(1, 2, 4), on.group_name),
        mixes_devices=True,
        internal=True,
    ),
)
