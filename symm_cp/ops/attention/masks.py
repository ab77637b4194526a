"""What tensors say of a batch: which keys each sample shows, and which documents it holds.

`document_ids` (B or 1, S) and `key_mask` (B or 1, S_k) become a `Mask` for each sample, so that
tiles are exact. Only short gaps between visible keys are left to an additive mask (`HiddenKeys`):
cutting tiles there would cost more than the hidden keys do.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from symm_cp.cuda.kept import HostReads, capturing, kept
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import Mask, Tile

Bools: TypeAlias = np.ndarray
Edges: TypeAlias = tuple[int, ...]
Ranges: TypeAlias = tuple[tuple[int, int], ...]
T = TypeVar("T")

# Fewer hidden keys than this between visible ones are masked: a tile more costs its call, and the
# merging of all its rows.
SHORT_GAP = 128


def check_readable(
    op: str, name: str, tensor: torch.Tensor, device: torch.device, instead: str = "a CPU tensor"
) -> None:
    """Raises `RuntimeError` if the host cannot read a tensor in a call on `device`.

    While a graph is captured the host must not wait for tensors on a device, and replays would not
    see other values.
    """
    if tensor.device.type != "cpu" and capturing(device):
        raise RuntimeError(
            f"{op}: {name} is on {tensor.device}, where the host cannot read it while a CUDA graph "
            f"is captured: pass {instead}, whose values become part of the graph"
        )


@dataclass(frozen=True, eq=False)
class HiddenKeys:
    """Which keys of a sequence are visible: (B or 1, S) of bool, on the host.

    Equal, hashed and shown by its values.
    """

    visible: Bools

    @cached_property
    def _digest(self) -> int:
        return zlib.crc32(np.packbits(self.visible).data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenKeys) and np.array_equal(self.visible, other.visible)

    def __hash__(self) -> int:
        return hash((self.visible.shape, self._digest))

    def __repr__(self) -> str:
        return f"HiddenKeys({self.visible.shape}, {self._digest:08x})"

    def mask(
        self, tile: Tile, layout: SequenceLayout, owner: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the visible keys of a tile, (b, 1, 1, K), and its blind rows, (b, 1, rows).

        b is the number of the tile's samples or 1. Blind rows, None if there are none, see no key
        of the tile. Returns None if the tile sees all of its keys. `owner` is the rank whose keys
        they are.
        """
        samples = slice(0, 1) if len(self.visible) == 1 else tile.samples
        counts = _counts(self, layout, owner)[samples]
        keys = tile.k_end - tile.k_begin
        seen = counts[:, tile.k_end] - counts[:, tile.k_begin]
        if (seen == keys).all():
            return None
        rows = _visible_rows(device, self, layout, owner)[samples]
        visible = rows[:, None, None, tile.k_begin : tile.k_end]
        blind = _blind(tile, counts)[:, None]
        return visible, torch.from_numpy(blind).to(device) if blind.any() else None


def _blind(tile: Tile, counts: np.ndarray) -> Bools:
    """Which rows of a tile see no key, for each sample."""
    i, keys = np.arange(tile.q_end - tile.q_begin), tile.k_end - tile.k_begin
    first = np.zeros_like(i) if tile.low is None else np.clip(i + tile.low, 0, keys)
    end = np.full_like(i, keys) if tile.high is None else np.clip(i + tile.high + 1, 0, keys)
    blind: Bools = counts[:, tile.k_begin + end] <= counts[:, tile.k_begin + first]
    return blind


def _in_rows(hidden: HiddenKeys, layout: SequenceLayout, owner: int) -> Bools:
    """The visible keys of a rank, in the order of its rows."""
    spans = layout.spans(owner)
    parts = [hidden.visible[:, span.start : span.start + span.length] for span in spans]
    return np.concatenate(parts, 1) if parts else hidden.visible[:, :0]


@lru_cache(maxsize=64)
def _counts(hidden: HiddenKeys, layout: SequenceLayout, owner: int) -> np.ndarray:
    """How many of a rank's first n keys are visible, for n = 0, 1, ...: (B or 1, K + 1)."""
    rows = _in_rows(hidden, layout, owner)
    counts = np.zeros((len(rows), rows.shape[1] + 1), dtype=np.int32)
    np.cumsum(rows, 1, out=counts[:, 1:])
    return counts


@kept(maxsize=64)
def _visible_rows(
    device: torch.device, hidden: HiddenKeys, layout: SequenceLayout, owner: int
) -> torch.Tensor:
    return torch.from_numpy(_in_rows(hidden, layout, owner).copy()).to(device)


def documents_of(op: str, document_ids: torch.Tensor) -> list[Edges]:
    """Returns the boundaries of the documents of each sample, from their ids (B or 1, S).

    Raises `ValueError` unless each document is one run of positions.
    """
    return _ids_read.get(document_ids, lambda: _read_documents(op, document_ids))


_ids_read: HostReads[list[Edges]] = HostReads()


def _read_documents(op: str, document_ids: torch.Tensor) -> list[Edges]:
    ids = document_ids.detach().cpu().numpy()
    length = ids.shape[1]
    found = []
    for sample, row in enumerate(ids):
        begins = np.concatenate(([0], np.flatnonzero(row[1:] != row[:-1]) + 1))[:length]
        order = np.argsort(row[begins], kind="stable")
        numbers = row[begins][order]
        again = np.flatnonzero(numbers[1:] == numbers[:-1])
        if len(again):
            first, second = begins[order[again[0]]], begins[order[again[0] + 1]]
            raise ValueError(
                f"{op}: document_ids of sample {sample} has document {numbers[again[0]]} at "
                f"position {first} and, after other documents, at {second}: a document must be one "
                "run of positions"
            )
        found.append((*begins.tolist(), length) if length else (0, 0))
    return found


def keys_of(key_mask: torch.Tensor) -> tuple[list[Ranges], HiddenKeys | None]:
    """Returns the ranges of each sample in which keys are visible, from a mask (B or 1, S_k).

    The ranges leave out all hidden keys but those of gaps shorter than `SHORT_GAP`, and where there
    are such gaps the mask itself is returned, too.
    """
    return _mask_read.get(key_mask, lambda: _read_keys(key_mask))


_mask_read: HostReads[tuple[list[Ranges], HiddenKeys | None]] = HostReads()


def _read_keys(key_mask: torch.Tensor) -> tuple[list[Ranges], HiddenKeys | None]:
    visible: Bools = key_mask.detach().cpu().numpy()
    found = [_ranges(row) for row in visible]
    covered = sum(end - begin for ranges in found for begin, end in ranges)
    return found, HiddenKeys(visible.copy()) if covered > visible.sum() else None


def _ranges(visible: Bools) -> Ranges:
    edges = np.flatnonzero(np.diff(visible, prepend=False, append=False))
    if len(edges) == 0:
        return ()
    begins, ends = edges[::2], edges[1::2]
    apart = begins[1:] - ends[:-1] >= SHORT_GAP
    begins, ends = begins[np.r_[True, apart]], ends[np.r_[apart, True]]
    return tuple(zip(begins.tolist(), ends.tolist(), strict=True))


def masks_of(
    op: str,
    mask: Mask,
    batch: int,
    document_ids: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    device: torch.device,
) -> tuple[Mask | tuple[Mask, ...], HiddenKeys | None]:
    """Returns a mask with the documents and visible keys of each sample; one if all are equal.

    The tensors have the right shape and dtype. The host reads them: for tensors on a device it
    waits, once for each change that torch sees; while a graph is captured on `device` they must be
    on CPU.
    """
    tensors = {"document_ids": document_ids, "key_mask": key_mask}
    for name, tensor in tensors.items():
        if tensor is not None:
            check_readable(op, name, tensor, device)
    if batch == 0:
        return mask, None
    documents: list[Edges | None] = [mask.documents]
    if document_ids is not None:
        documents = [_united(mask.documents, edges) for edges in documents_of(op, document_ids)]
    ranges: list[Ranges | None] = [None]
    hidden = None
    if key_mask is not None:
        visible, hidden = keys_of(key_mask)
        whole = ((0, key_mask.shape[1]),)
        ranges = [None if keys == whole else keys for keys in visible]
    masks = tuple(
        replace(mask, documents=edges, keys=keys)
        for edges, keys in zip(_each(documents, batch), _each(ranges, batch), strict=True)
    )
    if masks.count(masks[0]) == len(masks):
        return masks[0], hidden
    return masks, hidden


def _each(values: list[T], batch: int) -> list[T]:
    """Returns a value for each sample."""
    return values * batch if len(values) == 1 else values


def _united(one: Edges | None, other: Edges) -> Edges | None:
    """The boundaries of documents that are in both; None if there is one document."""
    edges = other if one is None else tuple(sorted({*one, *other}))
    return None if len(edges) <= 2 else edges
