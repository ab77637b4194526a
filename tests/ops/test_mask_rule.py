"""Masks that options describe: tiles, keys that are sent, and functions show the same keys."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from symm_cp.ops.attention import masks as module
from symm_cp.ops.attention.masks import MaskOptions, masks_of
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule import SequenceLayout
from symm_cp.schedule import mask as rule

CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    world_size = draw(st.integers(1, 3))
    chunks = world_size * draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(0, 7), min_size=chunks, max_size=chunks).filter(any))
    return SequenceLayout(world_size, tuple(draw(st.permutations(range(chunks)))), tuple(lengths))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[SequenceLayout, int, MaskOptions]:
    """A layout, the number of samples, and a mask of any kinds that go together."""
    layout = draw(layouts())
    length, batch = layout.length, draw(st.integers(1, 3))
    rows = st.sampled_from([1, batch])
    ints = st.sampled_from([torch.int32, torch.int64])

    def edges() -> list[int]:
        inner = draw(st.lists(st.integers(0, length), max_size=3))
        return sorted([0, *inner, length])

    def ids() -> torch.Tensor:
        samples = [torch.diff(torch.tensor(edges())) for _ in range(draw(rows))]
        numbers = [draw(st.permutations(range(len(sizes)))) for sizes in samples]
        pairs = zip(numbers, samples, strict=True)
        return torch.stack([torch.tensor(n).repeat_interleave(sizes) for n, sizes in pairs])

    def keys() -> torch.Tensor:
        shown = st.lists(st.booleans(), min_size=length, max_size=length)
        return torch.tensor([draw(shown) for _ in range(draw(rows))])

    kinds: dict[str, Any] = {
        "is_causal": lambda: True,
        "window_left": lambda: draw(st.integers(0, 9)),
        "window_right": lambda: draw(st.integers(0, 9)),
        "cu_seqlens": lambda: torch.tensor(edges(), dtype=draw(ints)),
        "document_edges": edges,
        "document_ids": lambda: ids().to(draw(ints)),
        "key_mask": keys,
        "prefix_lengths": lambda: torch.tensor(
            draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))[: draw(rows)],
            dtype=draw(ints),
        ),
    }
    names = {field.name for field in fields(MaskOptions)}
    assert kinds.keys() == names, f"draw {names - kinds.keys()} here as well"
    chosen = draw(st.sets(st.sampled_from(sorted(names))))
    limits = {"is_causal", "window_left", "window_right"}
    if "cu_seqlens" in chosen:
        chosen.discard("document_edges")
    if chosen & {"cu_seqlens", "document_edges", "document_ids"} or not chosen & limits:
        chosen.discard("prefix_lengths")
    return layout, batch, MaskOptions(**{name: kinds[name]() for name in sorted(chosen)})


def reference(options: MaskOptions, batch: int, length: int) -> torch.Tensor:
    """(B, S, S): one pair of positions at a time."""

    def of(tensor: torch.Tensor, sample: int) -> list[Any]:
        rows: list[list[Any]] = tensor.tolist()
        return rows[sample % len(rows)]

    def visible(b: int, i: int, j: int) -> bool:
        seen = not (options.is_causal and j > i)
        if options.window_left is not None and i - j > options.window_left:
            seen = False
        if options.window_right is not None and j - i > options.window_right:
            seen = False
        if options.prefix_lengths is not None:
            prefixes = options.prefix_lengths.tolist()
            seen = seen or j < prefixes[b % len(prefixes)]
        for edges in (options.cu_seqlens, options.document_edges):
            if edges is not None and any(min(i, j) < int(edge) <= max(i, j) for edge in edges):
                return False
        if options.document_ids is not None:
            ids = of(options.document_ids, b)
            if ids[i] != ids[j]:
                return False
        return seen and (options.key_mask is None or of(options.key_mask, b)[j])

    pairs = itertools.product(range(batch), range(length), range(length))
    flat = [visible(*place) for place in pairs]
    return torch.tensor(flat, dtype=torch.bool).view(batch, length, length)


def by_tiles(spec: AttentionSpec, batch: int) -> torch.Tensor:
    """(B, S, S): what the tiles of all ranks cover; of peers, only keys that they send."""
    layout = spec.layout
    shown = torch.zeros(batch, layout.length, layout.length, dtype=torch.bool)
    positions = [
        torch.tensor(list(layout.positions(r)), dtype=int) for r in range(layout.world_size)
    ]
    for rank, owner in itertools.product(range(layout.world_size), repeat=2):
        own, theirs = positions[rank], positions[owner]
        sent = torch.zeros(len(theirs), dtype=torch.bool)
        sent[slice(None) if rank == owner else spec.sent_rows(owner)] = True
        for tile in spec.tiles(rank, owner, len(own)):
            i = torch.arange(tile.q_end - tile.q_begin).unsqueeze(1)
            j = torch.arange(tile.k_end - tile.k_begin)
            seen = torch.ones(len(i), len(j), dtype=torch.bool)
            seen &= tile.low is None or j - i >= tile.low
            seen &= tile.high is None or j - i <= tile.high
            hidden = spec.hidden_keys(tile, owner, CPU)
            cover = seen[None] if hidden is None else seen & hidden[0][:, 0]
            rows, keys = own[tile.q_begin : tile.q_end], theirs[tile.k_begin : tile.k_end]
            assert sent[tile.k_begin : tile.k_end].all(), (
                f"rank {owner} does not send all of {tile}"
            )
            samples = torch.arange(batch)[tile.samples]
            place = samples[:, None, None], rows[None, :, None], keys[None, None]
            assert not (shown[place] & cover).any(), f"{tile} overlaps"
            shown[place] |= cover
    return shown


def compare(layout: SequenceLayout, batch: int, options: MaskOptions) -> None:
    length = layout.length
    expected = reference(options, batch, length)
    mask, hidden = masks_of("test", options, torch.empty(batch, 1, 1, 1), length)
    spec = AttentionSpec(layout=layout, mask=mask, hidden=hidden)
    assert torch.equal(by_tiles(spec, batch), expected)
    shown = create_mask(options.as_mask_mod(), batch, 1, length, length, device="cpu")
    assert torch.equal(shown.squeeze(1), expected)


@settings(deadline=None, max_examples=200)
@given(drawn(), st.sampled_from([2, module.SHORT_GAP]))
def test_tiles_and_functions_show_the_same_keys(
    problem: tuple[SequenceLayout, int, MaskOptions], gap: int
) -> None:
    with mock.patch.object(module, "SHORT_GAP", gap):  # how long gaps must be to split tiles
        compare(*problem)


@pytest.mark.parametrize("argument", ["limited", "in_prefix", "one_document", "shown"])
def test_a_rule_that_is_wrong_in_one_of_them_is_noticed(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions' own rule ignores an argument: the comparison must fail."""
    options = MaskOptions(
        is_causal=True,
        prefix_lengths=torch.tensor([3]) if argument == "in_prefix" else None,
        document_ids=torch.arange(8)[None] // 4 if argument == "one_document" else None,
        key_mask=torch.arange(8)[None] > 1 if argument == "shown" else None,
    )
    layout = SequenceLayout(2, (0, 1), (4, 4))
    compare(layout, 1, options)

    def wrong(**facts: Any) -> Any:
        return rule.sees(**{**facts, argument: torch.tensor(argument != "in_prefix")})

    monkeypatch.setattr(module, "sees", wrong)
    with pytest.raises(AssertionError):
        compare(layout, 1, options)
