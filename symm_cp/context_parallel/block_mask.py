"""A `BlockMask` of the whole sequence, cut to the queries of one rank.

A load balancer gives the rank its queries; its keys are the keys of all ranks, gathered rank after
rank. Local indices refer to these queries and keys, global indices to the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from symm_cp.context_parallel.load_balancers import LoadBalancer, Sequential
from symm_cp.ops.attention.flex.mask import (
    AREA,
    EMPTY,
    FULL,
    PARTIAL,
    Modifier,
    block_states,
    check_lengths,
    evaluate,
    extents,
    within,
)

#: Looks up the positions of a sample's local indices.
_Index = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def local_block_mask(
    block_mask: BlockMask,
    load_balancer: LoadBalancer,
    rank: int,
    *,
    kv_load_balancer: LoadBalancer | None = None,
) -> BlockMask:
    """Returns the mask of a rank's queries against the gathered keys.

    Same result as:

        local = create_block_mask(
            lambda b, h, q_idx, kv_idx: block_mask.mask_mod(b, h, q[q_idx], k[kv_idx]),
            B, H, len(q), len(k), BLOCK_SIZE=block_mask.BLOCK_SIZE,
        )

    with q = load_balancer.positions(rank) and k = kv_load_balancer.permutation(). Any lengths work,
    also if block boundaries are not chunk boundaries: a local block made of several global blocks
    that are neither all empty nor all full is evaluated again, a few at a time. Blocks must agree
    with `block_mask.mask_mod`, as `create_block_mask` makes them, unless `mask_mod` is torch's
    `noop_mask`.

    `kv_load_balancer` says how keys are spread; by default like queries, or evenly if the number of
    keys differs. The result keeps `block_mask` as `symm_cp_global`, and has a mask for each sample
    if the load balancer has a layout for each. The host waits for the GPU, so no mask can be cut
    while a graph is captured. Raises `ValueError` for other lengths or an invalid rank.
    """
    if load_balancer.samples or (kv_load_balancer is not None and kv_load_balancer.samples):
        result = _of_samples(block_mask, load_balancer, rank, kv_load_balancer)
        result.symm_cp_global = block_mask
        return result
    keys = _keys(block_mask, load_balancer, kv_load_balancer)
    _check(block_mask, load_balancer, keys, rank)
    device = block_mask.kv_num_blocks.device
    q = load_balancer.positions(rank, device=device)
    k = keys.permutation(device=device)
    states = _local_states(block_mask, q, k)
    separate = block_mask.full_kv_num_blocks is not None
    partial = states == PARTIAL if separate else states != EMPTY
    result = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *(_ordered(states == FULL) if separate else (None, None)),
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=_local_mask_mod(block_mask, q, k),
        seq_lengths=(len(q), len(k)),
    )
    result.symm_cp_global = block_mask
    result.symm_cp_cut = load_balancer, keys, rank
    return result


class Cuts:
    """Caches the latest cut masks: all layers of a model use the same few.

    Cutting makes the host wait for the device, several times.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._latest: list[tuple[tuple[object, ...], BlockMask]] = []

    def get(
        self, block_mask: BlockMask, queries: LoadBalancer, keys: LoadBalancer, rank: int
    ) -> BlockMask:
        """Returns `local_block_mask(block_mask, queries, rank, kv_load_balancer=keys)`."""
        blocks = (
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
        )
        inference = any(t is not None and t.is_inference() for t in blocks)
        versions = [None if t is None or inference else t._version for t in blocks]
        key = (id(block_mask), *versions, queries, keys, rank)
        for known, cut in self._latest:
            if known == key and not inference:  # the cut keeps the mask alive, so its id is unique
                return cut
        cut = local_block_mask(block_mask, queries, rank, kv_load_balancer=keys)
        self._latest = [*self._latest[1 - self._most :], (key, cut)]
        return cut


def _of_samples(
    block_mask: BlockMask, queries: LoadBalancer, rank: int, keys: LoadBalancer | None
) -> BlockMask:
    """Returns the masks of all samples, each cut by its own layout, as one mask."""
    count = len(queries.samples)
    keys = _keys(block_mask, queries, keys)
    if count != len(keys.samples) or block_mask.kv_num_blocks.shape[0] not in (1, count):
        raise ValueError(
            f"local_block_mask: {queries} is for {count} samples: keys must be spread sample by "
            f"sample, too, and block_mask must be for 1 or {count}, not "
            f"{block_mask.kv_num_blocks.shape[0]}"
        )
    masks = [
        local_block_mask(
            blocks_of_sample(block_mask, b),
            queries.samples[b],
            rank,
            kv_load_balancer=keys.samples[b],
        )
        for b in range(count)
    ]
    device = block_mask.kv_num_blocks.device
    q, k = queries.positions(rank, device=device), keys.permutation(device=device)
    names = ["kv_num_blocks", "kv_indices"]
    if block_mask.full_kv_num_blocks is not None:
        names += ["full_kv_num_blocks", "full_kv_indices"]
    return BlockMask.from_kv_blocks(
        *(torch.cat([getattr(mask, name) for mask in masks]) for name in names),
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=_local_mask_mod(block_mask, q, k),
        seq_lengths=(q.shape[1], k.shape[1]),
    )


def blocks_of_sample(block_mask: BlockMask, sample: int) -> BlockMask:
    """Returns the mask of one sample of a batch."""
    of_all = block_mask.kv_num_blocks.shape[0] == 1

    def blocks(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or of_all else tensor[sample : sample + 1]

    def own(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return block_mask.mask_mod(b + sample, h, q_idx, kv_idx)

    return BlockMask.from_kv_blocks(
        blocks(block_mask.kv_num_blocks),
        blocks(block_mask.kv_indices),
        blocks(block_mask.full_kv_num_blocks),
        blocks(block_mask.full_kv_indices),
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=noop_mask if block_mask.mask_mod is noop_mask else own,
        seq_lengths=block_mask.seq_lengths,
    )


def local_score_mod(
    score_mod: Modifier,
    load_balancer: LoadBalancer,
    rank: int,
    *,
    kv_load_balancer: LoadBalancer | None = None,
    device: torch.device | str = "cpu",
) -> Modifier:
    """Returns a `score_mod` for a rank's queries and gathered keys, from the global `score_mod`.

    Same result as:

        lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h, q[q_idx], k[kv_idx])

    with q = load_balancer.positions(rank) and k = kv_load_balancer.permutation(), by default with
    the same balancer; both on `device`, like the indices. Raises `ValueError` for an invalid rank,
    `NotImplementedError` if each sample has its own layout.
    """
    _check_rank(load_balancer, rank)
    keys = load_balancer if kv_load_balancer is None else kv_load_balancer
    for balancer in (load_balancer, keys):
        _ = balancer.layout  # raises unless all samples share a layout
    q = _index(load_balancer.positions(rank, device=device))
    k = _index(keys.permutation(device=device))

    def local(
        score: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q_idx: torch.Tensor,
        kv_idx: torch.Tensor,
    ) -> torch.Tensor:
        return score_mod(score, b, h, q(b, q_idx), k(b, kv_idx))

    return local


def _keys(block_mask: BlockMask, queries: LoadBalancer, keys: LoadBalancer | None) -> LoadBalancer:
    if keys is not None:
        return keys
    length = block_mask.seq_lengths[1]
    same = length == queries.seq_length
    return queries if same else Sequential(length, queries.world_size)


def _check_rank(load_balancer: LoadBalancer, rank: int) -> None:
    if not 0 <= rank < load_balancer.world_size:
        raise ValueError(
            f"{rank=} must be in [0, {load_balancer.world_size}), the ranks of {load_balancer}"
        )


def _check(block_mask: BlockMask, queries: LoadBalancer, keys: LoadBalancer, rank: int) -> None:
    _check_rank(queries, rank)
    check_lengths(block_mask, queries.seq_length, keys.seq_length)
    if block_mask.kv_num_blocks.dim() != 3:
        raise ValueError(
            "local_block_mask: block_mask must have batch and heads, its kv_num_blocks has shape "
            f"{list(block_mask.kv_num_blocks.shape)}"
        )


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's number of blocks, and all columns, with the blocks' columns first."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _index(positions: torch.Tensor) -> _Index:
    """Returns a lookup in positions (S,), or (B, S) of each sample.

    Indices beyond the end (padded blocks) get the last position.
    """
    # Not empty, since the mask of a rank without rows is evaluated, too.
    padded = positions if positions.shape[-1] else positions.new_zeros(*positions.shape[:-1], 1)
    last = padded.shape[-1] - 1
    if positions.dim() == 1:
        return lambda b, index: padded[index.clamp(max=last)]
    return lambda b, index: padded[b, index.clamp(max=last)]


def _local_mask_mod(block_mask: BlockMask, q: torch.Tensor, k: torch.Tensor) -> Modifier:
    """Returns a `mask_mod` of local indices; `q` and `k` are the positions of rows and columns."""
    mask_mod = block_mask.mask_mod
    if mask_mod is noop_mask:
        mask_mod = _mask_of_blocks(block_mask)
    rows, columns = q.shape[-1], k.shape[-1]
    to_query, to_key = _index(q), _index(k)

    def local(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        inside = (q_idx < rows) & (kv_idx < columns)
        return mask_mod(b, h, to_query(b, q_idx), to_key(b, kv_idx)) & inside

    return local


def _mask_of_blocks(block_mask: BlockMask) -> Modifier:
    """Returns the mask that the blocks of a block mask alone describe."""
    visible = block_states(block_mask) != EMPTY
    if visible.all():
        return noop_mask
    B, H = visible.shape[:2]
    rows, columns = block_mask.BLOCK_SIZE

    def lookup(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return visible[b.clamp(max=B - 1), h.clamp(max=H - 1), q_idx // rows, kv_idx // columns]

    return lookup


# --- blocks ----------------------------------------------------------------------------------


class _Blocks:
    """Along one dimension: the global blocks that each local block is made of.

    `sources` (blocks, n) are their numbers, some repeated. `short` marks a last block that extends
    beyond the end, `exact` blocks that equal one global block.
    """

    def __init__(self, positions: torch.Tensor, size: int, length: int) -> None:
        self.positions, self.size = positions, size
        count, held = -(-len(positions) // size), min(size, len(positions))
        padded = torch.cat((positions, positions[-1:].expand(count * held - len(positions))))
        self.sources = _distinct(padded.view(count, held) // size)
        begin = torch.arange(0, count * size, size, device=positions.device)
        held_by = (len(positions) - begin).clamp(max=size)
        whole = (length - self.sources[:, 0] * size).clamp(max=size)
        self.short = held_by < size
        self.exact = (self.sources == self.sources[:, :1]).all(1) & (held_by == whole)

    def slice(self, block: int) -> torch.Tensor:
        """Returns the positions of a block."""
        return self.positions[block * self.size : (block + 1) * self.size]


def _distinct(ids: torch.Tensor) -> torch.Tensor:
    """Returns the distinct numbers of each row, padded with the first one."""
    if len(ids) == 0:
        return ids.new_zeros(0, 1)
    ordered = ids.sort(-1).values
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    width = int(fresh.sum(-1).max())
    first = torch.argsort(fresh.int(), dim=-1, descending=True, stable=True)[:, :width]
    kept = torch.arange(width, device=ids.device) < fresh.sum(-1, keepdim=True)
    return torch.where(kept, ordered.gather(-1, first), ordered[:, :1])


def _local_states(block_mask: BlockMask, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Returns the state of each block of the local mask, as `block_states` does."""
    states, sizes = block_states(block_mask), block_mask.BLOCK_SIZE
    if block_mask.mask_mod is noop_mask:
        states = states.clamp(max=PARTIAL) * FULL
    rows = _Blocks(q, sizes[0], block_mask.seq_lengths[0])
    columns = _Blocks(k, sizes[1], block_mask.seq_lengths[1])
    low, high = (_reduced(states, rows, columns, largest=largest) for largest in (False, True))
    local = torch.full_like(low, PARTIAL)
    local.masked_fill_(high == EMPTY, EMPTY)
    # torch lists a block that extends beyond the end as partial: the mask hides the excess.
    short = rows.short[:, None] | columns.short
    local.masked_fill_((low == FULL) & ~short, FULL)
    copied = rows.exact[:, None] & columns.exact
    mixed = (high != EMPTY) & (low != FULL) & ~copied
    for row, some in _some_columns(mixed, sizes, states.shape[:2].numel()):
        local[:, :, row, some] = _evaluated(block_mask, states, rows, columns, row, some)
    return local


def _reduced(
    states: torch.Tensor, rows: _Blocks, columns: _Blocks, *, largest: bool
) -> torch.Tensor:
    """Returns the smallest or largest state of the blocks that a local block is made of."""
    for dim, blocks in ((2, rows), (3, columns)):
        sources = states.index_select(dim, blocks.sources.flatten())
        sources = sources.unflatten(dim, blocks.sources.shape)
        states = sources.amax(dim + 1) if largest else sources.amin(dim + 1)
    return states


def _some_columns(
    mixed: torch.Tensor, sizes: tuple[int, int], copies: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields rows of blocks, each with a batch of mixed columns to evaluate at once."""
    most = max(1, extents(copies)[1] // sizes[1])
    for row, columns in enumerate(mixed.any(0).any(0)):
        for some in columns.nonzero().flatten().split(most):
            if len(some):
                yield row, some


def _evaluated(
    block_mask: BlockMask,
    states: torch.Tensor,
    rows: _Blocks,
    columns: _Blocks,
    row: int,
    some: torch.Tensor,
) -> torch.Tensor:
    """Returns the states of some blocks of a row: (B, H, blocks)."""
    parts = [columns.slice(int(column)) for column in some]
    k, (B, H) = torch.cat(parts), states.shape[:2]
    seen = torch.zeros(B, H, len(some), dtype=torch.int64, device=k.device)
    for q in rows.slice(row).split(max(1, AREA // (len(k) * B * H))):
        visible = evaluate(block_mask.mask_mod, B, H, q, k)
        visible = within(visible, states, block_mask.BLOCK_SIZE, q, k)
        pieces = visible.split([len(part) for part in parts], -1)
        seen += torch.stack([piece.flatten(2).sum(-1) for piece in pieces], -1)
    evaluated = torch.where(seen == 0, EMPTY, PARTIAL)
    return evaluated.masked_fill(seen == rows.size * columns.size, FULL).to(states.dtype)
