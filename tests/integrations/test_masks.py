"""Masks that transformers composes on shards, against its masks of the whole batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache, LlamaConfig, LlamaModel, masking_utils

import symm_cp
import symm_cp.integrations.transformers
from symm_cp.context_parallel.layouts import cut
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.integrations.transformers.masks import _noting
from symm_cp.ops.attention.flex.mask import evaluate
from tests.context_parallel.common import mesh_of
from tests.exhaustive import pairs, some
from tests.integrations.common import BALANCERS

Tensors = dict[str, torch.Tensor]
BATCH = 2
FACTORIES: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.create_causal_mask,
    "sliding": masking_utils.create_sliding_window_causal_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "bidirectional_sliding": masking_utils.create_bidirectional_sliding_window_mask,
}
CAUSAL = ("causal", "sliding", "chunked")


def padding(kind: str, length: int) -> Tensors:
    """An attention_mask with padding at one end, or with holes anywhere."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    for sample in range(BATCH):
        padded = random.randrange(1, length)
        if kind == "left":
            mask[sample, :padded] = 0
        elif kind == "right":
            mask[sample, length - padded :] = 0
        elif kind == "holes":
            mask[sample] = torch.randint(2, (length,))
            mask[sample, padded] = 0
    return {"attention_mask": mask}


def packing(length: int, *, ends: list[int] | None = None, first: int = 0) -> Tensors:
    """Returns positions of packed documents, by default different documents in each sample."""
    rows = []
    for _ in range(BATCH):
        begins = random.sample(range(1, length), 3) if ends is None else ends
        edges = sorted({0, *begins, length})
        pieces = [torch.arange(b - a) for a, b in itertools.pairwise(edges)]
        rows.append(torch.cat(pieces) + first)
    return {"position_ids": torch.stack(rows)}


def batches(length: int, world_size: int) -> dict[str, Tensors]:
    parts = length // world_size
    return {
        "nothing": {},
        "ones": padding("none", length),
        "left": padding("left", length),
        "right": padding("right", length),
        "holes": padding("holes", length),
        "packed": packing(length),
        "one document": packing(length, ends=[]),
        "from 5 on": packing(length, ends=[], first=5),
        # With Sequential no rank sees a jump.
        "packed at ranks": packing(length, ends=list(range(parts, length, parts))),
    }


def config(implementation: str, window: int, chunk: int) -> LlamaConfig:
    made = LlamaConfig(
        sliding_window=window, attention_chunk_size=chunk, attn_implementation=implementation
    )
    # As models' constructors do.
    made._attn_implementation_internal = implementation
    return made


def made(factory: str, settings: LlamaConfig, batch: Tensors, length: int, **more: Any) -> Any:
    """Returns the mask that a model would make."""
    options = {"attention_mask": None, **batch, **more}
    if factory in CAUSAL:
        options = {"cache": None, "position_ids": None, **options}
        options["allow_is_causal_skip"] = False
    else:
        options.pop("position_ids", None)
        options["allow_is_bidirectional_skip"] = False
    return FACTORIES[factory](settings, torch.empty(BATCH, length, 8), **options)


def dense(mask: SequenceMask, length: int) -> torch.Tensor:
    positions = torch.arange(length)
    visible = evaluate(mask.as_mask_mod(), BATCH, 1, positions, positions)
    return visible.expand(BATCH, 1, length, length)


def local(batch: Tensors, balancer: symm_cp.LoadBalancer, rank: int) -> Tensors:
    return {name: cut("test", t, 1, balancer.positions(rank)) for name, t in batch.items()}


def check(
    group: dist.ProcessGroup,
    factory: str,
    batch: Tensors,
    balancer: symm_cp.LoadBalancer,
    *,
    window: int = 7,
    chunk: int = 6,
    **more: Any,
) -> SequenceMask:
    """Returns this rank's mask; raises unless it equals the mask of the whole batch."""
    length = balancer.seq_length
    expected = made(factory, config("sdpa", window, chunk), batch, length)
    if expected is None:  # a bidirectional mask of nothing
        expected = torch.ones(BATCH, 1, length, length, dtype=torch.bool)
    part = local(batch, balancer, group.rank())
    settings = config("symm_cp", window, chunk)
    if factory == "chunked":  # a configuration has windows or chunks
        settings.sliding_window = None
    with symm_cp.context_parallel(mesh_of(group), load_balancer=balancer):
        _noting(LlamaModel)(None, (), part)
        mask = made(factory, settings, part, balancer.lengths[group.rank()], **more)
    assert isinstance(mask, SequenceMask)
    torch.testing.assert_close(dense(mask, length), expected)
    return mask


@pytest.mark.parametrize(
    ("world_size", "layout", "length", "window", "chunk"),
    some(
        (2, "HeadTail", 24, 7, 6),
        (2, "Sequential", 29, 30, 16),
        of=[
            (world_size, layout, *sizes)
            for world_size, layout, sizes in pairs(
                (1, 2, 3, 4),
                BALANCERS,
                ((24, 7, 6), (29, 30, 16), (24, 1, 1)),
                also=[(2, "HeadTail", (24, 7, 6)), (2, "Sequential", (29, 30, 16))],
            )
        ],
    ),
)
@pytest.mark.ranks
def test_masks_are_those_of_the_whole_batch(
    group: dist.ProcessGroup, world_size: int, layout: str, length: int, window: int, chunk: int
) -> None:
    for factory in FACTORIES:
        for name, batch in batches(length, group.size()).items():
            if factory not in CAUSAL and "position_ids" in batch:
                continue
            balancer = BALANCERS[layout](length, group.size())
            mask = check(group, factory, batch, balancer, window=window, chunk=chunk)
            case = (factory, name)
            # The fast way: only options of the op, and only options with an effect.
            assert mask.mask_mod is None, case
            assert (mask.key_mask is not None) == (name in ("left", "right", "holes")), case
            packed = name == "packed" or (name == "packed at ranks" and group.size() > 1)
            assert (mask.document_ids is not None) == (packed or factory == "chunked"), case


@pytest.mark.ranks(2)
def test_samples_with_layouts_of_their_own(group: dist.ProcessGroup) -> None:
    each = 2 * group.size()
    balancer = symm_cp.PerDocumentHeadTail([[2 * each, 4 * each], [5 * each, each]], group.size())
    every = batches(6 * each, group.size())
    for factory in FACTORIES:
        check(group, factory, every["left"], balancer)
    for factory in CAUSAL:
        check(group, factory, every["packed"], balancer)


@pytest.mark.ranks(2)
def test_documents_with_an_empty_cache(group: dist.ProcessGroup) -> None:
    """As in transformers' flash attention, an empty cache does not join documents."""
    packed = packing(12, ends=[5])
    check(group, "causal", packed, symm_cp.HeadTail(12, group.size()), cache=DynamicCache())


def every_other(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 2 == 0


@pytest.mark.ranks(2)
def test_masks_that_are_refused(group: dist.ProcessGroup) -> None:
    size, blocks = 12, torch.tensor([[-1] * 4 + [0] * 4 + [-1] * 4] * BATCH)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("or_mask_function or and_mask_function.*BlockMask", {"or_mask_function": every_other}),
        ("or_mask_function or and_mask_function.*BlockMask", {"and_mask_function": every_other}),
        ("block_sequence_ids.*BlockMask", {"block_sequence_ids": blocks}),
        ("block_sequence_ids.*BlockMask", {"block_sequence_ids": blocks, **packing(12, ends=[2])}),
        (
            "attention_mask of shape .*13 keys for 12 queries.*shard_batch",
            {"attention_mask": torch.ones(2, 13)},
        ),
    ]
    _noting(LlamaModel)(None, (), {})
    for message, options in cases:
        with (
            symm_cp.context_parallel(mesh_of(group)),
            pytest.raises((NotImplementedError, ValueError), match=message),
        ):
            made("causal", config("symm_cp", 3, 3), {}, size, **options)
    with symm_cp.context_parallel(mesh_of(group)):  # no picture: no block
        made("causal", config("symm_cp", 3, 3), {}, size, block_sequence_ids=blocks * 0 - 1)
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), 0)
    with (
        symm_cp.context_parallel(mesh_of(group)),
        pytest.raises(NotImplementedError, match=r"a cache holds keys of earlier calls.*Generate"),
    ):
        made("causal", config("symm_cp", 3, 3), {}, size, cache=cache)


def test_outside_of_a_context_masks_are_those_of_sdpa() -> None:
    for factory in FACTORIES:
        for batch in batches(24, 1).values():
            if factory not in CAUSAL and "position_ids" in batch:
                continue
            ours, theirs = (
                made(factory, config(name, 7, 6), batch, 24) for name in ("symm_cp", "sdpa")
            )
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours is None
