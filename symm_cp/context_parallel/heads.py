"""Exchanges a sequence for heads, and back, for direct use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import torch

from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.context_parallel.refusals import telling_peers
from symm_cp.memory import GroupLike, group_name
from symm_cp.ops.common import rank_in
from symm_cp.shards import Split

#: The heads of each rank: consecutive, of these sizes, or any ranges (first, one behind the last).
Heads: TypeAlias = Split | Sequence[tuple[int, int]]
Tensors: TypeAlias = Sequence[torch.Tensor]


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
def sequence_to_heads(
    x: torch.Tensor | Tensors,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | Sequence[Heads] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Gives up part of the heads for the positions of all ranks.

    Same result as, for shards cut by `load_balancer`::

        whole = all_gather_tensor(x, 2, group)[:, :, load_balancer.inverse()]
        begin, end = heads[rank]
        whole[:, begin:end]

    Args:
        x: (B, H, s, E), this rank's part of a sequence with all heads; or several such tensors of
            one length, dtype and device (queries, keys and values, say), which travel together.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        load_balancer: how the sequence is spread; by default rank r holds the r-th of W parts.
        heads: a `symm_cp.shards.Split` of the heads, or for each rank its first head and the one
            behind its last; ranges may overlap and may be empty. By default each rank has H / W
            heads. For several tensors one of these for each.

    Any dtype and strides. Returns contiguous tensors of shape (B, h, S, E), in sequence order.
    Differentiable, any number of times: the gradient is `heads_to_sequence`. Raises `ValueError` or
    `TypeError` for arguments that do not fit, before any communication; `RuntimeError` if a peer
    fails or disagrees. Source: DeepSpeed-Ulysses (Jacobs et al., 2023).
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
def heads_to_sequence(
    x: torch.Tensor | Tensors,
    *,
    group: GroupLike,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | Sequence[Heads] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Gives up part of the positions for the heads of all ranks.

    Same result as, for shards cut by `load_balancer`::

        whole = x.new_zeros(B, H, S, E)
        whole[:, begin:end] = x  # with begin, end = heads[rank]
        all_reduce(whole, group)
        whole[:, :, load_balancer.positions(rank)]

    Args:
        x: (B, h, S, E), this rank's heads of the whole sequence in sequence order; or several such
            tensors of one length, dtype and device, which travel together.
        group, load_balancer, heads: as for `sequence_to_heads`.

    Returns tensors of shape (B, H, s, E) that have all heads of a position in one run of memory, as
    output projections take them. Heads that several ranks hold are added, in rank order, in float32
    for 16-bit types. Differentiable, any number of times: the gradient is `sequence_to_heads`.
    Dtypes and errors as there. Source: DeepSpeed-Ulysses (Jacobs et al., 2023).
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
) -> tuple[torch.Tensor, ...]: ...
def ulysses_projection(
    x: torch.Tensor,
    weights: torch.Tensor | Tensors,
    *,
    features: int,
    group: GroupLike,
    biases: torch.Tensor | Tensors | None = None,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | Sequence[Heads] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Projects a sequence to heads, and gives each rank its heads as soon as they are multiplied.

    Same result as, for each weight::

        projected = (x @ weight + bias).unflatten(2, (-1, features)).transpose(1, 2)
        sequence_to_heads(projected, group=group, load_balancer=load_balancer, heads=heads)

    Args:
        x: (B, s, D), this rank's part of a sequence.
        weights: a (D, H * E) matrix (that of a `Linear` transposed) or several, as those of
            queries, keys and values.
        features: E, those of a head.
        biases: (H * E,) of each matrix.
        group, load_balancer, heads: as for `sequence_to_heads`.

    Returns a contiguous tensor of shape (B, h, S, E) for each matrix. Differentiable, any number of
    times; the gradient of a bias or a weight is this rank's part, to be summed over ranks. Autocast
    as for matmuls. Errors as for `sequence_to_heads`. Source: DeepSpeed-Ulysses (Jacobs et al.,
    2023), torch's `_pipelined_produce_and_all2all`.
    """
    name = group_name(group)
    one = isinstance(weights, torch.Tensor)
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    added: Any = [] if biases is None else [biases] if one else list(biases)
    by_tensor: Any = [heads] if one and heads is not None else heads
    options = telling_peers(name, _options, name, len(matrices), load_balancer, by_tensor)
    results = torch.ops.symm_mem.project_to_heads(x, matrices, added, features, name, *options)
    return results[0] if one else tuple(results)


def ulysses_output_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: GroupLike,
    bias: torch.Tensor | None = None,
    load_balancer: LoadBalancer | None = None,
    heads: Heads | None = None,
) -> torch.Tensor:
    """Projects the heads of all ranks, each as soon as it has arrived.

    Same result as::

        local = heads_to_sequence(x, group=group, load_balancer=load_balancer, heads=heads)
        local.transpose(1, 2).flatten(2) @ weight + bias

    Args:
        x: (B, h, S, E), this rank's heads of the whole sequence in sequence order.
        weight: (H * E, D), that of a `Linear` transposed.
        bias: (D,).
        group, load_balancer, heads: as for `heads_to_sequence`.

    Returns (B, s, D). Products of heads are added in float32 for 16-bit types. Differentiable, any
    number of times; the gradient of the weight is this rank's part, to be summed over ranks.
    Autocast as for matmuls. Errors and source as for `ulysses_projection`.
    """
    name = group_name(group)
    by_tensor = None if heads is None else [heads]
    options = telling_peers(name, _options, name, 1, load_balancer, by_tensor)
    out, _ = torch.ops.symm_mem.project_from_heads([x], [weight], name, *options)
    return out if bias is None else out + bias


def _exchange(
    to_heads: bool,
    x: torch.Tensor | Tensors,
    group: GroupLike,
    load_balancer: LoadBalancer | None,
    heads: Heads | Sequence[Heads] | None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    name = group_name(group)
    one = isinstance(x, torch.Tensor)
    tensors = [x] if isinstance(x, torch.Tensor) else list(x)
    by_tensor: Any = [heads] if one and heads is not None else heads
    options = telling_peers(name, _options, name, len(tensors), load_balancer, by_tensor)
    results = torch.ops.symm_mem.exchange_heads(tensors, to_heads, name, *options)
    return results[0] if one else tuple(results)


def _options(
    group: str, tensors: int, load_balancer: LoadBalancer | None, heads: Sequence[Heads] | None
) -> list[Any]:
    """Returns the last arguments of the op."""
    options: list[Any] = [None, None, None, None]
    if heads is not None:
        if len(heads) != tensors:
            raise ValueError(
                f"exchange_heads: heads has {len(heads)} entries for {tensors} tensors, must have "
                "one for each"
            )
        options[0] = [number for each in heads for number in _range_numbers(each)]
    if load_balancer is not None:
        options[1:3] = load_balancer.chunk_order, load_balancer.chunk_lengths
    if heads is not None or load_balancer is not None:
        options[3] = rank_in(group)
    return options


def _range_numbers(heads: Heads) -> list[int]:
    if isinstance(heads, Split):
        ranks = range(len(heads.sizes))
        return [n for r in ranks for n in (heads.start(r), heads.start(r) + heads.sizes[r])]
    return [number for begin, end in heads for number in (begin, end)]
