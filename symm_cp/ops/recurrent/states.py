"""The states around the chunks of a recurrence, which ranks pass on while they are computed.

Shapes: R rows that are independent of each other, N chunks of C positions of this rank, K and V
features. A chunk takes the state S_i to S_{i+1} = d_i S_i + k_i^T (u_i - w_i S_i); a recurrence
without `erased` w to d_i S_i + k_i^T u_i. The states form a chain over all chunks of all ranks,
which is computed once and not twice: ranks work on different rows at the same time, and pass the
states of a row on to the next rank (`Runtime.relay`). With P pieces and W ranks the chain takes
P + W - 1 steps instead of P.

A decay d_i is one number for a row and chunk, or one for each feature of its keys.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.ops import autocast
from symm_cp.ops.common import group_of, what_is, world_size_of
from symm_cp.ops.op import LEFT_TO_TORCH, Gradient, NoGradient, Op, arguments, declare
from symm_cp.ops.recurrent.scan import pieces_of
from symm_cp.tensors.results import contiguous, new_result

_STATES = "_delta_rule_states"
_GRADS = "_delta_rule_grads"


def _check_rows(
    op: str, keys: torch.Tensor, erased: torch.Tensor | None, decay: torch.Tensor
) -> None:
    decays = (keys.shape[:2], (*keys.shape[:2], keys.shape[-1]))
    shape = keys.shape if erased is None else erased.shape
    if keys.dim() != 4 or shape != keys.shape or decay.shape not in decays:
        raise ValueError(
            f"{op}: keys {list(keys.shape)} must be (R, N, C, K), erased {list(shape)} the "
            f"same and decay {list(decay.shape)} (R, N) or (R, N, K)"
        )


def _for_states(decay: torch.Tensor) -> torch.Tensor:
    """(R, N) or (R, N, K) as factors of states, (R, N, 1 or K, 1)."""
    return decay[..., None] if decay.dim() == 3 else decay[..., None, None]


def _states_kernel(
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    values: torch.Tensor,
    decay: torch.Tensor,
    documents: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chunks' writes, (R, N, C, V), and the states around them, (R, N + 1, K, V).

    `documents`: what must be equal on all ranks, of integers; compared where the host can read it.
    """
    group = group_of(group_name)
    _check_rows(_STATES, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    width = values.shape[-1]
    keys, values, decay = (contiguous(t) for t in (keys, values, decay))
    erasing = None if erased is None else contiguous(erased)
    written = new_result(values, values.shape)
    states = new_result(values, (rows, chunks + 1, features, width))
    split = pieces_of(rows)
    taken, decay = keys.transpose(-1, -2), _for_states(decay)

    def step(piece: int, received: torch.Tensor | None, passed: torch.Tensor | None) -> None:
        k, u, d, v, s = (
            split.of(piece, t).unbind(1) for t in (taken, values, decay, written, states)
        )
        w = None if erasing is None else split.of(piece, erasing).unbind(1)
        if received is None:
            s[0].zero_()
        else:
            s[0].copy_(received)
        for i in range(chunks):
            v[i].copy_(u[i] if w is None else torch.baddbmm(u[i], w[i], s[i], alpha=-1))
            s[i + 1].copy_(torch.baddbmm(s[i] * d[i], k[i], v[i]))
        if passed is not None:
            passed.copy_(s[chunks])

    # Ranks may have different numbers of chunks.
    erases = erased is not None
    detail = f"{rows=} {features=} {width=} {erases=}"
    if documents is not None and documents.device.type == "cpu":
        detail += f" documents #{zlib.crc32(documents.numpy().tobytes()):08x}"
    name = what_is(_STATES, values.new_empty(0), detail=detail)
    shapes = [(size, features, width) for size in split.sizes]
    runtime.of(values, group).relay(group, step, values, shapes, name)
    return written, states


def _grads_kernel(
    grad_written: torch.Tensor,
    grad_states: torch.Tensor,
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    decay: torch.Tensor,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total gradients of the chunks' writes, and of the states after the chunks."""
    group = group_of(group_name)
    _check_rows(_GRADS, keys, erased, decay)
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

    def step(piece: int, received: torch.Tensor | None, passed: torch.Tensor | None) -> None:
        k, d, dv, ds, v, s = (
            split.of(piece, t).unbind(1)
            for t in (keys, decay, grad_written, grad_states, total_written, totals)
        )
        w = None if erasing is None else split.of(piece, erasing).unbind(1)
        total = ds[chunks] if received is None else ds[chunks] + received
        for i in reversed(range(chunks)):
            s[i].copy_(total)
            v[i].copy_(torch.baddbmm(dv[i], k[i], total))
            total = torch.addcmul(ds[i], total, d[i])
            if w is not None:
                total = torch.baddbmm(total, w[i], v[i], alpha=-1)
        if passed is not None:
            passed.copy_(total)

    name = what_is(_GRADS, grad_states.new_empty(0), detail=f"{rows=} {features=} {width=}")
    shapes = [(size, features, width) for size in split.sizes]
    runtime.of(grad_states, group).relay(group, step, grad_states, shapes, name, reverse=True)
    return total_written, totals


def _states_fake(
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    values: torch.Tensor,
    decay: torch.Tensor,
    documents: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size_of(group_name)
    _check_rows(_STATES, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    states = values.new_empty((rows, chunks + 1, features, values.shape[-1]))
    return values.new_empty(values.shape), states


def _grads_fake(
    grad_written: torch.Tensor,
    grad_states: torch.Tensor,
    keys: torch.Tensor,
    erased: torch.Tensor | None,
    decay: torch.Tensor,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size_of(group_name)
    _check_rows(_GRADS, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    totals = grad_states.new_empty((rows, chunks, features, grad_written.shape[-1]))
    return grad_written.new_empty(grad_written.shape), totals


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    keys, erased, _, decay, _, ctx.group_name = inputs
    ctx.save_for_backward(keys, erased, decay, *output)


def _backward(
    ctx: Any, grad_written: torch.Tensor, grad_states: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    keys, erased, decay, written, states = ctx.saved_tensors
    total_written, totals = torch.ops.symm_mem._delta_rule_grads(
        grad_written, grad_states, keys, erased, decay, ctx.group_name
    )
    before = states[:, :-1]
    grad_keys = written @ totals.transpose(-1, -2)
    grad_erased = None if erased is None else -(total_written @ before.transpose(-1, -2))
    grad_decay = (totals * before).sum(-1 if decay.dim() == 3 else (-1, -2))
    return grad_keys, grad_erased, total_written, grad_decay, None, None


declare(
    Op(
        name=_STATES,
        schema=(
            "(Tensor keys, Tensor? erased, Tensor values, Tensor decay, Tensor? documents, "
            "str group_name) -> (Tensor, Tensor)"
        ),
        kernel=_states_kernel,
        fake=_states_fake,
        gradient=Gradient(_backward, _setup),  # once differentiable
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 6), on.rand(2, 3), None,
            on.group_name,
        ),
        internal=True,
    ),
    Op(
        name=_GRADS,
        schema=(
            "(Tensor grad_written, Tensor grad_states, Tensor keys, Tensor? erased, Tensor decay, "
            "str group_name) -> (Tensor, Tensor)"
        ),
        kernel=_grads_kernel,
        fake=_grads_fake,
        gradient=NoGradient(
            "second derivatives of gated_delta_rule and gated_linear_attention are not supported"
        ),
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 3, 4, 6), on.rand(2, 4, 5, 6), on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 5),
            on.rand(2, 3), on.group_name,
        ),
        internal=True,
    ),
)  # fmt: skip
