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

from typing import Any

import torch

from symm_cp.group.memory import Group
from symm_cp.ops import autocast
from symm_cp.ops.attention import choice, few_tokens, mesh_calls
from symm_cp.ops.attention.attend import Attention, OptionTiles, place_of, with_grad_of_lse
from symm_cp.ops.attention.checks import check_saved, check_scores, check_tensors
from symm_cp.ops.attention.methods import ALLGATHER
from symm_cp.ops.attention.options import OPTIONS, Options
from symm_cp.ops.attention.pipeline import (
    AttentionInputs,
    ScoreTerms,
    fake_like,
    fake_results,
    heads_in_rows,
)
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.spread import spread_of_queries
from symm_cp.ops.attention.tiles import grad_of_sinks
from symm_cp.ops.common import count_attention_run, group_of
from symm_cp.ops.op import LEFT_TO_TORCH, BackwardOp, Caller, GradientByHand, Op, arguments, declare
from symm_cp.ops.transforms import check_transforms

_FORWARD = "fused_all_gather_attention"
_BACKWARD = "fused_all_gather_attention_backward"


# --- kernels ---------------------------------------------------------------------------------


def _attention(
    op: str,
    group: Group,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    options: Options,
    *,
    backward: bool = False,
) -> Attention:
    """Returns the call; collective where ranks must count queries."""
    method, queries, at_once = ALLGATHER, spec.queries or spec.layout, False
    if options.method != method.name:
        queries = spread_of_queries(op, group, query, (spec.layout, spec.queries), options)
        method = choice.settled(
            op, group, query, key, spec, options, queries=queries, backward=backward
        )
    if method.name == "allgather":
        at_once = choice.algorithm(group, query, key, spec, backward=backward) == "together"

    def kernel_of(
        spec: AttentionSpec, of_keys: Group | None, _heads: object, _layouts: object
    ) -> OptionTiles:
        return OptionTiles(spec, place_of(of_keys), at_once)

    layouts = queries, spec.layout
    return Attention.of(op, group, spec, method, query, key, layouts, kernel_of, at_once=at_once)


def _attention_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    group, parsed = group_of(group_name), Options(**options)
    count_attention_run()
    tensors = query, key, value
    with mesh_calls.propagates_failure(*parsed.method_groups or ()):
        spec = AttentionSpec.of(_FORWARD, group, *tensors, parsed)
        if few_tokens.serves(group, *tensors, spec, parsed):
            return few_tokens.attend(_FORWARD, group, spec, *tensors)
        attention = _attention(_FORWARD, group, spec, query, key, parsed)
    return attention.forward(_FORWARD, tensors, ScoreTerms(parsed.sinks, parsed.bias))


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
    group, parsed = group_of(group_name), Options(**options)
    with mesh_calls.propagates_failure(*parsed.method_groups or ()):
        spec = AttentionSpec.of(_BACKWARD, group, query, key, value, parsed)
        check_saved(_BACKWARD, query, value, grad_out=grad_out, out=out)
        grad_out, out = with_grad_of_lse(grad_out, out, grad_logsumexp)
        if few_tokens.serves(group, query, key, value, spec, parsed):
            saved = grad_out, out, logsumexp
            tensors = query, key, value
            found = few_tokens.attend_backward(_BACKWARD, group, spec, tensors, saved)
            return *found, query.new_empty(0), query.new_empty(0)
        attention = _attention(_BACKWARD, group, spec, query, key, parsed, backward=True)
    sinks, _ = terms = ScoreTerms(parsed.sinks, parsed.bias)
    inputs = AttentionInputs(query, key, value, out, logsumexp, grad_out)
    grads, of_bias = attention.backward(_BACKWARD, inputs, terms, bias_grad=bias_grad)
    of_sinks = None
    if sinks is not None and sinks_grad:
        of_sinks = grad_of_sinks(sinks, grad_out, out, logsumexp)
    of_inputs = (heads_in_rows(grad, own_memory=True) for grad in grads)
    of_terms = (query.new_empty(0) if grad is None else grad for grad in (of_sinks, of_bias))
    return *of_inputs, *of_terms


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


def attention_types(
    t: Any, query: Any, key: Any, value: Any, method: str = "allgather", **rest: Any
) -> Any:
    """Describes attention of shards of a sequence; masks and other options are not checked."""
    t.ignore(rest)
    by_heads = method == "ulysses"
    if by_heads:
        query, key, value = [t.all_to_all(x, _SEQUENCE, _HEADS) for x in (query, key, value)]
    else:
        query = t.shard(query, _SEQUENCE)
        key, value = t.all_gather(key, _SEQUENCE), t.all_gather(value, _SEQUENCE)
    out = t.local("attend({}, {}, {})", "bhq_,bh__,bh_e->bhqe", query, key, value)
    logsumexp = t.local("", "bhq_,bh__->bhq", query, key)
    if by_heads:
        return t.all_to_all(out, _HEADS, _SEQUENCE), t.all_to_all(logsumexp, _HEADS, _SEQUENCE)
    return out, logsumexp


def types_of_gradient(t: Any, key: Any, value: Any, method: str = "allgather", **_: Any) -> Any:
    """Names the collectives of the gradient of attention."""
    if method == "ulysses":
        return [t.all_to_all(x, _HEADS, _SEQUENCE) for x in ("query", key, value)]
    gathered = t.all_gather(key, _SEQUENCE), t.all_gather(value, _SEQUENCE)
    return [t.reduce_scatter(x, _SEQUENCE) for x in gathered]


_HEADS, _SEQUENCE = 1, 2  # dimensions
declare(
    Op(
        name=_FORWARD,
        types=attention_types,
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
        types=types_of_gradient,
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
