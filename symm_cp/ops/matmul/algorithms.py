"""Whether a fused matmul runs shard by shard (`shards`, `lanes`) or as one matmul (`whole`).

`shards` hides transfers behind matmuls, but each of the W matmuls reads the weight, and a GPU takes
as long for a shard with few tiles as for a shard with a tile for each multiprocessor. `whole`
gathers first (or scatters last) and multiplies once. `lanes` is `shards` on two streams in turn, so
that tiles of the next shard fill the multiprocessors that the last tiles of a shard leave idle:
same kernels, same bits, and peers see no difference.

On CPU a tensor of up to 64 MiB is exchanged at once, before or after one matmul. Two ranks take 1.1
to 1.3 times as long by shards at 0.5 MiB, and the same time from 8 MiB on (1.08 times as long in
bfloat16 on a processor with AMX), so larger tensors go by shards, without memory for the whole.

The numbers for GPUs are from the model of 8 H100 in benchmarks/gpu_algorithms.py, bfloat16; no GPU
has measured any of these algorithms. Over the model's grid of 2 to 8 ranks, 1 to 4,096 rows of a
rank and 1,024 to 14,336 features, the chosen one takes 1.01 of the fastest one on average, and 1.24
at most (few inner features). `symm-cp tune` measures, and its table comes before this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from symm_cp import runtime
from symm_cp.cuda import device_for, has_streams
from symm_cp.group.memory import Group
from symm_cp.native import wire
from symm_cp.runtime.exchange import WHOLE_BYTES
from symm_cp.tensors.dtypes import dtype_name
from symm_cp.tuning import (
    ALGORITHMS,
    IN_ONE_CALL,
    LANES,
    TILES,
    Choice,
    by_size,
    choose,
    forced_algorithm,
    note,
)

#: A matmul as (rows of the result, inner dimension, columns of the result).
Product: TypeAlias = "tuple[int, int, int]"

# All-gather-matmuls: the rows of a rank and the elements of its part of the result from which
# shards are faster. With 256 rows and 6,656 columns NCCL and one matmul take 0.71 to 0.91 of the
# time of torch's op by shards, with 512 rows 1.09 to 1.13 (8 H100, meta-pytorch/kraken#2).
_GATHER_ROWS = 512
_GATHER_ELEMENTS = 1 << 20
# Matmul-reduce-scatters and matmul-all-reduces: the elements of a rank's part of the result.
# `whole` also copies the product. At 4,096 inner features and 6,656 columns it takes 1.00 to 1.18
# of the time by lanes with 256 rows, and 1.21 to 1.33 with 512.
_SUM_ELEMENTS = 3 << 19
# Weight gradients add each shard's product to the result, which moves about five times its bytes in
# 16 bits. With 3,584 features that are not gathered, `whole` takes 0.89 to 0.99 of the time by
# shards with 2,048 rows of a rank, and 1.05 to 1.18 with 4,096.
_GRADIENT_ROWS = 512

# Sides of the tiles by which `lanes` is chosen; libraries take tiles of 64 x 128 to 128 x 256.
_TILE = 128
# From this many tiles for each multiprocessor on, the last ones waste at most an eighth of it all.
# That is not worth the memory: `lanes` has room for the shards of all ranks, `shards` for two.
_WAVES = 8

_BY_PARTS = b" part by part"


def question(op: str, dtype: torch.dtype, *products: Product) -> str:
    """Returns the name of a call in the file of `symm-cp tune`; `products` are those of a shard."""
    shapes = ",".join("x".join(map(str, product)) for product in products)
    return f"{op} {dtype_name(dtype)} {shapes}"


def at_once(
    group: Group, op: str, like: torch.Tensor, whole: Sequence[int], most: float = WHOLE_BYTES
) -> bool:
    """Returns whether a tensor of a whole shape is exchanged at once: on CPU, up to `most` bytes.

    The other dimension of a product does not matter: it may differ from rank to rank.
    """
    if not runtime.at_once(group, like, whole, most):
        return False
    forced = forced_algorithm(ALGORITHMS)
    if forced not in (None, "whole"):
        return False
    key = f"{op} {dtype_name(like.dtype)} {'x'.join(map(str, whole))}"
    note(like.device, key, IN_ONE_CALL if forced is None else Choice("whole", "forced"))
    return True


def part_by_part(group: Group, like: torch.Tensor, name: bytes) -> bytes:
    """Returns the name of a call that is not exchanged at once: ranks that differ get an error."""
    if not runtime.exchanges(group, like):
        return name
    return name[: wire.MAX_CALL_NAME - len(_BY_PARTS)] + _BY_PARTS


def for_gather(device: torch.device, rows: int, columns: int) -> str:
    """Returns that of an all-gather-matmul whose largest shard gives `rows` x `columns`."""
    if (rows < _GATHER_ROWS or rows * columns < _GATHER_ELEMENTS) and has_streams(device):
        return "whole"
    return "shards"


def for_sum(device: torch.device, rows: int, columns: int) -> str:
    """Returns that of a matmul that is summed over ranks; a rank's part has `rows` rows."""
    return "whole" if rows * columns < _SUM_ELEMENTS and has_streams(device) else "shards"


def for_gradient(device: torch.device, rows: int, features: int) -> str:
    """Returns that of a weight gradient: a shard has `rows`; `features` are not gathered."""
    if rows < max(_GRADIENT_ROWS, features) and has_streams(device):
        return "whole"
    return "shards"


def in_lanes(rows: int, columns: int, multiprocessors: int) -> bool:
    """Whether shards that give `rows` x `columns` run on two streams in turn."""
    return _tiles(rows, columns) < _WAVES * multiprocessors


def _tiles(rows: int, columns: int) -> int:
    return math.ceil(rows / _TILE) * math.ceil(columns / _TILE)


def choose_pipelined(
    group: Group,
    device: torch.device,
    key: str,
    algorithm: str,
    part: tuple[int, int],
    *,
    tiles: Callable[[], bool],
) -> str:
    """Returns the algorithm of an op that also has `lanes`, and if forced and `tiles()` also that.

    `algorithm` is "shards" or "whole", by its size; `part` is the largest part of the result.
    """
    if not has_streams(device):
        return choose(group, device, key, ALGORITHMS, by_size(algorithm))
    default, multiprocessors = by_size(algorithm), device_for(group, device).multiprocessors()
    if algorithm == "shards":
        size = f"by size: {_tiles(*part)} tiles of a shard, {multiprocessors} multiprocessors"
        default = Choice(LANES if in_lanes(*part, multiprocessors) else algorithm, size)
    forced = (TILES,) if forced_algorithm(ALGORITHMS) == TILES and tiles() else ()
    return choose(group, device, key, (*ALGORITHMS, LANES, *forced), default)
