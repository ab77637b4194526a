"""Attention of one rank's queries to the keys of a group, and its gradients, given the spec.

Shapes: query (B, H, S_q, E), key (B, G, S_k, E) and value (B, G, S_k, V), this rank's shards; H, G
and the lengths count heads and positions after an exchange of heads, if there is one. Without a
group, this rank holds all keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from symm_cp.group.memory import Group
from symm_cp.ops.attention import together
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.pipeline import Grad, Tensors, consume_keys, reduce_gradients
from symm_cp.ops.attention.scoring import ScoredTiles
from symm_cp.ops.attention.spec import AttentionSpec, value_features_of
from symm_cp.ops.attention.tiles import Backward, Forward, as_dtype, dense_features
from symm_cp.schedule.tiles import most_parts


class ScoreTerms(NamedTuple):
    """Learnt tensors that a call adds to scores: sinks (H,) and a bias by distance (H, D)."""

    sinks: Grad = None
    bias: Grad = None


class AttentionInputs(NamedTuple):
    """Inputs of a backward pass: query, key and value, the results, and their gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: Grad


def attend(
    op: str,
    spec: AttentionSpec,
    group: Group | None,
    tensors: Tensors,
    terms: ScoreTerms,
    *,
    at_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and its log-sum-exp. `tensors` are query, key and value. Collective.

    `at_once`: attends to the keys of all peers together.
    """
    query, key, value = tensors
    rank, ranks = place_of(group)
    if at_once:
        tiles = together.tiles_of(spec, rank, query.shape[2])
    else:
        tiles = tuple(spec.tiles(rank, owner, query.shape[2]) for owner in range(ranks))
    query, parts = dense_features(query), most_parts([tile for some in tiles for tile in some])
    scored = ScoredTiles.of(query, spec, rank, terms.bias)
    forward = Forward(query, spec, parts, sinks=terms.sinks, scored=scored)

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        first = 0 if at_once else spec.first_sent(rank, owner, tiles[owner])
        for tile in tiles[owner]:
            forward.add(tile, shards[0], shards[1], owner, first)

    if at_once:
        assert group is not None
        together.consume_keys(op, spec, group, key, value, consume)
    else:
        consume_keys(op, spec, group, key, value, consume)
    return forward.result()


def attend_backward(
    op: str,
    spec: AttentionSpec,
    group: Group | None,
    inputs: AttentionInputs,
    terms: ScoreTerms,
    wide_keys: bool = False,
    bias_grad: bool = True,
    *,
    at_once: bool = False,
) -> tuple[Tensors, Grad]:
    """Returns the gradients of query, key and value, and of the bias if wanted. Collective.

    With `wide_keys` the gradients of keys and values are not rounded to their dtype. `at_once`: as
    in `attend`.
    """
    E, V = inputs.query.shape[3], inputs.value.shape[3]
    key_dtype = inputs.key.dtype
    rank, _ = place_of(group)
    inputs = inputs._replace(query=dense_features(inputs.query))
    scored = ScoredTiles.of(inputs.query, spec, rank, terms.bias)
    if inputs.grad_lse is not None and scored is None:
        spec, inputs = _with_grad_lse(spec, inputs)
    query, key, value, out, lse, grad_out, grad_lse = inputs
    rows = query.shape[2]
    bias = terms.bias if bias_grad else None
    backward = Backward(
        grad_out, query, out, lse, spec, scored=scored, grad_lse=grad_lse, bias=bias
    )

    def consume(shards: list[torch.Tensor], owner: int, partials: Tensors) -> None:
        if at_once:
            tiles, first = together.tiles_of(spec, rank, rows)[owner], 0
        else:
            tiles = spec.tiles(rank, owner, rows)
            first = spec.first_sent(rank, owner, tiles)
        backward.add_tiles(tiles, shards[0], shards[1], partials, owner, first)

    if at_once:
        assert group is not None
        of_keys = together.reduce_gradients(op, spec, group, key, value, consume)
    else:
        of_keys = reduce_gradients(op, spec, group, key, value, consume)
    if not wide_keys:
        of_keys = tuple(as_dtype(grad, key_dtype) for grad in of_keys)
    grads = zip((backward.grad_query(), *of_keys), (E, E, V), strict=True)
    of_bias = None if bias is None else backward.grad_bias(bias)
    return tuple(grad[..., :features] for grad, features in grads), of_bias


def place_of(group: Group | None) -> tuple[int, int]:
    """Returns this rank and the number of ranks that gather keys."""
    return (0, 1) if group is None else (group.rank, group.world_size)


def _with_grad_lse(
    spec: AttentionSpec, inputs: AttentionInputs
) -> tuple[AttentionSpec, AttentionInputs]:
    """Returns inputs that make torch's kernels add the gradient of the log-sum-exp.

    Their gradient of a score is weight * (grad_out . v - grad_out . out). One more feature, 0 in v,
    1 in grad_out and -grad_lse in out, adds weight * grad_lse.
    """
    query, key, value, out, lse, grad_out, grad_lse = inputs
    assert grad_lse is not None
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
    return spec, AttentionInputs(query, key, value, out, lse, grad_out, None)
