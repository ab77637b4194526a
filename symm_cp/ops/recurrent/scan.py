"""Scans over ranks of the states of recurrent layers, which decay, or are multiplied by a matrix.

A rank's part of a sequence takes a state h to T h + S, where T is its transition (a decay of each
element, or a matrix) and S its last state if it begins with zeros. The state that a rank begins
with follows from the ranks before it. Ranks form a chain and pass states on in pieces
(runtime/relay.py): no rank computes more than one product T h, and none receives other ranks' T.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import call_signature, group_of, world_size_of
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.op import ONE_BY_ONE, Gradient, Op, arguments, declare
from symm_cp.runtime.relay import relay
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split

_OP = "scan_states"
# The least bytes of a piece of the chain: signals of smaller pieces cost more than overlap saves.
_PIECE_BYTES = 1 << 16
_MOST_PIECES = 16


def _check(state: torch.Tensor, transition: torch.Tensor, matrices: bool) -> None:
    name = "transition" if matrices else "decay"
    if not (state.dtype.is_floating_point or state.dtype.is_complex) or state.dtype.itemsize < 2:
        raise TypeError(
            f"{_OP}: state is {state.dtype}, must be complex or a floating dtype of at least 16 "
            "bits"
        )
    if transition.dtype != state.dtype or transition.device != state.device:
        raise TypeError(
            f"{_OP}: {name} is {transition.dtype} on {transition.device}, state {state.dtype} on "
            f"{state.device}: they must agree"
        )
    if matrices:
        if state.dim() < 2:
            raise ValueError(
                f"{_OP}: state must be (..., K, V) with a transition, has shape {list(state.shape)}"
            )
        needed = [*state.shape[:-1], state.shape[-2]]
        if list(transition.shape) != needed:
            raise ValueError(
                f"{_OP}: transition {list(transition.shape)} must be {needed} for state "
                f"{list(state.shape)}"
            )
        return
    pairs = zip(transition.shape, state.shape, strict=False)
    if transition.dim() != state.dim() or not all(a in (1, b) for a, b in pairs):
        raise ValueError(
            f"{_OP}: decay {list(transition.shape)} must have the dimensions of state "
            f"{list(state.shape)}, each of the same length or 1"
        )


def pieces_of(rows: int, most: int = _MOST_PIECES) -> Split:
    """Divides independent rows into the pieces of a relay, at most `most`."""
    return Split.nearly_equal(rows, max(1, min(rows, _MOST_PIECES, most)))


def _kernel(
    state: torch.Tensor, transition: torch.Tensor, matrices: bool, reverse: bool, group_name: str
) -> torch.Tensor:
    group = group_of(group_name)
    _check(state, transition, matrices)
    # Rounds once, not on every rank that a state passes.
    dtype = wide(state.dtype)
    if matrices:
        rows: tuple[int, ...] = (math.prod(state.shape[:-2]), *state.shape[-2:])
    else:
        rows, transition = (state.numel(),), transition.expand(state.shape)
    own, factor = (
        contiguous(t.to(dtype)).view(rows[0], *t.shape[-2:] if matrices else ())
        for t in (state, transition)
    )
    result = new_result(own, rows)
    split = pieces_of(rows[0], result.numel() * dtype.itemsize // _PIECE_BYTES)
    states, factors, results = (split.parts(t) for t in (own, factor, result))

    def step(piece: int, received: torch.Tensor | None, passed: torch.Tensor | None) -> None:
        if received is None:
            results[piece].zero_()
        else:
            results[piece].copy_(received)
        if passed is None:
            return
        if received is None:
            passed.copy_(states[piece])
        elif matrices:
            torch.baddbmm(states[piece], factors[piece], results[piece], out=passed)
        else:
            torch.addcmul(states[piece], factors[piece], results[piece], out=passed)

    name = call_signature(_OP, state, detail=f"{matrices=} {reverse=}")
    shapes = [(size, *rows[1:]) for size in split.sizes]
    relay(group, step, own, shapes, name, reverse=reverse)
    return result.view(state.shape).to(state.dtype)


def _fake(
    state: torch.Tensor, transition: torch.Tensor, matrices: bool, reverse: bool, group_name: str
) -> torch.Tensor:
    world_size_of(group_name)  # raises unless the group exists
    _check(state, transition, matrices)
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, transition, *ctx.rest = inputs
    ctx.save_for_backward(transition, output)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    transition, begun = ctx.saved_tensors
    matrices, reverse, name = ctx.rest
    # A rank begins with T h + S of the rank before. So a scan from the other end, with the
    # transposed T, gives each rank the gradient of its T h + S.
    back = transition.mH if matrices else transition.conj()
    total = direct("scan_states")(grad, back, matrices, not reverse, name)
    if not ctx.needs_input_grad[1]:
        return total, None, None, None, None
    if matrices:
        return total, total @ begun.mH, None, None, None
    return total, (total * begun.conj()).sum_to_size(transition.shape), None, None, None


def _types(t: Any, state: Any, transition: Any, **_: Any) -> Any:
    t.ignore(transition)
    return t.varying("states before {}", "...->...", state, "all_gather_into_tensor")


declare(
    Op(
        name=_OP,
        types=_types,
        schema=(
            "(Tensor state, Tensor transition, bool matrices, bool reverse, str group_name)"
            " -> Tensor"
        ),
        kernel=_kernel,
        fake=_fake,
        gradient=Gradient(_backward, _setup),  # the scan from the other end
        autocast=autocast.as_they_are,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(2, 3, 4), on.rand(2, 3, 3), True, False, on.group_name
        ),
    )
)


@entry_point()
def scan_states(
    state: torch.Tensor,
    *,
    decay: torch.Tensor | None = None,
    transition: torch.Tensor | None = None,
    group: GroupLike,
    reverse: bool = False,
) -> torch.Tensor:
    """Returns the state with which this rank's part of a recurrence begins.

    Same result as::

        begin = torch.zeros_like(state)
        for r in range(rank):  # with reverse: for r in range(W - 1, rank, -1)
            S, T = state_of[r], transition_of[r]  # what rank r passed
            begin = T @ begin + S  # with decay: T * begin + S

    `state` is the state that a rank's part ends with if it begins with zeros; `decay` or
    `transition` is the factor by which the part multiplies the state that it begins with.

    Args:
        state: floating, of at least 16 bits, or complex; with `transition` (..., K, V). Equal
            shapes on all ranks.
        decay: factors of the elements of the state: the same number of dimensions, each of the
            state's length or 1 (linear attention with decay, Mamba 2).
        transition: matrices (..., K, K) that act on the state from the left (delta rules). Exactly
            one of the two.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        reverse: scan from the last rank to the first.

    Returns a contiguous tensor like `state`: zeros on the first rank. Computes in float32 for
    16-bit types, in one order, so results have the same bits in every run. Twice differentiable:
    the gradient is the scan from the other end. Raises `ValueError` or `TypeError` for arguments
    that do not fit, before any communication; `RuntimeError` when a peer fails or disagrees.
    """
    factor = transition if decay is None else decay
    if factor is None or (decay is not None and transition is not None):
        given = "neither" if factor is None else "both"
        raise ValueError(f"{_OP}: exactly one of decay and transition is needed, {given} is given")
    begun: torch.Tensor = direct("scan_states")(
        state, factor, decay is None, reverse, group_name(group)
    )
    return begun
