"""Masks of transformers' models, as descriptions over positions in the whole sequence.

transformers composes a mask from functions of `(batch, head, query, key)` indices, which capture
tensors of this rank's part of the batch, and hands the composition to the attention
implementation's mask function. This module takes it apart: it recognises functions by their code,
gathers captured tensors to the whole sequence, and recomputes from the whole where documents begin
and how much padding precedes.

Shapes: B samples, S positions of the whole sequence.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import masking_utils as made
from transformers.utils.import_utils import is_tracing

from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_mask import SequenceMask, gather_sequence, runs
from symm_cp.integrations.transformers import kinds
from symm_cp.integrations.transformers.closures import captured
from symm_cp.ops.attention.flex.captures import captures_tensors

OP = "transformers' mask"

#: Factories of masks without `position_ids`.
_UNPOSITIONED = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")


@dataclass
class _Whole:
    """Tensors that the masks of one call need, gathered from all ranks at first use."""

    region: ParallelRegion
    #: How many queries and keys this rank has.
    lengths: tuple[int, int]
    #: (B, columns of this rank), or None.
    padding: torch.Tensor | None
    positions: torch.Tensor | None

    _made: dict[str, torch.Tensor] = field(default_factory=dict)
    _blocks: tuple[torch.Tensor, torch.Tensor] | None = None

    def gathered(self, name: str, shard: torch.Tensor, *, keys: bool = False) -> torch.Tensor:
        """Gathers a tensor over queries or keys from all ranks."""
        queries = self.lengths[0]
        lengths = self.lengths if keys else (queries, queries)
        return gather_sequence(OP, name, shard, self.region, lengths)

    def blocks(self, ids: torch.Tensor) -> torch.Tensor:
        """Gathers the block ids of positions from all ranks."""
        if self._blocks is not None and self._blocks[0] is ids:
            return self._blocks[1]
        whole = self.gathered("block_sequence_ids", ids)
        self._blocks = ids, whole
        return whole

    def _once(self, name: str, shard: torch.Tensor, *, keys: bool = False) -> torch.Tensor:
        # Cached by hand: Dynamo does not trace the lock of Python 3.11's cached_property.
        if name not in self._made:
            self._made[name] = self.gathered(name, shard, keys=keys)
        return self._made[name]

    @property
    def key_mask(self) -> torch.Tensor | None:
        """Which keys are not padding: (B, S_k) of bool."""
        if self.padding is None:
            return None
        return self._once("attention_mask", self.padding, keys=True)

    @property
    def position_ids(self) -> torch.Tensor:
        """(B, S), counted from the beginning of each document."""
        assert self.positions is not None
        return self._once("position_ids", self.positions)

    @property
    def documents(self) -> torch.Tensor | None:
        """(B, S) document ids: as in transformers, a jump in positions begins a document."""
        if self.positions is None:
            return None
        positions = self.position_ids
        jumps = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        if not _traced(positions) and not bool(jumps.any()):
            return None
        return jumps.cumsum(-1)

    def left_padding(self) -> torch.Tensor:
        """(B,): the number of padded positions before the first unpadded one."""
        if self.key_mask is None:
            return torch.zeros(1, dtype=torch.int64)
        return (self.key_mask.cumsum(-1) == 0).sum(-1)

    def chunks(self, size: int, *, remapped: bool) -> torch.Tensor:
        """(B, S): the attention chunk of each position."""
        counted = torch.arange(self.region.whole_length(self.lengths[0]))
        if not remapped:
            left = self.left_padding()
            return (counted.to(left.device) - left[:, None]) // size
        positions = self.position_ids
        documents = self.documents
        if documents is None:
            return (counted.to(positions.device) // size).expand_as(positions)
        # Without a jump transformers counts from index 0, whatever the first position is.
        one = (documents[:, -1:] == documents[:, :1]).all()
        return torch.where(one, counted.to(positions.device), positions) // size


def _traced(tensor: torch.Tensor) -> bool:
    """Whether the host cannot or must not read a tensor; the same test as in transformers."""
    return torch.compiler.is_compiling() or is_tracing(tensor)


@dataclass
class _Parts:
    """The conditions that a composition of mask functions combines with "and"."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    packed: bool = False
    chunks: list[tuple[int, bool]] = field(default_factory=list)
    #: A causal mask whose first block attends in both directions, and the lengths of these blocks.
    prefixed: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    rest: list[Callable[..., Any]] = field(default_factory=list)

    @property
    def relates_positions(self) -> bool:
        """Whether queries and keys must belong to the same sequence."""
        return self.causal or self.packed or self.limited or bool(self.prefixed)

    @property
    def limited(self) -> bool:
        """Whether there is a window, or chunks."""
        return self.left is not None or self.right is not None or bool(self.chunks)

    def limit(self, left: int | None, right: int | None) -> None:
        """Narrows the window."""
        if left is not None:
            self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)

    def add(
        self, whole: _Whole, function: Any, *, packed: bool = False, remapped: bool = False
    ) -> None:
        """Adds a function of indices.

        `packed`: packing composes it with others. `remapped`: its indices are positions within
        documents.
        """
        code = _kind(function)
        if code is kinds.AND:
            packs = _packs(function)
            for part in captured(function)["mask_functions"]:
                if packs and _kind(part) is kinds.PACKED:
                    self.packed = True
                else:
                    self.add(whole, part, packed=packs or packed, remapped=remapped)
        elif code is kinds.REMAPPED and packed:
            self.add(whole, captured(function)["mask_function"], packed=packed, remapped=True)
        elif code is kinds.CAUSAL:
            self.causal = True
        elif code is kinds.WINDOW:
            self.limit(captured(function)["sliding_window"] - 1, None)
        elif code is kinds.WINDOW_BOTH:
            size = captured(function)["sliding_window"]
            self.limit(size, size)
        elif code is kinds.CHUNKS:
            self.chunks.append((captured(function)["chunk_size"], remapped))
        elif not packed and (lengths := _prefixes(whole, function)) is not None:
            self.prefixed.append((function, lengths))
        elif code is not kinds.BIDIRECTIONAL:
            rest = rebuilt(whole, function, packed=packed)
            self.rest.append(_remapped(whole, rest) if remapped else rest)

    def mask(self, whole: _Whole) -> SequenceMask:
        """Returns the mask of the whole sequence."""
        prefixes = None
        for function, lengths in self.prefixed:
            if len(self.prefixed) == 1 and not self.limited:
                self.causal, prefixes = True, lengths
            else:  # other limits apply to the prefix, too
                self.rest.append(rebuilt(whole, function))
        ids = [whole.chunks(size, remapped=remapped) for size, remapped in self.chunks]
        if self.packed and whole.documents is not None:
            ids.append(whole.documents)
        rest = made.and_masks(*self.rest) if len(self.rest) > 1 else None
        return SequenceMask(
            is_causal=self.causal,
            window_left=self.left,
            window_right=self.right,
            document_ids=runs(*ids) if ids else None,
            key_mask=_with_holes(whole.key_mask),
            prefix_lengths=prefixes,
            mask_mod=rest or (self.rest[0] if self.rest else None),
            region=whole.region,
        )


def _with_holes(key_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a mask of keys, or None if it is known to hide none."""
    if key_mask is None or _traced(key_mask) or not bool(key_mask.all()):
        return key_mask
    return None


def _prefixes(whole: _Whole, function: Any) -> torch.Tensor | None:
    """Returns the length of the bidirectional block that begins each sample of a causal mask, (B,).

    Returns None for other functions, for further blocks, and if the host cannot read the ids.
    """
    if _kind(function) is not kinds.OR:
        return None
    parts = captured(function)["mask_functions"]
    if [_kind(part) for part in parts] != [kinds.CAUSAL, kinds.BLOCKS]:
        return None
    ids = captured(parts[1])["block_sequence_ids"]
    if _traced(ids):
        return None
    ids = whole.blocks(ids)
    lengths = ((ids >= 0) & (ids == ids[:, :1])).cumprod(1).sum(1)
    return lengths if bool((lengths == (ids >= 0).sum(1)).all()) else None


def _kind(function: Any) -> Any:
    """Returns the code of a mask function, which tells its kind; None if it has none."""
    return getattr(function, "__code__", None)


def _packs(function: Any) -> bool:
    """Returns whether a conjunction of mask functions keeps packed documents apart."""
    if positions_in(function) is None:
        return False
    parts = captured(function)["mask_functions"]
    return any(_kind(part) is kinds.PACKED for part in parts)


def _remapped(whole: _Whole, function: Any) -> Any:
    """Converts a mask function over positions within documents to the whole sequence."""
    if whole.documents is None:
        return function
    return made.remap_positions_for_packed_sequence(function, whole.position_ids)


def rebuilt(whole: _Whole, function: Any, *, packed: bool = False) -> Callable[..., Any]:
    """Returns a mask function over positions in the whole sequence.

    `packed`: packing composes it with others. Raises `NotImplementedError` for a function that
    captures tensors, unless it is transformers' own: the tensors' positions are unknown.
    """
    code = _kind(function)
    if code is kinds.AND:
        packs = _packs(function)
        parts = [
            _documents(whole)
            if packs and _kind(part) is kinds.PACKED
            else rebuilt(whole, part, packed=packs or packed)
            for part in captured(function)["mask_functions"]
        ]
        return made.and_masks(*parts)
    if code is kinds.OR:
        parts = captured(function)["mask_functions"]
        return made.or_masks(*(rebuilt(whole, part, packed=packed) for part in parts))
    if code is kinds.REMAPPED and packed:
        inner = captured(function)["mask_function"]
        return _remapped(whole, rebuilt(whole, inner, packed=packed))
    if code is kinds.CHUNKS:
        batch = len(captured(function)["left_padding"])
        left = whole.left_padding().expand(batch)
        return made.chunked_overlay(captured(function)["chunk_size"], left)
    if code is kinds.PADDING:
        mask = whole.gathered("a mask of keys", captured(function)["padding_mask"], keys=True)
        return made.padding_mask_function(mask)
    if code is kinds.PACKED:
        ids = whole.gathered("ids of sequences", captured(function)["packed_sequence_mask"])
        return made.packed_sequence_mask_function(ids)
    if code is kinds.BLOCKS:
        return made.blockwise_overlay(whole.blocks(captured(function)["block_sequence_ids"]))
    if code is None or _holds_tensors(function):
        name = getattr(function, "__qualname__", repr(function))
        where = getattr(function, "__module__", "")
        raise NotImplementedError(
            f"{OP}: {where}.{name} captures tensors of this rank's part of the sequence, whose "
            "positions are unknown. Use attn_implementation="
            '"flex_attention" and pass a BlockMask of the whole sequence as attention_mask'
        )
    return function  # type: ignore[no-any-return]


def _documents(whole: _Whole) -> Callable[..., Any]:
    """Returns the mask function that keeps the documents of the whole sequence apart."""
    if whole.documents is None:
        return made.bidirectional_mask_function
    return made.packed_sequence_mask_function(whole.documents)


def _holds_tensors(function: Any) -> bool:
    if not torch.compiler.is_compiling():
        return captures_tensors(function)
    values = list(captured(function).values())
    for value in values:
        if isinstance(value, torch.Tensor):
            return True
        if getattr(value, "__code__", None) is not None and _holds_tensors(value):
            return True
    return False


def with_packing(function: Any, caller: types.FrameType, batch: int) -> Any:
    """Composes a mask function with transformers' for packed documents, if there may be some.

    transformers looks for jumps in `position_ids` of each rank's part, and some ranks may see none.
    Its mask functions do not show whether it looked; `caller`, the frame that composed them, does.
    """
    if positions_in(function) is not None:
        return function
    if caller.f_globals.get("__name__") != made.__name__:
        return function  # composed elsewhere, and complete
    factory, names = caller.f_code.co_name, caller.f_locals
    if factory in _UNPOSITIONED:
        return function
    needed = ("position_ids", "attention_mask", kinds.CACHE, "block_sequence_ids")
    if not names.keys() >= {*needed}:
        raise NotImplementedError(
            f"{OP}: cannot tell whether {factory} of transformers {transformers.__version__} "
            f"looked for packed documents: it has the variables {sorted(names)}. Use another "
            "version of transformers, or another attn_implementation"
        )
    positions, mask, cache, blocks = [names[name] for name in needed]
    if positions is None or mask is not None or cache is not None:
        return function

    # The documents of all positions are recomputed from the whole sequence.
    ids = positions.expand(batch, -1)
    documents = made.packed_sequence_mask_function(ids)
    if blocks is None:
        return made.and_masks(documents, made.remap_positions_for_packed_sequence(function, ids))
    inner, overlay = captured(function)["mask_functions"]
    remapped = made.remap_positions_for_packed_sequence(inner, ids)
    if kinds.BLOCKS_END_WITH_DOCUMENTS:
        return made.and_masks(documents, made.or_masks(remapped, overlay))
    return made.or_masks(made.and_masks(documents, remapped), overlay)


def positions_in(function: Any) -> torch.Tensor | None:
    """Returns the `position_ids` of packed documents that a mask function captures."""
    code = _kind(function)
    if code is kinds.REMAPPED:
        positions: torch.Tensor = captured(function)["position_ids"]
        return positions
    if code is kinds.AND or code is kinds.OR:
        for part in captured(function)["mask_functions"]:
            found = positions_in(part)
            if found is not None:
                return found
    return None


def sequence_mask(
    region: ParallelRegion, function: Any, lengths: tuple[int, int], padding: torch.Tensor | None
) -> SequenceMask:
    """Converts a mask function of transformers to a mask of the whole sequence.

    Collective: each rank passes the numbers of its queries and keys as `lengths`, and its part of
    the attention mask, (B, keys), as `padding`.
    """
    positions = positions_in(function)
    whole = _Whole(region, lengths, padding, positions)
    parts = _Parts()
    parts.add(whole, function)
    if parts.relates_positions and lengths[0] != lengths[1]:
        given = "" if padding is None else f"attention_mask of shape {list(padding.shape)} gives "
        raise ValueError(
            f"{OP}: {given}{lengths[1]} keys for {lengths[0]} queries; the numbers must be equal: "
            "pass this rank's part of the sequence, which symm_cp.shard_batch cuts"
        )
    return parts.mask(whole)
