"""Attention on streams in two steps: to this rank's keys, then to all peers' keys at once.

A rank pulls the peers' rows, in the order of the sequence, while the first kernel runs. Then one
kernel (two if a rank holds two chunks under a causal mask) attends to them, and its results are
merged. A kernel for each shard would cost, for each of the W - 1 peers, a launch, a pass over the
results, and a tail in which multiprocessors are idle. The backward pass likewise: one kernel writes
the gradients of all peers' keys, and each peer pulls its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from symm_cp import runtime
from symm_cp.group.hosts import apart_of, in_test_mode
from symm_cp.group.memory import Group
from symm_cp.ops.attention.pipeline import Tensors, grads_in
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.runtime.calls import TogetherAndScatterCall, TogetherCall
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import Tile, tiles_of_others
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result

# The most bytes of all ranks' keys and values to gather at once. Shard by shard, a rank keeps two.
_MOST_BYTES = 2**30

OWN, OTHERS = range(2)


def gathered_bytes(key: torch.Tensor, spec: AttentionSpec) -> int:
    """Returns the bytes of a sample's keys and values on all ranks."""
    _, G, _, E = key.shape
    return spec.layout.length * G * (E + spec.features(key)) * key.element_size()


def fits(group: Group, key: torch.Tensor, spec: AttentionSpec) -> bool:
    """Returns whether a call can run in two steps; all ranks get the same answer."""
    return (
        group.world_size > 1
        and key.shape[0] == 1  # a shard is then a run of bytes
        and isinstance(spec.mask, Mask)
        and spec.hidden is None
        and not spec.rescores
        # On simulated devices, torch's CPU kernel needs values with as many features as keys.
        and (spec.value_features is None or key.device.type != "cpu")
        and gathered_bytes(key, spec) <= _MOST_BYTES
        and _sends_all(spec.layout, spec.mask, spec.queries)
        and not in_test_mode()
        and apart_of(group, key.device) is None
    )


@lru_cache(maxsize=256)
def _sends_all(layout: SequenceLayout, mask: Mask, queries: SequenceLayout | None) -> bool:
    """Whether each rank sends all of its keys."""
    spec = AttentionSpec(layout=layout, mask=mask, queries=queries)
    lengths = enumerate(layout.lengths)
    return all(spec.sent_rows(rank) == slice(0, rows) for rank, rows in lengths)


def tiles_of(spec: AttentionSpec, rank: int, rows: int) -> tuple[tuple[Tile, ...], ...]:
    """Returns the tiles of a rank's `rows` queries with its own keys, and with the peers'."""
    assert isinstance(spec.mask, Mask)
    others = tiles_of_others(spec.layout, spec.mask, rank, spec.queries, rows)
    return spec.tiles(rank, rank, rows), others


def consume_keys(
    op: str,
    spec: AttentionSpec,
    group: Group,
    key: torch.Tensor,
    value: torch.Tensor,
    consume: Callable[[list[torch.Tensor], int], None],
) -> None:
    """Calls `consume([key, value], OWN)`, then with `OTHERS` for all peers' shards. Collective."""
    shard = [_rows(key), _rows(value)]
    call = TogetherCall(
        group,
        shard,
        lambda: consume(_heads(shard), OWN),
        lambda rows: consume(_heads(rows), OTHERS),
        spec.call_name(op, key),
        spec.layout,
    )
    runtime.run(call)


def reduce_gradients(
    op: str,
    spec: AttentionSpec,
    group: Group,
    key: torch.Tensor,
    value: torch.Tensor,
    consume: Callable[[list[torch.Tensor], int, Tensors], None],
) -> Tensors:
    """Returns the gradients of this rank's keys and values, like pipeline.py's. Collective.

    Calls `consume([key, value], OWN, partials)`, then with `OTHERS` for all peers' shards.
    """
    shard = [_rows(key), _rows(value)]
    own = _heads(shard)
    total = new_result(key, (sum(tensor.numel() for tensor in shard),), wide(key.dtype))
    call = TogetherAndScatterCall(
        group,
        shard,
        lambda partial: consume(own, OWN, grads_in(partial, own)),
        lambda rows, grads: consume(_heads(rows), OTHERS, tuple(_heads(grads))),
        total,
        spec.call_name(op, key),
        spec.layout,
    )
    runtime.run(call)
    return grads_in(total, own)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns (1, G, S, E) as (S, G, E), which is copied unless heads are adjacent."""
    return tensor[0].transpose(0, 1).contiguous()


def _heads(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors (S, G, E) as (1, G, S, E)."""
    return [each.transpose(0, 1).unsqueeze(0) for each in rows]
