"""Which heads each rank gets in exchange for parts of the sequence.

H query heads share G key/value heads, N = H / G of them each. Each rank has consecutive query
heads (numbers differ by at most 1) and the key heads that these attend to: ranks share key heads if
there are fewer key heads than ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from symm_cp.tensors.shards import Split


@dataclass(frozen=True)
class HeadShares:
    """The query heads and the key heads of each rank, as (begin, end)."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    group_size: int  # query heads that share a key head

    @property
    def keys_overlap(self) -> bool:
        """Whether ranks share key heads, whose gradients then are sums over ranks."""
        return any(end > begin for (_, end), (begin, _) in itertools.pairwise(self.keys))

    def key_of_each(self, rank: int) -> tuple[int, ...] | None:
        """Returns for each query head of a rank which of the rank's key heads it attends to.

        None if the rank's key heads have equal numbers of its query heads, as kernels expect.
        """
        (first, end), (first_key, end_key) = self.queries[rank], self.keys[rank]
        looked_at = tuple(head // self.group_size - first_key for head in range(first, end))
        each, rest = divmod(end - first, max(1, end_key - first_key))
        even = tuple(head // max(1, each) for head in range(end - first))
        return None if rest == 0 and looked_at == even else looked_at

    def in_groups(self, most: int) -> tuple[HeadShares, ...]:
        """Divides the heads of every rank into at most `most` groups, equally many on all ranks.

        No key head is in two groups; there is one group if ranks share key heads.
        """
        ranks = range(len(self.queries))
        if self.keys_overlap or any(self.key_of_each(rank) is not None for rank in ranks):
            return (self,)
        count = max(1, min(most, *(end - begin for begin, end in self.keys)))
        return tuple(self._group(index, count) for index in range(count))

    def _group(self, index: int, count: int) -> HeadShares:
        keys, size = [], self.group_size
        for begin, end in self.keys:
            split = Split.nearly_equal(end - begin, count)
            keys.append((begin + split.start(index), begin + split.start(index + 1)))
        return HeadShares(tuple((b * size, e * size) for b, e in keys), tuple(keys), size)


@lru_cache(maxsize=64)
def shares_of(op: str, heads: int, kv_heads: int, ranks: int) -> HeadShares:
    """Divides heads among ranks; raises `ValueError` if a rank would have none."""
    if heads < ranks:
        raise ValueError(
            f"{op}: query has {heads} heads for {ranks} ranks: method 'ulysses' requires at least "
            "one for each rank; choose 'allgather', or a mix of both over a mesh of two dimensions"
        )
    split, size = Split.nearly_equal(heads, ranks), heads // kv_heads
    queries = tuple((split.start(rank), split.start(rank + 1)) for rank in range(ranks))
    keys = tuple((begin // size, -(-end // size)) for begin, end in queries)
    return HeadShares(queries, keys, size)
