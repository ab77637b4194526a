"""Load balancers: which positions of a sequence each rank gets, so that ranks have equal work.

Each wraps a layout: chunks of the sequence, numbered in sequence order, and the rank of each chunk.
`permutation()` lists the positions in the order in which the ranks hold them, rank after rank;
`sequence[permutation]`, cut at `lengths`, are the shards, and `torch.cat(shards)[inverse]` is the
sequence again. Any length works on any number of ranks: chunks differ by one position, or are
empty.

Samples of a batch share a layout, except in `PerDocumentHeadTail` with a list for each sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.cuda.cached import cached
from symm_cp.ops.attention.flex.mask import positions
from symm_cp.schedule.layout import SequenceLayout, even_lengths, head_tail, in_a_row, sequential

#: The rows of padding in the tensors of a rank that holds no position: see region.py.
PADDING_ROWS = 1


class LoadBalancer:
    """Spreads a sequence of `seq_length` positions over `world_size` ranks, as in `layout`.

    Use the base class for a custom layout, or for one of each sample of a batch, by which each rank
    holds the same number of positions of every sample.
    """

    def __init__(self, *layouts: SequenceLayout) -> None:
        held = {layout.lengths for layout in layouts}
        if len(held) != 1:
            raise ValueError(
                "LoadBalancer: layouts must be at least one, which all give the ranks the same "
                f"numbers of positions; got {sorted(held)}"
            )
        self._layouts = layouts

    def __repr__(self) -> str:
        if not hasattr(self, "_layouts"):  # printed by a traceback before __init__ ends
            return f"{type(self).__name__}(...)"
        return f"{type(self).__name__}(seq_length={self.seq_length}, world_size={self.world_size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadBalancer) and self._layouts == other._layouts

    def __hash__(self) -> int:
        return hash(self._layouts)

    @property
    def layout(self) -> SequenceLayout:
        """Which chunks each rank has; `NotImplementedError` if each sample has its own layout."""
        if len(self._layouts) > 1:
            raise NotImplementedError(
                f"{self} has a layout for each of {len(self._layouts)} samples, but all samples "
                "must share one here: use one of its samples"
            )
        return self._layouts[0]

    @property
    def samples(self) -> tuple[LoadBalancer, ...]:
        """The load balancer of each sample of a batch; empty if all samples share a layout."""
        if len(self._layouts) == 1:
            return ()
        return tuple(LoadBalancer(layout) for layout in self._layouts)

    @property
    def of_all_samples(self) -> SequenceLayout:
        """The layout; if each sample has its own, the layout of all samples' tokens in a row."""
        return in_a_row(self._layouts)

    @property
    def seq_length(self) -> int:
        """The length of the whole sequence."""
        return self._layouts[0].length

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._layouts[0].world_size

    @property
    def chunk_order(self) -> list[int]:
        """The chunks of rank 0, then of rank 1, and so on: the same number for each rank."""
        return list(self.layout.chunk_order)

    @property
    def chunk_lengths(self) -> list[int]:
        """The length of each chunk, by its number."""
        return list(self.layout.chunk_lengths)

    @property
    def lengths(self) -> list[int]:
        """How many positions each rank holds, of every sample."""
        return list(self._layouts[0].lengths)

    def rows(self, rank: int) -> int:
        """How many rows the tensors of a rank have: its positions, or else a row of padding."""
        return self.lengths[rank] or PADDING_ROWS

    def positions(self, rank: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """The positions in the sequence of a rank's rows: (lengths[rank],) of int64.

        (B, lengths[rank]) if each sample has its own layout; likewise `permutation` and `inverse`.
        They are made on the device, so the host does not wait.
        """
        by_layout = [positions(layout.spans(rank), device) for layout in self._layouts]
        return torch.stack(by_layout) if self.samples else by_layout[0]

    def permutation(self, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """The positions of all ranks' rows, rank after rank: (seq_length,) of int64."""
        ranks = range(self.world_size)
        return torch.cat([self.positions(rank, device=device) for rank in ranks], -1)

    def inverse(self) -> torch.Tensor:
        """The place of each position in `permutation()`: `permutation()[inverse()]` counts up."""
        return torch.argsort(self.permutation())

    def gathered_rows(self, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """The places of the ranks' rows after a gather of shards padded to the longest shard.

        Collectives require equal shards; padding rows are omitted: (seq_length,) of int64.
        """
        longest = max(self.lengths)
        begins = [rank * longest for rank in range(self.world_size)]
        parts = zip(begins, self.lengths, strict=True)
        return torch.cat([torch.arange(b, b + n, device=device) for b, n in parts])


def in_rank_order(balancer: LoadBalancer) -> bool:
    """Whether each rank's positions are in order, and all before the next rank's positions."""
    if balancer.samples:
        return all(map(in_rank_order, balancer.samples))
    order = balancer.chunk_order
    return order == sorted(order)


@cached(maxsize=8)
def positions_on(device: torch.device, balancer: LoadBalancer, rank: int) -> torch.Tensor:
    """`LoadBalancer.positions`, made once."""
    return balancer.positions(rank, device=device)


@cached(maxsize=8)
def permutation_on(device: torch.device, balancer: LoadBalancer) -> torch.Tensor:
    """`LoadBalancer.permutation`, made once."""
    return balancer.permutation(device=device)


@cached(maxsize=8)
def gathered_rows_on(device: torch.device, balancer: LoadBalancer) -> torch.Tensor:
    """`LoadBalancer.gathered_rows`, made once."""
    return balancer.gathered_rows(device=device)


class Sequential(LoadBalancer):
    """Rank r holds the r-th part: balanced for uniform masks."""

    def __init__(self, seq_length: int, world_size: int) -> None:
        super().__init__(sequential(seq_length, world_size))


class HeadTail(LoadBalancer):
    """Rank r holds chunk r and the r-th from the end of 2W: balanced under a causal mask.

    Source: torch's `_HeadTailLoadBalancer`.
    """

    def __init__(self, seq_length: int, world_size: int) -> None:
        super().__init__(head_tail(seq_length, world_size))


class PerDocumentHeadTail(LoadBalancer):
    """Every document is spread head-tail: balanced under a causal mask within documents.

    `document_lengths` are the lengths of the documents packed into the sequence: one list for all
    samples of a batch, or a list of lists, one for each sample. With a list of lists, tensors are
    cut sample by sample (their dimension 0), and each rank must hold the same number of positions
    of every sample, as it does if all lengths are divisible by 2 * world_size; else raises
    `ValueError`. `all_gather_attention` requires one list. Source: torch's
    `_PerDocumentHeadTailLoadBalancer`.
    """

    def __init__(
        self, document_lengths: Sequence[int] | Sequence[Sequence[int]], world_size: int
    ) -> None:
        lists = [lengths for lengths in document_lengths if isinstance(lengths, Sequence)]
        if len(lists) != len(document_lengths):
            if lists:
                raise TypeError("PerDocumentHeadTail: document_lengths mixes lists and numbers")
            lists = [cast("Sequence[int]", document_lengths)]
        if not lists or not all(lists):
            raise ValueError("PerDocumentHeadTail: document_lengths must not be empty")
        layouts = [_per_document(lengths, world_size) for lengths in lists]
        for sample, layout in enumerate(layouts):
            if layout.lengths != layouts[0].lengths:
                raise ValueError(
                    f"PerDocumentHeadTail: the ranks hold {list(layout.lengths)} positions of "
                    f"sample {sample} and {list(layouts[0].lengths)} of sample 0, must be equal "
                    f"for all samples: use lengths divisible by {2 * world_size}"
                )
        super().__init__(*layouts)
        self.document_lengths = (
            [list(lengths) for lengths in lists] if self.samples else list(lists[0])
        )

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Where documents begin and end: (documents + 1,) of int32, for `all_gather_attention`.

        `NotImplementedError` if each sample has its own list of lengths.
        """
        _ = self.layout
        return torch.tensor(
            [0, *itertools.accumulate(self.document_lengths)], dtype=torch.int32, device="cpu"
        )


def _per_document(document_lengths: Sequence[int], world_size: int) -> SequenceLayout:
    each = 2 * world_size
    lengths = [size for length in document_lengths for size in even_lengths(length, each)]
    order = [
        document * each + chunk
        for rank in range(world_size)
        for document in range(len(document_lengths))
        for chunk in (rank, each - 1 - rank)
    ]
    return SequenceLayout(world_size, tuple(order), tuple(lengths))


class ProcessingTimeRoundRobin(LoadBalancer):
    """Deals out the query blocks of a `BlockMask` by how many key blocks each sees.

    The blocks with the most work are dealt first, in alternating direction, so that every rank has
    the same number of blocks and about the same work. The mask must have equal numbers of queries
    and keys. Source: torch's `_PTRRLoadBalancer`.
    """

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        queries, keys = block_mask.seq_lengths
        if queries != keys:
            raise ValueError(
                f"ProcessingTimeRoundRobin: block_mask has {queries} queries and {keys} keys, "
                "must be equal"
            )
        size = block_mask.BLOCK_SIZE[0]
        work = block_mask.kv_num_blocks.sum((0, 1))
        if block_mask.full_kv_num_blocks is not None:
            work = work + block_mask.full_kv_num_blocks.sum((0, 1))
        lengths = [min(size, queries - begin) for begin in range(0, queries, size)]
        busiest = torch.argsort(work[: len(lengths)], descending=True, stable=True).tolist()
        # Every rank needs the same number of chunks: pads with empty chunks.
        lengths += [0] * (-len(lengths) % world_size)
        busiest += range(len(busiest), len(lengths))
        held: list[list[int]] = [[] for _ in range(world_size)]
        for turn, begin in enumerate(range(0, len(busiest), world_size)):
            dealt = busiest[begin : begin + world_size]
            for rank, block in enumerate(dealt if turn % 2 == 0 else reversed(dealt)):
                held[rank].append(block)
        order = [block for blocks in held for block in sorted(blocks)]
        super().__init__(SequenceLayout(world_size, tuple(order), tuple(lengths)))
        self.work = [int(work[[b for b in blocks if b < len(work)]].sum()) for blocks in held]
