"""Which method a call of attention takes with `method="auto"`, and how it runs on streams."""

from __future__ import annotations

from functools import lru_cache

import torch

from symm_cp import tuning
from symm_cp.cuda import has_streams
from symm_cp.group.memory import Group
from symm_cp.ops.attention import together
from symm_cp.ops.attention.methods import Method, MethodName
from symm_cp.ops.attention.options import ScoreOptions
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import tiles
from symm_cp.tensors.dtypes import dtype_name, wide

# `together` merges results once instead of W - 1 times, but hides transfers behind this rank's keys
# only. By the model of 8 H100 in benchmarks/gpu_algorithms.py (no GPU has measured it) it takes 0.3
# to 1.14 of the pipeline's time if at least four query heads share a key head: there are few bytes
# to hide and many to merge. With fewer it takes 0.7 to 1.3 up to 8 MiB of gathered keys and values,
# and beyond 0.8 to 1.5.
_GROUPED = 4
_FEW_BYTES = 8 << 20

# Layouts with shards of slightly different lengths count as balanced.
_BALANCED = 1.05


def settled(
    op: str,
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    spec: AttentionSpec,
    options: ScoreOptions,
    *,
    queries: SequenceLayout | None = None,
    backward: bool = False,
) -> Method:
    """Returns the method that the options of a call name, or for "auto" the faster one.

    The choice depends only on values that all ranks share: it is the same on each, in every run.
    `queries` is the layout of the queries, by default the spec's, or else that of the keys.
    """
    method = Method.of(op, options)
    if method.name != "auto":
        return method
    if group.world_size == 1:
        return Method("allgather")
    item, wide_item = query.dtype.itemsize, wide(key.dtype).itemsize
    exchanges, why = by_heads(
        queries or spec.queries or spec.layout,
        spec.layout,
        (spec.mask,) if isinstance(spec.mask, Mask) else spec.mask,
        (query.shape[1], key.shape[1]),
        moved(item, wide_item, backward=backward) if has_streams(query.device) else None,
    )
    chosen: MethodName = "ulysses" if exchanges else "allgather"
    shape = "x".join(map(str, (*query.shape[:2], key.shape[1], spec.layout.length)))
    name = f"attention{' backward' * backward} {dtype_name(query.dtype)} {shape}"
    tuning.note(query.device, name, tuning.Choice(chosen, why))
    return Method(chosen)


def moved(item: int, wide_item: int, *, backward: bool) -> tuple[int, int]:
    """Returns the bytes that move per feature: of all keys, and of a rank's share of the heads.

    Forward keys move, or queries, keys, values and results. Backward keys move, and their gradients
    in a wide type; or all of these and their gradients.
    """
    return (item + wide_item, 2 * item) if backward else (item, item)


@lru_cache(maxsize=512)
def by_heads(
    queries: SequenceLayout,
    keys: SequenceLayout,
    masks: tuple[Mask, ...],
    heads: tuple[int, int],
    bytes_moved: tuple[int, int] | None,
) -> tuple[bool, str]:
    """Whether to exchange heads instead of gathering keys, and why.

    The slowest rank sets the time: by keys the rank with the most pairs of query and key, by heads
    a rank with the most heads. If the work is equal, GPUs take the method that moves fewer bytes
    (`moved`; None: on CPU).
    On CPU ranks read keys in place; there one kernel for the whole sequence beats a merge for each
    rank: 1.05 of the time by keys for 256 tokens forward, 0.6 to 0.74 up to 1,024 tokens backward,
    equal from 4,096 on (benchmarks/results/methods.json, two ranks).
    """
    ranks, (of_queries, of_keys) = keys.world_size, heads
    if of_queries < ranks:
        return False, "fewer heads than ranks"
    pairs = [
        sum(
            tile.pairs
            for mask in masks
            for owner in range(ranks)
            for tile in tiles(keys, mask, rank, owner, queries, queries.lengths[rank])
        )
        for rank in range(ranks)
    ]
    work_by_keys = max(pairs) * of_queries
    work_by_heads = sum(pairs) * -(-of_queries // ranks)
    if work_by_heads > _BALANCED * work_by_keys:
        return False, "ranks would have unequal numbers of heads"
    if work_by_keys > _BALANCED * work_by_heads:
        return True, "ranks would have unequal parts of the mask"
    if bytes_moved is None:
        return True, "one kernel for the whole sequence"
    bytes_by_keys = bytes_moved[0] * ranks * of_keys
    bytes_by_heads = bytes_moved[1] * (of_queries + max(of_keys, ranks))
    return bytes_by_heads < bytes_by_keys, "moves fewer bytes"


def by_size(heads: int, kv_heads: int, gathered_bytes: int) -> str:
    """Returns how a pass by keys runs on streams if both "pipeline" and "together" support it."""
    return (
        "together" if heads >= _GROUPED * kv_heads or gathered_bytes <= _FEW_BYTES else "pipeline"
    )


def algorithm(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    spec: AttentionSpec,
    *,
    backward: bool = False,
) -> str:
    """Returns how a pass by keys runs: one of `tuning.ATTENTION_ALGORITHMS`.

    All ranks get the same answer. Collective at the first call for a group.
    """
    if not has_streams(query.device):
        return "pipeline"
    algorithms, default = ["pipeline"], "pipeline"
    # Callers choose a ring of gradients where memory has no room for all of them.
    if together.fits(group, key, spec) and not (backward and spec.method == "alltoall"):
        algorithms.append("together")
        default = by_size(query.shape[1], key.shape[1], together.gathered_bytes(key, spec))
    if len(algorithms) == 1:
        return algorithms[0]
    question = _question(query, key, spec) + (" backward" if backward else "")
    return tuning.choose(group, query.device, question, tuple(algorithms), tuning.by_size(default))


def _question(query: torch.Tensor, key: torch.Tensor, spec: AttentionSpec) -> str:
    """Returns the name of a call in the file of measured choices, identical on all ranks.

    The name repeats the number of keys in place of the queries', which may differ between ranks.
    """
    B, H, _, E = query.shape
    sizes = f"{B}x{H}x{key.shape[1]}x{key.shape[2]}x{key.shape[2]}x{E}"
    kind, chunks = "causal" if spec.mask else "full", len(spec.layout.chunks(0))
    return f"all_gather_attention {dtype_name(query.dtype)} {sizes} {kind} {chunks} chunks"
