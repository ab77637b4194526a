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
