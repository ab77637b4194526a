"""Attention tile by tile: kernels on parts of the keys, merged as they arrive.

`_own` chooses torch's or this project's kernel for a tile.

Shapes: B batch, H query heads, G key/value heads (a divisor of H), S rows, E features of a head.
Partial results are merged in float32 (float64 for float64), so that errors do not grow with the
number of parts. torch's CPU kernel crashes the process if there are no keys; it is not called then.
"""

from __future__ import annotations

import torch

from symm_cp.cuda import has_streams
from symm_cp.cuda.cached import cached
from symm_cp.ops.attention import kernels, native_tiles
from symm_cp.ops.attention.scoring import Gradients, ScoredTiles, TileMask, in_band
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule.tiles import Tile, in_bands, in_rows, squares
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result


def rows_first(like: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns an empty (B, H, S, E) tensor with the heads of a row adjacent, as from kernels."""
    B, H, S, E = shape
    return new_result(like, (B, S, H, E), dtype).transpose(1, 2)


def empty_output(
    query: torch.Tensor, features: int, *, device: str | torch.device | None = None
) -> torch.Tensor:
    """Returns an empty (B, H, S, features) with the queries' strides or order of dimensions."""
    B, H, S, E = query.shape
    if features == E:
        return torch.empty_like(query, device=device)
    if query.transpose(1, 2).is_contiguous():
        return query.new_empty(B, S, H, features, device=device).transpose(1, 2)
    return query.new_empty(B, H, S, features, device=device)


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns (B, H, S, E) in another dtype; a copy has the tensor's order of dimensions."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.is_contiguous():
        return new_result(tensor, tensor.shape, dtype).copy_(tensor)
    if tensor.transpose(1, 2).is_contiguous():
        return rows_first(tensor, tensor.shape, dtype).copy_(tensor)
    return tensor.to(dtype)


def dense_features(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if the features of a position are not adjacent.

    Also copies if positions share elements: torch's kernel allocates a tensor like it, in which
    features are not adjacent, and writes wrong values there.
    """
    if tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous():
        return tensor  # the usual strides, known at once
    features = tensor.shape[-1]
    apart = all(
        stride >= features or stride == 0 or length == 1
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    return tensor if tensor.stride(-1) == 1 and apart else tensor.contiguous()


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a boolean mask as kernels take it: zeros, and -inf where it is False."""
    keys = visible.shape[-1]
    # For 16-bit dtypes the CPU's kernel takes masks in float32. Other kernels take `dtype`, with
    # rows that begin at multiples of MASK_ALIGN elements.
    on_cpu = visible.device.type == "cpu"
    dtype, padding = (wide(dtype), 0) if on_cpu else (dtype, -keys % kernels.MASK_ALIGN)
    shape = (*visible.shape[:-1], keys + padding)
    bias = torch.zeros(shape, dtype=dtype, device=visible.device)[..., :keys]
    return bias.masked_fill_(visible.logical_not(), -torch.inf)


@cached(maxsize=16)
def _band(
    device: torch.device,
    rows: int,
    keys: int,
    low: int | None,
    high: int | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The additive mask of a tile with a band, and which of its rows see no key."""
    visible = in_band(rows, keys, low, high, device)
    return additive(visible, dtype), visible.any(1).logical_not()


def _mask_of(
    tile: Tile, query: torch.Tensor, spec: AttentionSpec, owner: int, own: ScoredTiles | None
) -> TileMask:
    """Returns the mask of a tile as this project's kernels (`own`) or torch's take it."""
    hidden = spec.hidden_keys(tile, owner, query.device)
    visible, fully_masked = (None, None) if hidden is None else hidden
    mask = None if visible is None else additive(visible, query.dtype)
    if own is not None:
        return own.tile_mask(tile, owner, mask)
    if tile.full or (tile.causal and (mask is None or query.device.type == "cpu")):
        return TileMask(mask=mask, high=tile.high, fully_masked=fully_masked)
    rows, keys = tile.q_end - tile.q_begin, tile.k_end - tile.k_begin
    band, without_keys = _band(query.device, rows, keys, tile.low, tile.high, query.dtype)
    if mask is None:
        return TileMask(mask=band, fully_masked=without_keys)
    return TileMask(mask=band + mask, fully_masked=fully_masked)


# The fewest queries and keys for which this project's kernels are faster than torch's: 0.4 to 0.8
# of its time forward, 0.1 to 0.95 backward, for up to 128 of each on an AMD EPYC.
_OWN_LENGTH = 16


def _own(
    scored: ScoredTiles | None,
    tile: Tile,
    query: torch.Tensor,
    key: torch.Tensor,
    spec: AttentionSpec,
    *,
    backward: bool = False,
) -> ScoredTiles | None:
    """Returns the arguments of this project's kernels for a tile; None if torch's compute it.

    This project's kernels compute all tiles if `scored` is given; on CPU also bands, where they
    skip hidden scores, and all but small tiles, where they are faster. Their backward pass uses one
    thread for each key head of a sample.
    """
    if scored is not None or query.device.type != "cpu":
        return scored
    if tile.full or tile.causal:
        length = min(tile.q_end - tile.q_begin, tile.k_end - tile.k_begin)
        few_threads = not backward or torch.get_num_threads() <= key.shape[0] * key.shape[1]
        if length < _OWN_LENGTH or not few_threads or not native_tiles.has_blocks(query.dtype):
            return None
    return ScoredTiles(query, spec)


# Rows per part of a causal tile with hidden keys: devices' kernels take either `causal` or a mask.
_MASKED_ROWS = 256


def _for_kernels(tile: Tile, query: torch.Tensor, spec: AttentionSpec) -> tuple[Tile, ...]:
    """Divides a tile into parts that the kernels of the device take."""
    if query.device.type == "cpu":
        return (tile,)
    if tile.causal and spec.hidden is not None:
        return in_rows(tile, _MASKED_ROWS)
    return tuple(part for band in in_bands(tile) for part in squares(band))


_ALL = slice(0, None)


def _rows(tensor: torch.Tensor, begin: int, end: int, samples: slice = _ALL) -> torch.Tensor:
    """Returns rows of some samples of (B, H, S, ...), as a view unless they are all."""
    if samples != _ALL:
        tensor = tensor[samples]
    whole = begin == 0 and end == tensor.shape[2]
    return tensor if whole else tensor[:, :, begin:end]


def _queries(tile: Tile, tensor: torch.Tensor) -> torch.Tensor:
    return _rows(tensor, tile.q_begin, tile.q_end, tile.samples)


def _keys(tile: Tile, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    return _rows(tensor, tile.k_begin - first, tile.k_end - first, tile.samples)


class Forward:
    """The attention of one rank's queries, merged over parts of the keys.

    `parts` is the largest number of tiles of a row, if known. If it is at most two, they are merged
    in the dtype of the queries: their sum is rounded only once. `sinks` (H,) add a score to every
    row, for a value of zero. `scored` is given if torch's kernels do not suffice.
    """

    def __init__(
        self,
        query: torch.Tensor,
        spec: AttentionSpec,
        parts: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
        scored: ScoredTiles | None = None,
    ) -> None:
        self._query, self._sinks, self._scored = query, sinks, scored
        self._spec = spec
        narrow = parts is not None and parts <= 2
        self._dtype = query.dtype if narrow else wide(query.dtype)
        # The output has the strides of the queries, as kernels return it.
        features = query.shape[3] if spec.value_features is None else spec.value_features
        self._like = empty_output(query, features, device="meta")
        self._merged: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(
        self, tile: Tile, key: torch.Tensor, value: torch.Tensor, owner: int, first: int = 0
    ) -> None:
        """Adds a tile of rank `owner`'s keys and values, whose first row is `first`."""
        for part in _for_kernels(tile, self._query, self._spec):
            own = _own(self._scored, part, self._query, key, self._spec)
            mask = _mask_of(part, self._query, self._spec, owner, own)
            self._add(part, key, value, own, mask, first)

    def add_masked(
        self, tile: Tile, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, owner: int
    ) -> None:
        """Adds a tile with a mask, (B or 1, H or 1, rows, keys) of bool."""
        own = _own(self._scored, tile, self._query, key, self._spec)
        mask = additive(visible, self._query.dtype)
        if own is not None:
            self._add(tile, key, value, own, own.tile_mask(tile, owner, mask))
            return
        fully_masked = visible.any(-1).logical_not()
        self._add(tile, key, value, None, TileMask(mask=mask, fully_masked=fully_masked))

    def _add(
        self,
        tile: Tile,
        key: torch.Tensor,
        value: torch.Tensor,
        own: ScoredTiles | None,
        mask: TileMask,
        first: int = 0,
    ) -> None:
        q, k, v = _queries(tile, self._query), *(_keys(tile, t, first) for t in (key, value))
        if q.numel() == 0 or k.numel() == 0:
            return
        if own is not None:
            merged = (_queries(tile, tensor) for tensor in self._so_far())
            native_tiles.attend(q, k, v, own.scoring(tile), mask, *merged)
            return
        scale = self._spec.scale
        out, lse = kernels.forward(q, k, v, mask.mask, causal=mask.causal, scale=scale)
        if mask.fully_masked is not None:  # the kernel returns 0 for them
            lse = lse.masked_fill(mask.fully_masked, -torch.inf)
        self.merge(tile, out, lse)

    def merge(self, tile: Tile, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges attention of a tile's rows to its keys; may keep and change `out` and `lse`."""
        like = self._like
        if self._merged is None and (out.shape, out.stride()) == (like.shape, like.stride()):
            self._merged = out.to(self._dtype), lse
            return
        merged, merged_lse = (_queries(tile, tensor) for tensor in self._so_far())
        kernels.merge(merged, merged_lse, out, lse)

    def _so_far(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._merged is None:
            query, on_streams = self._query, has_streams(self._query.device)
            # One call; empty_like of a tensor on another device makes 75 in Python.
            out = torch.empty_strided(
                self._like.shape, self._like.stride(), dtype=self._dtype, device=query.device
            )
            if on_streams:  # on CPU `result` zeroes rows that see no key, if there are any
                out.zero_()
            lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide(query.dtype))
            if not on_streams and self._sinks is not None:
                # Starting with the sinks, like a first key, saves a pass over the output.
                out.zero_()
                lse.copy_(self._sinks.unsqueeze(-1))
                self._sinks = None
            self._merged = out, lse
        return self._merged

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, in the dtype of the queries, and its log-sum-exp."""
        out, lse = self._so_far()
        if not has_streams(out.device):
            fully_masked = lse == -torch.inf
            if fully_masked.any():
                out.masked_fill_(fully_masked.unsqueeze(-1), 0.0)
        if self._sinks is not None:
            lse = _with_sinks(out, lse, self._sinks)
        return as_dtype(out, self._query.dtype), lse.contiguous()


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Scales `out` in place for a further score of each head; returns the new log-sum-exp."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    # Rows that see neither a key nor a sink get inf here, so that their weight is 0.
    out.mul_(torch.exp(lse - total.masked_fill(total == -torch.inf, torch.inf)).unsqueeze(-1))
    return total


def grad_of_sinks(
    sinks: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradient of the sinks from the rows of `out`, in the sinks' dtype."""
    # A sink's weight in a row; 0 where the log-sum-exp, and so the sink, is -inf.
    weight = torch.exp(
        sinks.to(lse.dtype).unsqueeze(-1) - lse.masked_fill(lse == -torch.inf, torch.inf)
    )
    inner = -(grad_out.to(lse.dtype) * out).sum(-1)  # the value vector of a sink is zero
    return (weight * inner).sum((0, 2)).to(sinks.dtype)


class Total:
    """Sums parts of a tensor, some rows at a time; zero where nothing is added."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total
        self._empty = True

    def add(self, begin: int, end: int, part: torch.Tensor, samples: slice = _ALL) -> None:
        """Adds to some rows of some samples."""
        rows = _rows(self.total, begin, end, samples)
        if self._empty and rows.shape == self.total.shape:
            rows.copy_(part)
        else:
            self.finish()
            rows.add_(part)
        self._empty = False

    def rows(self, begin: int, end: int, samples: slice = _ALL) -> torch.Tensor:
        """Returns some rows of some samples, to add to."""
        self.finish()
        return _rows(self.total, begin, end, samples)

    def finish(self) -> None:
        """Writes zeros if nothing was added."""
        if self._empty:
            self.total.zero_()
            self._empty = False


class Backward:
    """The gradients of one rank's queries, and of each part of the keys and values.

    `scored` is as in `Forward`; a `bias` that needs a gradient requires it.
    """

    def __init__(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
        *,
        scored: ScoredTiles | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._query, self._spec, self._scored = query, spec, scored
        self._grad_out, self._out = dense_features(grad_out), dense_features(out)
        # Makes heads of a row adjacent, as the CPU's kernel returns lse: other strides cost a fifth
        # more time there. Other kernels take lse unchanged.
        if query.device.type == "cpu":
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        # exp(score - lse) is the weight of a key: inf gives rows that see no key no weights.
        self._lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        self._grad_query = Total(rows_first(query, query.shape, wide(query.dtype)))
        self._inner: torch.Tensor | None = None
        self._grad_bias: torch.Tensor | None = None
        if bias is not None:
            shape = (query.shape[0], *bias.shape)
            self._grad_bias = query.new_zeros(shape, dtype=wide(query.dtype))

    def add_tiles(
        self,
        tiles: tuple[Tile, ...],
        key: torch.Tensor,
        value: torch.Tensor,
        partials: tuple[torch.Tensor, ...],
        owner: int,
        first: int = 0,
    ) -> None:
        """Adds the tiles of rank `owner`'s keys and values, whose gradients go to `partials`.

        `first` is the first row of keys, values and `partials`.
        """
        totals = Total(partials[0]), Total(partials[1])
        for tile in tiles:
            for part in _for_kernels(tile, self._query, self._spec):
                own = _own(self._scored, part, self._query, key, self._spec, backward=True)
                mask = _mask_of(part, self._query, self._spec, owner, own)
                self._add(part, key, value, totals, own, mask, first)
        for total in totals:
            total.finish()

    def add_masked(
        self,
        tile: Tile,
        key: torch.Tensor,
        value: torch.Tensor,
        totals: tuple[Total, Total],
        visible: torch.Tensor | None,
        owner: int,
    ) -> None:
        """Adds a tile with a mask or without; `totals` get the gradients of its keys and values."""
        own = _own(self._scored, tile, self._query, key, self._spec, backward=True)
        additive_mask = None if visible is None else additive(visible, self._query.dtype)
        mask = TileMask(mask=additive_mask)
        if own is not None:
            mask = own.tile_mask(tile, owner, additive_mask)
        self._add(tile, key, value, totals, own, mask)

    def _add(
        self,
        tile: Tile,
        key: torch.Tensor,
        value: torch.Tensor,
        totals: tuple[Total, Total],
        own: ScoredTiles | None,
        mask: TileMask,
        first: int = 0,
    ) -> None:
        q, k, v = _queries(tile, self._query), *(_keys(tile, t, first) for t in (key, value))
        if q.numel() == 0 or k.numel() == 0:
            return
        grad_out, lse = (_queries(tile, tensor) for tensor in (self._grad_out, self._lse))
        keys = (tile.k_begin - first, tile.k_end - first)
        places = (self._grad_query, (tile.q_begin, tile.q_end)), *((t, keys) for t in totals)
        if own is None:
            out, scale = _queries(tile, self._out), self._spec.scale
            parts = kernels.backward(
                grad_out, q, k, v, out, lse, mask.mask, causal=mask.causal, scale=scale
            )
            for (total, extent), part in zip(places, parts, strict=True):
                total.add(*extent, part, tile.samples)
            return
        if self._inner is None:
            self._inner = native_tiles.inner_products(self._grad_out, self._out)
        inner = _queries(tile, self._inner)
        of_bias = None if self._grad_bias is None else self._grad_bias[tile.samples]
        of_query, of_key, of_value = (t.rows(*extent, tile.samples) for t, extent in places)
        grads = Gradients(of_query, of_key, of_value, of_bias)
        native_tiles.add_gradients(grad_out, q, k, v, lse, inner, own.scoring(tile), mask, grads)

    def grad_query(self) -> torch.Tensor:
        """Returns the gradient of the queries, in their dtype."""
        self._grad_query.finish()
        return as_dtype(self._grad_query.total, self._query.dtype)

    def grad_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the bias from this rank's queries, in its dtype."""
        assert self._grad_bias is not None
        return self._grad_bias.sum(0).to(bias.dtype)
