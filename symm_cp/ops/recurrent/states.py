"""The states around the chunks of a recurrence, which ranks compute and pass on in a pipeline.

Shapes: R rows that are independent of each other, N chunks of C positions of this rank, K and V
features. A chunk takes the state S_i to S_{i+1} = d_i S_i + k_i^T (u_i - w_i S_i); a recurrence
without `erased` (w) to d_i S_i + k_i^T u_i. The states form a chain over all chunks of all ranks,
which is computed once, not twice: ranks work on different rows at the same time, and pass the
states of a row on to the next rank (runtime/relay.py). With P pieces and W ranks the chain takes
P + W - 1 steps instead of P.

The chunks of a rank belong to F fragments, and the chain passes the ranks in F sweeps
(fragments.py): `counts` are the fragments' numbers of chunks. A fragment has one more state than
chunks, so there are N + F states.

A decay d_i is one number for a row and chunk, or one for each feature of its keys.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from symm_cp.ops import autocast
from symm_cp.ops.common import call_signature, group_of, world_size_of
from symm_cp.ops.op import LEFT_TO_TORCH, Gradient, NoGradient, Op, arguments, declare
from symm_cp.ops.recurrent.scan import pieces_of
from symm_cp.runtime.relay import relay
from symm_cp.tensors.results import contiguous, new_result

_STATES = "_delta_rule_states"
_GRADS = "_delta_rule_grads"


def before_chunks(states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the states before the chunks, (R, N, K, V), from the states around them."""
    if len(counts) == 1:
        return states[:, :-1]
    parts = states.split([count + 1 for count in counts], 1)
    return torch.cat([part[:, :-1] for part in parts], 1)


def _check_rows(
    op: str,
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    decay: torch.Tensor,
    counts: Sequence[int],
) -> None:
    decays = (keys.shape[:2], (*keys.shape[:2], keys.shape[-1]))
    shape = keys.shape if erased is None else erased.shape
    if keys.dim() != 4 or shape != keys.shape or decay.shape not in decays:
        raise ValueError(
            f"{op}: keys {list(keys.shape)} must be (R, N, C, K), erased {list(shape)} the "
            f"same and decay {list(decay.shape)} (R, N) or (R, N, K)"
        )
    if not counts or sum(counts) != keys.shape[1]:
        raise ValueError(f"{op}: counts={list(counts)} must add up to {keys.shape[1]} chunks")


def _bounds(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns each fragment's number, its first chunk, and the chunk after its last."""
    ends = list(itertools.accumulate(counts))
    return [(i, end - n, end) for i, (n, end) in enumerate(zip(counts, ends, strict=True))]


def _for_states(decay: torch.Tensor) -> torch.Tensor:
    """(R, N) or (R, N, K) as factors of states, (R, N, 1 or K, 1)."""
    return decay[..., None] if decay.dim() == 3 else decay[..., None, None]


def _states_kernel(
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    values: torch.Tensor,
    decay: torch.Tensor,
    agreed: torch.Tensor | None,
    counts: list[int],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chunks' writes, (R, N, C, V), and the states around them, (R, N + F, K, V).

    `agreed`: integers that must be equal on all ranks; compared if the host can read them.
    """
    group = group_of(group_name)
    _check_rows(_STATES, keys, erased, decay, counts)
    rows, chunks, _, features = keys.shape
    width = values.shape[-1]
    keys, values, decay = (contiguous(t) for t in (keys, values, decay))
    erasing = None if erased is None else contiguous(erased)
    written = new_result(values, values.shape)
    states = new_result(values, (rows, chunks + len(counts), features, width))
    split = pieces_of(rows)
    taken, decay = keys.transpose(-1, -2), _for_states(decay)

    def step(
        fragment: tuple[int, int, int],
        piece: int,
        received: torch.Tensor | None,
        passed: torch.Tensor | None,
    ) -> None:
        number, begin, end = fragment
        k, u, d, v, s = (
            split.of(piece, t).unbind(1) for t in (taken, values, decay, written, states)
        )
        w = None if erasing is None else split.of(piece, erasing).unbind(1)
        first = s[begin + number]
        if received is not None:
            first.copy_(received)
        elif number == 0:
            first.zero_()
        else:  # the sweep before ended on this rank
            first.copy_(s[begin + number - 1])
        for i in range(begin, end):
            now, after = s[i + number], s[i + number + 1]
            v[i].copy_(u[i] if w is None else torch.baddbmm(u[i], w[i], now, alpha=-1))
            after.copy_(torch.baddbmm(now * d[i], k[i], v[i]))
        if passed is not None:
            passed.copy_(s[end + number])

    # Ranks may have different numbers of chunks.
    erases = erased is not None
    detail = f"{rows=} {features=} {width=} {erases=} sweeps={len(counts)}"
    if agreed is not None and agreed.device.type == "cpu":
        detail += f" documents and layout #{zlib.crc32(agreed.numpy().tobytes()):08x}"
    name = call_signature(_STATES, values.new_empty(0), detail=detail)
    shapes = [(size, features, width) for size in split.sizes]
    for each in _bounds(counts):
        relay(group, partial(step, each), values, shapes, name, reverse=each[0] % 2 == 1)
    return written, states


def _grads_kernel(
    grad_written: torch.Tensor,
    grad_states: torch.Tensor,
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    decay: torch.Tensor,
    counts: list[int],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total gradients of the chunks' writes, and of the states after the chunks."""
    group = group_of(group_name)
    _check_rows(_GRADS, keys, erased, decay, counts)
    rows, chunks, _, features = keys.shape
    width = grad_written.shape[-1]
    grad_written, grad_states, keys, decay = (
        contiguous(t) for t in (grad_written, grad_states, keys, decay)
    )
    total_written = new_result(grad_written, grad_written.shape)
    totals = new_result(grad_states, (rows, chunks, features, width))
    split = pieces_of(rows)
    erasing = None if erased is None else contiguous(erased).transpose(-1, -2)
    decay = _for_states(decay)

    begun: dict[int, torch.Tensor] = {}  # totals of the next sweep, on the rank where it began

    def step(
        fragment: tuple[int, int, int],
        piece: int,
        received: torch.Tensor | None,
        passed: torch.Tensor | None,
    ) -> None:
        number, begin, end = fragment
        k, d, dv, ds, v, s = (
            split.of(piece, t).unbind(1)
            for t in (keys, decay, grad_written, grad_states, total_written, totals)
        )
        w = None if erasing is None else split.of(piece, erasing).unbind(1)
        total = ds[end + number]
        later = begun.pop(piece, None) if received is None else received
        if later is not None:
            total = total + later
        for i in reversed(range(begin, end)):
            s[i].copy_(total)
            v[i].copy_(torch.baddbmm(dv[i], k[i], total))
            total = torch.addcmul(ds[i + number], total, d[i])
            if w is not None:
                total = torch.baddbmm(total, w[i], v[i], alpha=-1)
        if passed is None:
            begun[piece] = total
        else:
            passed.copy_(total)

    detail = f"{rows=} {features=} {width=} sweeps={len(counts)}"
    name = call_signature(_GRADS, grad_states.new_empty(0), detail=detail)
    shapes = [(size, features, width) for size in split.sizes]
    for each in reversed(_bounds(counts)):
        relay(group, partial(step, each), grad_states, shapes, name, reverse=each[0] % 2 == 0)
    return total_written, totals


def _states_fake(
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    values: torch.Tensor,
    decay: torch.Tensor,
    agreed: torch.Tensor | None,
    counts: list[int],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size_of(group_name)
    _check_rows(_STATES, keys, erased, decay, counts)
    rows, chunks, _, features = keys.shape
    states = values.new_empty((rows, chunks + len(counts), features, values.shape[-1]))
    return values.new_empty(values.shape), states


def _grads_fake(
    grad_written: torch.Tensor,
    grad_states: torch.Tensor,
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    decay: torch.Tensor,
    counts: list[int],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size_of(group_name)
    _check_rows(_GRADS, keys, erased, decay, counts)
    rows, chunks, _, features = keys.shape
    totals = grad_states.new_empty((rows, chunks, features, grad_written.shape[-1]))
    return grad_written.new_empty(grad_written.shape), totals


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    keys, erased, _, decay, _, ctx.counts, ctx.group_name = inputs
    ctx.save_for_backward(keys, erased, decay, *output)


def _backward(
    ctx: Any, grad_written: torch.Tensor, grad_states: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    keys, erased, decay, written, states = ctx.saved_tensors
    total_written, totals = torch.ops.symm_mem._delta_rule_grads(
        grad_written, grad_states, keys, erased, decay, ctx.counts, ctx.group_name
    )
    before = before_chunks(states, ctx.counts)
    grad_keys = written @ totals.transpose(-1, -2)
    grad_erased = None if erased is None else -(total_written @ before.transpose(-1, -2))
    grad_decay = (totals * before).sum(-1 if decay.dim() == 3 else (-1, -2))
    return grad_keys, grad_erased, total_written, grad_decay, None, None, None


_COLLECTIVE = "all_gather_into_tensor"


def _types(t: Any, keys: Any, erased: Any, values: Any, decay: Any, **rest: Any) -> Any:
    t.ignore(erased, decay, rest)
    keys = t.varying("{}", "bc_k->bc_k", keys, _COLLECTIVE)
    written = t.local("states({}, {})", "bc_k,bc_v->bc_v", keys, values)
    return written, t.local("", "bc_k,bc_v->b_kv", keys, values)


declare(
    Op(
        name=_STATES,
        types=_types,
        schema=(
            "(Tensor keys, Tensor? erased, Tensor values, Tensor decay, Tensor? agreed, "
            "SymInt[] counts, str group_name) -> (Tensor, Tensor)"
        ),
        kernel=_states_kernel,
        fake=_states_fake,
        gradient=Gradient(_backward, _setup),  # once differentiable
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 6), on.rand(2, 3), None,
            [2, 1], on.group_name,
        ),
        internal=True,
    ),
    Op(
        name=_GRADS,
        types=lambda t, grad_states, **_: t.varying("{}", "...->...", grad_states, _COLLECTIVE),
        schema=(
            "(Tensor grad_written, Tensor grad_states, Tensor keys, Tensor? erased, Tensor decay, "
            "SymInt[] counts, str group_name) -> (Tensor, Tensor)"
        ),
        kernel=_grads_kernel,
        fake=_grads_fake,
        gradient=NoGradient(
            "second derivatives of gated_delta_rule and gated_linear_attention are not supported"
        ),
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 3, 4, 6), on.rand(2, 5, 5, 6), on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 5),
            on.rand(2, 3), [2, 1], on.group_name,
        ),
        internal=True,
    ),
)  # fmt: skip
