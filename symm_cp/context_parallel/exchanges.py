"""Exchanges a sequence for heads, and back, for direct use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import torch

from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.common import rank_in
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.heads.exchange_heads import OP
from symm_cp.ops.heads.normed_projection import PROJECT_NORMED
from symm_cp.ops.heads.projection import COLLECT, PROJECT
from symm_cp.ops.tensor_checks import missing_memory
from symm_cp.runtime.exchange import exchanged
from symm_cp.tensors.shards import Split

#: The heads of each rank: consecutive with the sizes of a `Split`, or any ranges (begin, end).
Heads: TypeAlias = Split | Sequence[tuple[int, int]]
Tensors: TypeAlias = Sequence[torch.Tensor]
#: Cosines and sines of each position and feature.
Rope: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@overload
def sequence_to_heads(
    x: torch.Tensor,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | None = None,
) -> torch.Tensor: ...
@overload
def sequence_to_heads(
    x: Tensors,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Sequence[Heads] | None = None,
) -> tuple[torch.Tensor, ...]: ...
@entry_point(OP, {"tensors": "x"}, to_heads=True)
def sequence_to_heads(
    x: torch.Tensor | Tensors,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | Sequence[Heads] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Exchanges part of the heads for the positions of all ranks.

    Same result as, for shards cut by `load_balancer`::

        whole = all_gather_tensor(x, 2, group)[:, :, load_balancer.inverse()]
        begin, end = heads[rank]
        whole[:, begin:end]

    Args:
        x: (B, H, s, E), this rank's part of a sequence with all heads; or several such tensors of
            one length, dtype and device (such as queries, keys and values), sent together.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        load_balancer: how the sequence is spread; by default rank r holds the r-th of W parts.
        heads: a `symm_cp.tensors.shards.Split` of the heads, or for each rank a range (begin, end),
            end exclusive; ranges may overlap and may be empty. By default each rank has H / W
            heads. For several tensors, one of these for each tensor.

    Any dtype and strides. Returns contiguous tensors of shape (B, h, S, E), in sequence order.
    Differentiable, any number of times: the gradient is `heads_to_sequence`. Raises `ValueError` or
    `TypeError` for invalid arguments, before any communication; `RuntimeError` if a peer fails or
    disagrees. Source: DeepSpeed-Ulysses (Jacobs et al., 2023).
    """
    return _exchange(True, x, group, load_balancer, heads)


@overload
def heads_to_sequence(
    x: torch.Tensor,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | None = None,
) -> torch.Tensor: ...
@overload
def heads_to_sequence(
    x: Tensors,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Sequence[Heads] | None = None,
) -> tuple[torch.Tensor, ...]: ...
@entry_point(OP, {"tensors": "x"}, to_heads=False)
def heads_to_sequence(
    x: torch.Tensor | Tensors,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | Sequence[Heads] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Exchanges part of the positions for the heads of all ranks.

    Same result as, for shards cut by `load_balancer`::

        whole = x.new_zeros(B, H, S, E)
        whole[:, begin:end] = x  # with begin, end = heads[rank]
        all_reduce(whole, group)
        whole[:, :, load_balancer.positions(rank)]

    Args:
        x: (B, h, S, E), this rank's heads of the whole sequence in sequence order; or several such
            tensors of one length, dtype and device, sent together.
        group, load_balancer, heads: as for `sequence_to_heads`.

    Returns tensors of shape (B, H, s, E) in which all heads of a position are contiguous, as output
    projections require. Heads that several ranks hold are added, in rank order, in float32 for
    16-bit types. Differentiable, any number of times: the gradient is `sequence_to_heads`. Dtypes
    and errors as for that. Source: DeepSpeed-Ulysses (Jacobs et al., 2023).
    """
    return _exchange(False, x, group, load_balancer, heads)


@overload
def ulysses_projection(
    x: torch.Tensor,
    weights: torch.Tensor,
    *,
    features: int,
    group: GroupLike,
    biases: torch.Tensor | None = None,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | None = None,
    norms: torch.Tensor | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    rotated: bool | None = None,
) -> torch.Tensor: ...
@overload
def ulysses_projection(
    x: torch.Tensor,
    weights: Tensors,
    *,
    features: int,
    group: GroupLike,
    biases: Tensors | None = None,
    load_balancer: LoadBalancer | None = None,
    heads: Sequence[Heads] | None = None,
    norms: Sequence[torch.Tensor | None] | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    rotated: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, ...]: ...
@entry_point(PROJECT, {PROJECT_NORMED: "ulysses_projection"})
def ulysses_projection(
    x: torch.Tensor,
    weights: torch.Tensor | Tensors,
    *,
    features: int,
    group: GroupLike,
    biases: torch.Tensor | Tensors | None = None,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | Sequence[Heads] | None = None,
    norms: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    rotated: bool | Sequence[bool] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Projects a sequence to heads, and sends each rank its heads as soon as they are multiplied.

    Same result as, for each weight::

        projected = (x @ weight + bias).unflatten(2, (-1, features)).transpose(1, 2)
        projected = F.rms_norm(projected, (features,), norm, eps)  # if it has a norm
        first, second = projected.chunk(2, -1)  # if it is rotated
        projected = projected * cos + torch.cat([-second, first], -1) * sin
        sequence_to_heads(projected, group=group, load_balancer=load_balancer, heads=heads)

    Args:
        x: (B, s, D), this rank's part of a sequence.
        weights: a (D, H * E) matrix (the transposed weight of a `Linear`) or several, as for
            queries, keys and values.
        features: E, the features of a head.
        biases: (H * E,) for each matrix.
        group, load_balancer, heads: as for `sequence_to_heads`.
        norms: (E,), the weight of an RMSNorm over the features of each head, or None, for each
            matrix; as for queries and keys of Qwen3.
        eps: of the norms.
        rope: cosines and sines for the positions of this rank's part, (s, E) or (B, s, E).
        rotated: for each matrix, whether its heads are rotated by `rope`.

    Returns a contiguous tensor of shape (B, h, S, E) for each matrix. Differentiable, any number of
    times, or once with `norms` or `rope` (which has no gradient); the gradient of a bias, a weight
    or a norm is this rank's part, to be summed over ranks. Autocast as for matmuls. Errors as for
    `sequence_to_heads`. Source: DeepSpeed-Ulysses (Jacobs et al., 2023), torch's
    `_pipelined_produce_and_all2all`; for norms and rope, FlashInfer's `fused_qk_norm_rope`.
    """
    name = group_name(group)
    one = isinstance(weights, torch.Tensor)
    matrices = _listed(PROJECT, "weights", weights)
    added = [] if biases is None else _listed(PROJECT, "biases", biases)
    by_tensor: Any = [heads] if one and heads is not None else heads
    options = _options(PROJECT, name, len(matrices), load_balancer, by_tensor)
    if norms is None and rope is None and rotated is None:
        results = direct(PROJECT)(x, matrices, added, features, name, *options)
    else:
        shaping = _shaping(len(matrices), norms, eps, rope, rotated)
        results, _ = direct(PROJECT_NORMED)(x, matrices, added, features, *shaping, name, *options)
    return results[0] if one else tuple(results)


def _shaping(
    matrices: int,
    norms: torch.Tensor | Sequence[torch.Tensor | None] | None,
    eps: float,
    rope: Rope | None,
    rotated: bool | Sequence[bool] | None,
) -> list[Any]:
    """Returns the arguments of `_project_normed_to_heads` after `features`."""
    if norms is None or isinstance(norms, torch.Tensor):
        norms = [norms] * matrices
    by_matrix: list[Any] = [*norms]
    turned = [bool(rotated)] * matrices if not isinstance(rotated, Sequence) else [*rotated]
    for what, given in (("norms", by_matrix), ("rotated", turned)):
        if len(given) != matrices:
            raise ValueError(
                f"{PROJECT}: {what} has {len(given)} entries for {matrices} matrices, must have "
                "one for each"
            )
    for index, norm in enumerate(by_matrix):
        if norm is not None and not isinstance(norm, torch.Tensor):
            raise TypeError(f"{PROJECT}: norms[{index}] is {norm!r}, must be a tensor or None")
    cos, sin = (None, None) if rope is None else rope
    if (rope is None) == any(turned):
        raise ValueError(
            f"{PROJECT}: rope and {rotated=} must be given together: which matrices' heads rotate"
        )
    for table, at in ((cos, "cos"), (sin, "sin")):
        if table is not None and table.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{PROJECT}: {at} of rope has no gradient: detach it")
    given_norms = [norm for norm in by_matrix if norm is not None]
    return [given_norms, [n is not None for n in by_matrix], eps, cos, sin, turned]


@entry_point(COLLECT, {"tensors": "x", "weights": "weight"})
def ulysses_output_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: GroupLike,
    bias: torch.Tensor | None = None,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | None = None,
) -> torch.Tensor:
    """Projects the heads of all ranks, each head as soon as it has arrived.

    Same result as::

        local = heads_to_sequence(x, group=group, load_balancer=load_balancer, heads=heads)
        local.transpose(1, 2).flatten(2) @ weight + bias

    Args:
        x: (B, h, S, E), this rank's heads of the whole sequence in sequence order.
        weight: (H * E, D), the transposed weight of a `Linear`.
        bias: (D,).
        group, load_balancer, heads: as for `heads_to_sequence`.

    Returns (B, s, D). Products of heads are added in float32 for 16-bit types. Differentiable, any
    number of times; the gradient of the weight is this rank's part, to be summed over ranks.
    Autocast as for matmuls. Errors and source as for `ulysses_projection`.
    """
    name = group_name(group)
    by_tensor = None if heads is None else [heads]
    options = _options(COLLECT, name, 1, load_balancer, by_tensor)
    _check_bias(x, weight, bias)
    out, _ = direct(COLLECT)([x], [weight], name, *options)
    if bias is None:
        return out
    if torch.compiler.is_compiling():
        return out + bias.to(out.dtype)
    with exchanged():
        return out + bias.to(out.dtype)


def _exchange(
    to_heads: bool,
    x: torch.Tensor | Tensors,
    group: GroupLike,
    load_balancer: LoadBalancer | None,
    heads: Heads | Sequence[Heads] | None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    name, one, tensors = group_name(group), isinstance(x, torch.Tensor), _listed(OP, "x", x)
    by_tensor: Any = [heads] if one and heads is not None else heads
    options = _options(OP, name, len(tensors), load_balancer, by_tensor)
    results = direct("exchange_heads")(tensors, to_heads, name, *options)
    return results[0] if one else tuple(results)


def _listed(op: str, argument: str, given: torch.Tensor | Tensors) -> list[torch.Tensor]:
    tensors = [given] if isinstance(given, torch.Tensor) else given
    if not isinstance(tensors, Sequence):
        raise TypeError(f"{op}: {argument}={given!r} must be a tensor or a sequence of tensors")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {argument}[{index}] is {tensor!r}, must be a tensor")
    return list(tensors)


def _check_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None or weight.dim() != 2:  # the op raises for the weight
        return
    ordinary = type(bias) in (torch.Tensor, torch.nn.Parameter)
    if ordinary and not torch.compiler.is_compiling() and (missing := missing_memory(bias)):
        raise ValueError(f"{COLLECT}: bias {missing}")
    if bias.shape != weight.shape[1:]:
        raise ValueError(
            f"{COLLECT}: bias has shape {list(bias.shape)}, must be [{weight.shape[1]}]: one "
            "number for each column of weight"
        )
    device = x.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if (bias.dtype != x.dtype and not cast) or bias.device != x.device:
        raise TypeError(
            f"{COLLECT}: bias is {bias.dtype} on {bias.device}, x {x.dtype} on {x.device}: they "
            "must agree"
        )


def _options(
    op: str,
    group: str,
    tensors: int,
    load_balancer: LoadBalancer | None,
    heads: Sequence[Heads] | None,
) -> list[Any]:
    """Returns the last arguments of the op."""
    options: list[Any] = [None, None, None, None]
    if tensors == 0:
        raise ValueError(f"{op}: there must be at least one tensor, none is given")
    if heads is not None:
        options[0] = _head_ranges(op, tensors, heads)
    if load_balancer is not None:
        if not hasattr(load_balancer, "chunk_order"):
            raise TypeError(f"{op}: {load_balancer=} must be a LoadBalancer")
        options[1:3] = load_balancer.chunk_order, load_balancer.chunk_lengths
    if heads is not None or load_balancer is not None:
        options[3] = rank_in(group)
    return options


def _head_ranges(op: str, tensors: int, heads: Sequence[Heads]) -> list[int]:
    """Returns the range (begin, end) of each rank's heads, of every tensor, as one list."""
    if not isinstance(heads, Sequence) or isinstance(heads, str):
        raise TypeError(f"{op}: {heads=} must be a Split or a sequence of ranges")
    if len(heads) != tensors:
        raise ValueError(
            f"{op}: heads has {len(heads)} entries for {tensors} tensors, must have one for each"
        )
    return [number for each in heads for number in _range_numbers(op, each)]


def _range_numbers(op: str, heads: Heads) -> list[int]:
    if isinstance(heads, Split):
        ranks = range(len(heads.sizes))
        return [n for r in ranks for n in (heads.start(r), heads.start(r) + heads.sizes[r])]
    pairs = isinstance(heads, Sequence) and all(isinstance(each, Sequence) for each in heads)
    whole = pairs and all(isinstance(n, int | torch.SymInt) for each in heads for n in each)
    if not whole or any(len(each) != 2 for each in heads):
        raise TypeError(
            f"{op}: {heads=} must be a Split, or for each rank a range of heads (begin, end)"
        )
    return [number for each in heads for number in each]
