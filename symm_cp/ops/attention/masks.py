"""Masks as callers give them (`MaskOptions`) and as the host reads them: a `Mask` per sample.

Shapes: B samples; S_k positions of the whole sequence of keys, or S if queries share it.

Tensors become a `Mask` for each sample, so that tiles are exact. Only short gaps between visible
keys are left to an additive mask (`HiddenKeys`): cutting tiles there would cost more than the
hidden keys do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch

from symm_cp.cuda.cached import HostReads, cached, capturing
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import Limits, Mask, sees
from symm_cp.schedule.tiles import Tile
from symm_cp.tensors.dtypes import dtype_name

Bools: TypeAlias = np.ndarray
Edges: TypeAlias = tuple[int, ...]
Ranges: TypeAlias = tuple[tuple[int, int], ...]
#: Numbers that a graph may not know.
SymInts: TypeAlias = list[int]
T = TypeVar("T")

# A gap of fewer hidden keys than this is masked, a longer one splits the tile: another tile costs a
# call and a merge of all its rows.
SHORT_GAP = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskOptions:
    """Which keys a query sees: all keys that every field allows.

    Same result as `F.scaled_dot_product_attention` of the whole sequence with::

        limits = (kv_idx <= q_idx) & (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)
        (limits | (kv_idx < prefix_lengths[b])) & key_mask[b, kv_idx]
        & (document_ids[b, q_idx] == document_ids[b, kv_idx])
    """

    #: A query sees no later key.
    is_causal: bool = False
    #: Boundaries of documents packed into the only sample, of int32 or int64.
    cu_seqlens: torch.Tensor | None = None
    #: `cu_seqlens` as numbers.
    document_edges: SymInts | None = None
    #: How many positions before and after its own a query sees.
    window_left: int | None = None
    window_right: int | None = None
    #: (B or 1, S) of int64: contiguous runs of equal ids are documents.
    document_ids: torch.Tensor | None = None
    #: (B or 1, S_k) of bool: keys that any query may see.
    key_mask: torch.Tensor | None = None
    #: (B or 1,) of int32 or int64: every query sees this number of first keys, whatever the limits.
    prefix_lengths: torch.Tensor | None = None

    @property
    def by_position(self) -> list[str]:
        """The options that depend on the positions of queries."""
        causal = ["is_causal"] if self.is_causal else []
        return [*causal, *self._given("window_left", "window_right"), *self.of_documents]

    @property
    def of_documents(self) -> list[str]:
        """The options that give documents."""
        return self._given("cu_seqlens", "document_edges", "document_ids")

    @property
    def limits(self) -> Limits:
        """How far from its own position a query sees."""
        return Limits(self.window_left, 0 if self.is_causal else self.window_right)

    def _given(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    @property
    def relates_positions(self) -> bool:
        """Whether queries and keys must be of one sequence."""
        # Not through `by_position`, which builds lists: models call this in each layer.
        return self.is_causal or not (
            self.window_left is None
            and self.window_right is None
            and self.cu_seqlens is None
            and self.document_edges is None
            and self.document_ids is None
        )

    @property
    def is_given(self) -> bool:
        """Whether any option hides a key."""
        return self.relates_positions or self.key_mask is not None

    def arguments(self) -> dict[str, Any]:
        """Returns the options of the mask as `all_gather_attention` takes them."""
        options: dict[str, Any] = {}
        for name in _NAMES:  # a loop without calls: this runs in each layer
            options[name] = getattr(self, name)
        edges = options.pop("document_edges")
        return options if edges is None else {**options, "cu_seqlens": edges}

    def sample(self, index: int) -> Self:
        """Returns the options of one sample of the batch."""
        names = ("document_ids", "key_mask", "prefix_lengths")
        rows: dict[str, Any] = {name: row_of(getattr(self, name), index) for name in names}
        return replace(self, **rows)

    def as_mask_mod(self) -> Callable[..., torch.Tensor]:
        """Returns the mask as a function of the indices of sample, head, query and key."""
        edges, ids, lengths = self.cu_seqlens, self.document_ids, self.prefix_lengths
        if self.document_edges is not None:
            edges = torch.tensor(self.document_edges)

        def one_document(b: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> Any:
            same: Any = True
            if ids is not None:
                same = _entry(ids, b, q) == _entry(ids, b, kv)
            if edges is not None:
                same = ((edges <= q).sum() == (edges <= kv).sum()) & same
            return same

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> Any:
            return sees(
                limited=self.limits.hold(kv - q),
                in_prefix=lengths is not None
                and kv < (lengths[b] if len(lengths) > 1 else lengths[0]),
                one_document=one_document(b, q, kv),
                shown=self.key_mask is None or _entry(self.key_mask, b, kv),
            )

        return visible


def row_of(tensor: torch.Tensor | None, index: int) -> torch.Tensor | None:
    """Returns one sample's row of a tensor with a row for each sample, or one for all."""
    return tensor if tensor is None or len(tensor) == 1 else tensor[index : index + 1]


def _entry(tensor: torch.Tensor, b: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return tensor[b, position] if len(tensor) > 1 else tensor[0][position]


_NAMES = tuple(field.name for field in fields(MaskOptions))


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

    Compares, hashes and prints by value.
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
        """Returns a tile's visible keys, (b, 1, 1, K), and its fully masked rows, (b, 1, rows).

        b is the number of the tile's samples or 1; the rows are None if every row sees some key.
        Returns None if the tile sees all of its keys. `owner` is the rank whose keys they are.
        """
        samples = slice(0, 1) if len(self.visible) == 1 else tile.samples
        counts = _counts(self, layout, owner)[samples]
        keys = tile.k_end - tile.k_begin
        seen = counts[:, tile.k_end] - counts[:, tile.k_begin]
        if (seen == keys).all():
            return None
        rows = _visible_rows(device, self, layout, owner)[samples]
        visible = rows[:, None, None, tile.k_begin : tile.k_end]
        fully_masked = _fully_masked(tile, counts)[:, None]
        return visible, torch.from_numpy(fully_masked).to(device) if fully_masked.any() else None


def _fully_masked(tile: Tile, counts: np.ndarray) -> Bools:
    """Which rows of a tile see no key, for each sample."""
    i, keys = np.arange(tile.q_end - tile.q_begin), tile.k_end - tile.k_begin
    first = np.zeros_like(i) if tile.low is None else np.clip(i + tile.low, 0, keys)
    end = np.full_like(i, keys) if tile.high is None else np.clip(i + tile.high + 1, 0, keys)
    fully_masked: Bools = counts[:, tile.k_begin + end] <= counts[:, tile.k_begin + first]
    return fully_masked


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


@cached(maxsize=64)
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

    The ranges leave out all hidden keys except in gaps shorter than `SHORT_GAP`; if there are such
    gaps, the second result is the mask itself.
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
    op: str, options: MaskOptions, query: torch.Tensor, length: int
) -> tuple[Mask | tuple[Mask, ...], HiddenKeys | None]:
    """Returns one mask for all samples or one for each, and the further hidden keys.

    `length` is the length of the whole sequence of keys. The host reads the tensors, and waits for
    device tensors, once for each change that torch sees; while a graph is captured on the device of
    `query`, tensors must be on CPU.
    """
    batch, device = query.shape[0], query.device
    edges, cu_seqlens = options.document_edges, options.cu_seqlens
    if cu_seqlens is not None and edges is not None:
        raise ValueError(f"{op}: cu_seqlens and document_edges are both given, pass only one")
    if cu_seqlens is not None:
        edges = _host_edges(op, cu_seqlens, device)
    limits = options.limits
    mask = Mask(limits.left, limits.right, _documents(op, edges, length))
    for name, dtypes in (("document_ids", _INTS), ("key_mask", (torch.bool,))):
        if (tensor := getattr(options, name)) is not None:
            _check_over_sequence(op, name, tensor, query, length, dtypes)
            check_readable(op, name, tensor, device)
    prefixes = _prefixes(op, options, query, length)
    of_all = options.document_ids is None and options.key_mask is None and prefixes == [None]
    if batch == 0 or of_all:
        return mask, None
    documents: list[Edges | None] = [mask.documents]
    if options.document_ids is not None:
        found = documents_of(op, options.document_ids)
        documents = [_united(mask.documents, edges) for edges in found]
    ranges: list[Ranges | None] = [None]
    hidden = None
    if options.key_mask is not None:
        visible, hidden = keys_of(options.key_mask)
        ranges = [None if keys == ((0, length),) else keys for keys in visible]
    masks = tuple(
        replace(mask, documents=edges, keys=keys, prefix=prefix)
        for edges, keys, prefix in zip(
            *(_each(values, batch) for values in (documents, ranges, prefixes)), strict=True
        )
    )
    if masks.count(masks[0]) == len(masks):
        return masks[0], hidden
    return masks, hidden


_INTS = (torch.int32, torch.int64)
_edges_read: HostReads[list[int]] = HostReads()


def _check_over_sequence(
    op: str,
    name: str,
    tensor: torch.Tensor,
    query: torch.Tensor,
    length: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raises unless a tensor has an entry of these dtypes for each position of each sample."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(dtype_name, dtypes))
        raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {expected}")
    batch = query.shape[0]
    if tensor.dim() != 2 or tensor.shape[0] not in (1, batch) or tensor.shape[1] != length:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}, must be [{batch} or 1, {length}]: the "
            "samples and the positions of the whole sequence"
        )


def _host_edges(op: str, cu_seqlens: torch.Tensor, device: torch.device) -> list[int]:
    """Returns the values of `cu_seqlens`, for a call on `device`."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in _INTS:
        raise ValueError(
            f"{op}: cu_seqlens must be a 1-D tensor of int32 or int64, is {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    check_readable(op, "cu_seqlens", cu_seqlens, device, "a sequence of ints or a CPU tensor")
    return _edges_read.get(cu_seqlens, cu_seqlens.tolist)


def _documents(op: str, edges: list[int] | None, length: int) -> Edges | None:
    if edges is None:
        return None
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != length or edges != sorted(edges):
        raise ValueError(
            f"{op}: cu_seqlens={edges} must ascend from 0 to {length}, the length of the whole "
            "sequence"
        )
    return tuple(edges)


def _prefixes(
    op: str, options: MaskOptions, query: torch.Tensor, length: int
) -> Sequence[int | None]:
    """Returns the length of each sample's prefix, or one for all; None: no prefix."""
    lengths, batch = options.prefix_lengths, query.shape[0]
    if lengths is None:
        return [None]
    if lengths.dtype not in _INTS or lengths.dim() != 1 or lengths.shape[0] not in (1, batch):
        raise ValueError(
            f"{op}: prefix_lengths is {lengths.dtype} {list(lengths.shape)}, must be int32 or "
            f"int64 [{batch} or 1], a length for each sample"
        )
    if options.of_documents:
        raise ValueError(
            f"{op}: prefix_lengths and {options.of_documents[0]} are both given, pass only "
            "one: a prefix starts with the sequence, as only the first document does"
        )
    if not options.is_causal and options.window_left is None and options.window_right is None:
        raise ValueError(
            f"{op}: prefix_lengths requires is_causal=True, window_left or window_right: without "
            "a limit every query sees all keys"
        )
    check_readable(op, "prefix_lengths", lengths, query.device)
    found = _edges_read.get(lengths, lengths.tolist)
    for each in found:
        if not 0 <= each <= length:
            raise ValueError(
                f"{op}: prefix_lengths={found} must be between 0 and {length}, the length of the "
                "whole sequence of the keys"
            )
    return [each or None for each in found]


def _each(values: Sequence[T], batch: int) -> Sequence[T]:
    """Returns a value for each sample."""
    return [values[0]] * batch if len(values) == 1 else values


def _united(one: Edges | None, other: Edges) -> Edges | None:
    """The union of two lists of document boundaries; None if there is one document."""
    edges = other if one is None else tuple(sorted({*one, *other}))
    return None if len(edges) <= 2 else edges
