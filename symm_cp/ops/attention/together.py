"""Attention on streams in two steps: to this rank's keys, and to those of all peers at once.

The peers' rows are pulled in the order of the sequence while the first kernel runs. Then one kernel
attends to them, two where a rank holds two chunks under a causal mask, and one result is merged;
with a kernel for each shard, each of the W - 1 others is a launch, a pass over the results, and a
tail in which multiprocessors are idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp import runtime
from symm_cp.group.hosts import hosts_of
from symm_cp.group.memory import Group
from symm_cp.ops.attention.attend import ScoreTerms
from symm_cp.ops.attention.pipeline import Tensors
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import Forward, dense_features
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import Tile, held_by_others, most_parts, tiles_of_others
from symm_cp.tensors.pooled import Rows

# Keys and values of all ranks that are gathered at once, in bytes. By shards a rank keeps two.
_MOST_BYTES = 2**30


def fits(group: Group, key: torch.Tensor, spec: AttentionSpec) -> bool:
    """Tells whether a call can be made like this; all ranks get the same answer."""
    B, G, _, E = key.shape
    lengths = spec.layout.lengths
    nbytes = spec.layout.length * G * (E + spec.features(key)) * key.element_size()
    return (
        group.world_size > 1
        and B == 1  # a shard is then a run of bytes
        and isinstance(spec.mask, Mask)
        and spec.hidden is None
        and not spec.rescores
        # torch's kernel for CPU tensors, on simulated devices, takes no values of other features.
        and (spec.value_features is None or key.device.type != "cpu")
        and nbytes <= _MOST_BYTES
        and all(spec.sent_rows(rank) == slice(0, rows) for rank, rows in enumerate(lengths))
        and hosts_of(group, key.device) is None
    )


def attend(
    op: str, group: Group, tensors: Tensors, spec: AttentionSpec, terms: ScoreTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and its log-sum-exp. `tensors` are query, key and value. Collective."""
    rank, query = group.rank, dense_features(tensors[0])
    assert isinstance(spec.mask, Mask)
    place = rank, spec.queries, query.shape[2]
    own = spec.tiles(rank, rank, query.shape[2])
    others = tiles_of_others(spec.layout, spec.mask, *place)
    forward = Forward(query, spec, most_parts([*own, *others]), sinks=terms.sinks)
    shard = [tensor[0].transpose(0, 1).contiguous() for tensor in tensors[1:]]

    def add(tiles: Sequence[Tile], rows: list[torch.Tensor]) -> None:
        keys, values = (each.transpose(0, 1).unsqueeze(0) for each in rows)
        for tile in tiles:
            forward.add(tile, keys, values, rank)

    runtime.of(query, group).all_gather_and_consume_together(
        group,
        shard,
        lambda: add(own, shard),
        lambda rows: add(others, rows),
        spec.call_name(op, tensors[1]),
        lengths=spec.layout.lengths,
        runs=[Rows(o, span.row, span.length) for o, span in held_by_others(spec.layout, rank)],
    )
    return forward.result()
