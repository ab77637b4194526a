"""What a call of attention computes: the options of the ops, checked once, as one frozen spec.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), S rows
of this rank's shard, E features of a head, V features of a value.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from symm_cp.devices.kept import HostReads
from symm_cp.memory import Group
from symm_cp.ops.attention.checks import (
    DTYPES,
    check_bias_length,
    check_over_sequence,
    check_scores,
    seed_of,
)
from symm_cp.ops.attention.layouts import decoded, layout_held, layout_of_keys
from symm_cp.ops.attention.masks import HiddenKeys, check_readable, masks_of
from symm_cp.ops.common import what_is
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import NO_MASK, Mask, Tile, for_samples, tiles, tiles_of_rows

#: The options of the ops, as their schemas have them; `AttentionSpec.of` takes the same.
OPTIONS = (
    "bool is_causal=False, float? scale=None, bool enable_gqa=False, int[]? chunk_order=None, "
    "SymInt[]? chunk_lengths=None, Tensor? cu_seqlens=None, SymInt[]? document_edges=None, "
    "int? window_left=None, int? window_right=None, float? softcap=None, Tensor? sinks=None, "
    "Tensor? bias=None, float dropout_p=0.0, Tensor? dropout_seed=None, "
    "Tensor? document_ids=None, Tensor? key_mask=None, int[]? query_chunk_order=None, "
    "SymInt[]? query_chunk_lengths=None, Tensor? layouts=None"
)

_ROTATE_METHODS = ("allgather", "alltoall")
_rotate_method = _ROTATE_METHODS[0]


def set_rotate_method(rotate_method: str) -> None:
    """Chooses how many remote shards the ops keep at a time: all ("allgather") or one ("alltoall").

    On CPU keys and values are read where they lie and none is kept. What differs are the gradients
    of keys and values: "allgather" (the default) has room for those of all ranks and adds them in
    rank order, "alltoall" passes them on in a ring and has room for two. Must be set identically on
    all ranks; takes effect for backward passes that run afterwards. Raises `ValueError` for another
    name. Source: torch's `set_rotate_method`.
    """
    global _rotate_method
    if rotate_method not in _ROTATE_METHODS:
        raise ValueError(f"set_rotate_method: {rotate_method=} must be one of {_ROTATE_METHODS}")
    _rotate_method = rotate_method


def rotate_method() -> str:
    """Returns the method that `set_rotate_method` chose."""
    return _rotate_method


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a call computes: identical on all ranks, as `call_name` lets them check.

    Every field but the layout has a default that changes nothing.
    """

    #: How the sequence of keys and values is spread over the ranks.
    layout: SequenceLayout
    #: Which keys a query sees, by positions in the sequence: one mask, or one for each sample.
    mask: Mask | tuple[Mask, ...] = NO_MASK
    #: Further hidden keys, in short gaps between visible ones; None if there are none.
    hidden: HiddenKeys | None = None
    #: What scores are multiplied by; None is 1 / sqrt(E).
    scale: float | None = None
    #: How gradients of keys and values travel: see `set_rotate_method`.
    method: str = _ROTATE_METHODS[0]
    #: How the queries are spread, if not as the keys are; None, too, where it does not matter.
    queries: SequenceLayout | None = None
    #: The features of a value, if not E.
    value_features: int | None = None
    #: Scores become softcap * tanh(score / softcap).
    softcap: float | None = None
    #: Whether the denominator of the softmax has a learned logit of each head, too.
    sinks: bool = False
    #: Whether a bias by distance is added to the scores.
    bias: bool = False
    #: The share of the weights that is dropped, and the seed of the generator that chooses them.
    dropout_p: float = 0.0
    dropout_seed: int | None = None

    @classmethod
    def of(
        cls,
        op: str,
        group: Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        chunk_order: list[int] | None = None,
        chunk_lengths: list[int] | None = None,
        cu_seqlens: torch.Tensor | None = None,
        document_edges: list[int] | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        query_chunk_order: list[int] | None = None,
        query_chunk_lengths: list[int] | None = None,
        layouts: torch.Tensor | None = None,
    ) -> AttentionSpec:
        """Returns the spec of a call; raises `ValueError` or `TypeError` for arguments that clash.

        `document_edges` are those that `cu_seqlens` would hold, `layouts` (see layouts.py) those of
        keys and queries instead of their chunks. torch leaves out options that have the default of
        the schema.
        """
        check_tensors(op, query, key, value, enable_gqa)
        if layouts is not None:
            given = (chunk_order, chunk_lengths, query_chunk_order, query_chunk_lengths)
            if any(chunks is not None for chunks in given):
                raise ValueError(f"{op}: layouts and chunks are both given, must be one")
            needs_positions = bias is not None or dropout_p > 0
            limits = (window_left, window_right, cu_seqlens, document_edges, document_ids, key_mask)
            keys, queries_as = _spread(
                op,
                layouts,
                group,
                (query.shape[2], key.shape[2]),
                ordered=is_causal or needs_positions or any(each is not None for each in limits),
                by_position=needs_positions,
            )
            chunk_order, chunk_lengths = keys
            query_chunk_order, query_chunk_lengths = queries_as
        for name, size in (("window_left", window_left), ("window_right", window_right)):
            if size is not None and size < 0:
                raise ValueError(f"{op}: {name}={size} must not be negative; None is no limit")
        layout = _layout_of(op, group, key.shape[2], chunk_order, chunk_lengths)
        right = 0 if is_causal else window_right
        if cu_seqlens is not None and document_edges is not None:
            raise ValueError(f"{op}: cu_seqlens and document_edges are both given, must be one")
        if cu_seqlens is not None:
            document_edges = _host_edges(op, cu_seqlens, query.device)
        documents = _documents(op, document_edges, layout.length)
        mask, hidden = _mask_of(
            op, query, layout, Mask(window_left, right, documents), document_ids, key_mask
        )
        relates = any(m.relates_positions for m in (mask if isinstance(mask, tuple) else (mask,)))
        if relates and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{op}: query has {query.shape[2]} rows and key {key.shape[2]}: is_causal, windows "
                "and documents require equal lengths"
            )
        check_scores(
            op,
            query,
            softcap=softcap,
            sinks=sinks,
            bias=bias,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )
        by_position = [
            name
            for name, used in (("bias", bias is not None), ("dropout_p", dropout_p > 0))
            if used
        ]
        queries = _queries_of(
            op, group, query, layout, by_position, query_chunk_order, query_chunk_lengths
        )
        if bias is not None:
            check_bias_length(op, bias, queries or layout, layout)
        if relates and queries is not None:
            raise NotImplementedError(
                f"{op}: is_causal, windows and documents require that queries are spread as keys "
                "are: query_chunk_order and query_chunk_lengths must be chunk_order and "
                "chunk_lengths"
            )
        return cls(
            layout=layout,
            mask=mask,
            hidden=hidden,
            scale=scale,
            method=rotate_method(),
            queries=queries,
            value_features=value_features_of(query, value),
            softcap=softcap,
            sinks=sinks is not None,
            bias=bias is not None,
            dropout_p=dropout_p,
            dropout_seed=seed_of(dropout_p, dropout_seed),
        )

    @property
    def rescores(self) -> bool:
        """Whether scores or weights are more than a scale and a mask make of them."""
        return self.softcap is not None or self.bias or self.dropout_p > 0

    def tiles(self, rank: int, owner: int, rows: int) -> tuple[Tile, ...]:
        """Returns the tiles of a rank's `rows` queries and the keys of rank `owner`."""
        if isinstance(self.mask, Mask):
            return self._tiles(self.mask, rank, owner, rows)
        return tuple(for_samples(self.mask, lambda mask: self._tiles(mask, rank, owner, rows)))

    def hidden_keys(
        self, tile: Tile, owner: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns `HiddenKeys.mask` of a tile of rank `owner`'s keys; None if it hides none."""
        return None if self.hidden is None else self.hidden.mask(tile, self.layout, owner, device)

    def _tiles(self, mask: Mask, rank: int, owner: int, rows: int) -> tuple[Tile, ...]:
        if mask.relates_positions:
            return tiles(self.layout, mask, rank, owner)
        return tiles_of_rows(self.layout, mask.keys, rows, owner)  # maybe of another sequence

    def shard_shapes(self, key: torch.Tensor) -> list[tuple[tuple[int, ...], ...]] | None:
        """Returns the shapes of each rank's keys and values; None when all are as this rank's."""
        if len(set(self.layout.lengths)) == 1:
            return None
        B, G, _, E = key.shape
        V = self.features(key)
        return [((B, G, length, E), (B, G, length, V)) for length in self.layout.lengths]

    def features(self, key: torch.Tensor) -> int:
        """Returns the number of features of a value."""
        return key.shape[3] if self.value_features is None else self.value_features

    def grad_shapes(self, key: torch.Tensor) -> list[tuple[int, ...]]:
        """Returns the shapes of the gradients of each rank's keys and values, one after another."""
        B, G, _, E = key.shape
        return [(B * length * G * (E + self.features(key)),) for length in self.layout.lengths]

    def call_name(self, op: str, key: torch.Tensor, *details: object) -> bytes:
        """Names a call for errors, and so that ranks notice when their specs differ.

        `details` are further things (hashable) that must be identical on all ranks.
        """
        B, G, _, E = key.shape
        return _call_name(op, str(key.dtype)[6:], (B, G, E), self, details)


@lru_cache(maxsize=512)
def _call_name(
    op: str, dtype: str, sizes: tuple[int, ...], spec: AttentionSpec, details: tuple[object, ...]
) -> bytes:
    B, G, E = sizes
    shape = [B, G, spec.layout.length, E]
    digest = zlib.crc32(repr((spec, *details)).encode())
    text = f"{dtype}{shape} layout+mask {digest:08x}"
    if spec.value_features is not None:
        text += f" value_features={spec.value_features}"
    if spec.dropout_seed is not None:
        # In words: every rank draws its own, unless told not to.
        text += f" dropout_seed={spec.dropout_seed} (seed all ranks alike)"
    return what_is(op, detail=text)


def value_features_of(query: torch.Tensor, value: torch.Tensor) -> int | None:
    """Returns the number of features of a value, if queries have another."""
    return None if value.shape[3] == query.shape[3] else value.shape[3]


def check_tensors(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """Raises unless queries, keys and values fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{op}: {name} must be (batch, heads, sequence, features), has shape "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}, must be float64, float32, bfloat16 or float16"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype} and query {query.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and query on {query.device}")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"{op}: key of shape {list(key.shape)} must have batch {query.shape[0]} and "
            f"{query.shape[3]} features, as query of shape {list(query.shape)}"
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{op}: key {list(key.shape)} and value {list(value.shape)} must have the same batch, "
            "heads and length"
        )
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared and not enable_gqa:
        raise ValueError(
            f"{op}: query has {heads} heads and key {shared}: must be equal, or pass "
            "enable_gqa=True"
        )
    if heads != shared and (shared == 0 or heads % shared != 0):
        raise ValueError(f"{op}: query has {heads} heads, not divisible by {shared} key heads")


@lru_cache(maxsize=512)
def _layout(world_size: int, order: tuple[int, ...], lengths: tuple[int, ...]) -> SequenceLayout:
    return SequenceLayout(world_size, order, lengths)


def _layout_of(
    op: str,
    group: Group,
    rows: int,
    chunk_order: list[int] | None,
    chunk_lengths: list[int] | None,
    *,
    of: str = "key",
) -> SequenceLayout:
    """Returns how a sequence is spread; raises `ValueError` if this rank's shard has other rows."""
    prefix, noun = ("", "keys") if of == "key" else ("query_", "queries")
    world_size, rank = group.world_size, group.rank
    count = len(chunk_order or chunk_lengths or range(world_size))
    order = tuple(range(count)) if chunk_order is None else tuple(chunk_order)
    if chunk_lengths is None:
        chunks = max(1, count // world_size)
        if rows % chunks != 0:
            raise ValueError(
                f"{op}: this rank's {rows} {noun} cannot be split into its {chunks} chunks "
                f"equally: pass {prefix}chunk_lengths"
            )
        lengths = (rows // chunks,) * count
    else:
        lengths = tuple(chunk_lengths)
    try:
        layout = _layout(world_size, order, lengths)
    except ValueError as error:
        raise ValueError(f"{op}: {prefix}{error}") from None
    if layout.lengths[rank] != rows:
        raise ValueError(
            f"{op}: {prefix}chunk_lengths give rank {rank} {layout.lengths[rank]} {noun}, {of} has "
            f"{rows}"
        )
    return layout


_Chunks: TypeAlias = tuple[list[int] | None, list[int] | None]


def _spread(
    op: str,
    layouts: torch.Tensor,
    group: Group,
    rows: tuple[int, int],
    *,
    ordered: bool,
    by_position: bool,
) -> tuple[_Chunks, _Chunks]:
    """Returns the chunks of keys and, where something depends on their positions, of queries."""
    known = decoded(op, layouts, group.world_size)
    place = (group.rank, group.world_size)
    keys = layout_of_keys(op, known, rows, *place, ordered=ordered)
    of_keys = list(keys.chunk_order), list(keys.chunk_lengths)
    if not by_position or rows[0] == rows[1]:
        return of_keys, (None, None)
    queries = layout_held(op, known, rows[0], *place)
    return of_keys, (list(queries.chunk_order), list(queries.chunk_lengths))


def _queries_of(
    op: str,
    group: Group,
    query: torch.Tensor,
    keys: SequenceLayout,
    by_position: list[str],
    chunk_order: list[int] | None,
    chunk_lengths: list[int] | None,
) -> SequenceLayout | None:
    """Returns how queries are spread, if not as the keys are and it matters.

    `by_position` are the options that depend on it.
    """
    rows = query.shape[2]
    if chunk_order is not None or chunk_lengths is not None:
        layout = _layout_of(op, group, rows, chunk_order, chunk_lengths, of="query")
        return None if layout == keys else layout
    if rows != keys.lengths[group.rank] and by_position:
        raise ValueError(
            f"{op}: query has {rows} rows and key {keys.lengths[group.rank]}: "
            f"{' and '.join(by_position)} with queries of another length require query_chunk_order "
            "or query_chunk_lengths"
        )
    return None


def _mask_of(
    op: str,
    query: torch.Tensor,
    keys: SequenceLayout,
    mask: Mask,
    document_ids: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> tuple[Mask | tuple[Mask, ...], HiddenKeys | None]:
    """Returns a mask with the documents and the hidden keys of each sample."""
    for name, tensor, dtypes in (
        ("document_ids", document_ids, (torch.int32, torch.int64)),
        ("key_mask", key_mask, (torch.bool,)),
    ):
        if tensor is not None:
            check_over_sequence(op, name, tensor, query, keys.length, dtypes)
    return masks_of(op, mask, query.shape[0], document_ids, key_mask, query.device)


def _host_edges(op: str, cu_seqlens: torch.Tensor, device: torch.device) -> list[int]:
    """Returns the values of `cu_seqlens`, for a call on `device`."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cu_seqlens must be a 1-D tensor of int32 or int64, is {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    check_readable(op, "cu_seqlens", cu_seqlens, device, "a sequence of ints or a CPU tensor")
    return _edges_read.get(cu_seqlens, cu_seqlens.tolist)


_edges_read: HostReads[list[int]] = HostReads()


def _documents(op: str, edges: list[int] | None, length: int) -> tuple[int, ...] | None:
    if edges is None:
        return None
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != length or edges != sorted(edges):
        raise ValueError(
            f"{op}: cu_seqlens={edges} must ascend from 0 to {length}, the length of the whole "
            "sequence"
        )
    return tuple(edges)
