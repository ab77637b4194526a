"""The Triton kernels as machine code of GPUs, and when a launch needs new code: without a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from symm_cp.cuda.kernels import tile_matmul
from symm_cp.cuda.kernels.attention_merge import merge_attention
from symm_cp.cuda.kernels.row_sums import add_rows
from tests.cuda.launches import recorded, resources
from tests.exhaustive import some

#: Shared memory that a block may have, in bytes, by compute capability.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Registers of a multiprocessor, which a block must fit into.
REGISTERS = 65536


def sum_of_rows(
    _: int = 90, *, ranks: int = 4, count: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> None:
    pitch = -(-count // 32) * 32
    rows = torch.empty(ranks, pitch, dtype=dtype)[:, :count]
    add_rows(rows, torch.empty(count, dtype=dtype))


def merged(_: int = 90, *, heads: int = 2, features: int = 128, begin: int = 0) -> None:
    B, S = 1, 64
    out = torch.empty(B, S, heads, features).transpose(1, 2)[:, :, begin:]
    part = torch.empty(B, S, heads, features, dtype=torch.bfloat16).transpose(1, 2)[:, :, begin:]
    lse, part_lse = (torch.empty(B, heads, S)[:, :, begin:] for _ in "lp")
    merge_attention(out, lse, part, part_lse)


def by_tiles(
    capability: int, kernel: str, dtype: torch.dtype, *, epoch: int = 5, rows: int = 512
) -> None:
    """Launches a matmul of 4 ranks as `symm_cp.ops.matmul.by_tiles` does."""
    W, K, N = 4, 1024, 768
    weight, words = torch.empty(N, K, dtype=dtype).t(), torch.zeros(W * 16, dtype=torch.int32)
    options = {"tiling": tile_matmul.tiling_of(dtype, capability // 10), "programs": 100}
    a, out = (torch.empty(W * rows, n, dtype=dtype) for n in (K, N))
    marks = tile_matmul.Words(words, 16, epoch)
    if kernel == "arrival":
        pulled = torch.empty(W - 1, rows, K, dtype=dtype)
        tile_matmul.arrival_matmul(a[:rows], pulled, 0, weight, out, 1, marks, **options)  # type: ignore[arg-type]
    else:
        partials = out.view(W, rows, N)
        tile_matmul.counted_matmul(a, weight, partials, out[:rows], 1, marks, **options)  # type: ignore[arg-type]


#: Everything that is launched, by name; each is given a compute capability.
LAUNCHES: dict[str, Callable[[int], None]] = {
    "add_rows": sum_of_rows,
    "add_rows-float64": partial(sum_of_rows, ranks=8, dtype=torch.float64),
    "merge_attention": merged,
    **{
        f"{kernel}-matmul-{str(dtype)[6:]}": partial(by_tiles, kernel=kernel, dtype=dtype)
        for kernel in ("arrival", "counted")
        for dtype in tile_matmul.DTYPES
    },
}


@cache
def code_of(name: str, capability: int) -> list[Any]:
    """The compiled launches, cached: compiling takes seconds, and several tests need them."""
    with recorded(capability) as launches:
        LAUNCHES[name](capability)
    assert launches
    return [launch.compiled(capability) for launch in launches]


@pytest.mark.parametrize(
    ("name", "capability"),
    some(("add_rows", 90), ("merge_attention", 90), of=itertools.product(LAUNCHES, SHARED)),
)
def test_resources(name: str, capability: int, tmp_path: Path) -> None:
    for made in code_of(name, capability):
        used = resources(made.asm["cubin"], tmp_path)
        assert made.metadata.shared + used.shared <= SHARED[capability]
        assert used.registers * 32 * made.metadata.num_warps <= REGISTERS
        assert used.stack == 0, "registers spill"


@pytest.mark.parametrize("capability", some(90, of=[80, 90, 100, 120]))
def test_tiles_are_read_behind_words_and_counted_when_stored(capability: int) -> None:
    (arrived,), (counted,) = (
        code_of(f"{kernel}-matmul-bfloat16", capability) for kernel in ("arrival", "counted")
    )
    # Data written by the copy stream are read after the word that says so: the loop over tiles of
    # peers' shards begins with the word, and none of these tiles is loaded before it.
    before, acquire, behind = re.split(r"(ld\.global\.sys\.acquire\S*)", arrived.asm["ptx"])
    assert acquire
    assert "cp.async" in before.split("bra", 1)[-1]  # the own shard's tiles, which need no wait
    assert behind.index("bar.sync") < behind.index("cp.async")
    # All threads of a program have stored their part of a tile before one of them counts it; the
    # thread that counts the last tile has seen the other counts, and then lets the stream go on.
    text = counted.asm["ptx"]
    count = text.index("atom.global.gpu.acq_rel.add.u32")
    stored = text.rindex("st.global", 0, count)
    assert "bar.sync" in text[stored:count]
    assert text.index("atom.global.sys.release.exch.b32") > count
    assert ".multicast" not in text  # no TMA, which an acquire would not order
    assert "cp.async.bulk" not in text + arrived.asm["ptx"]


# --- when a launch compiles --------------------------------------------------------------------


def variants(*launches: Callable[[], None]) -> int:
    """How many kernels are compiled for these launches."""
    with recorded() as made:
        for launch in launches:
            launch()
    assert len(made) == len(launches)
    return len({(launch.kernel.fn, launch.variant) for launch in made})


def test_no_epoch_or_number_of_rows_compiles_a_matmul() -> None:
    """Triton specialises on 1 and multiples of 16: peers would wait for such a compilation."""
    for kernel in ("arrival", "counted"):
        launch = partial(by_tiles, 90, kernel, torch.bfloat16)
        assert variants(*(partial(launch, epoch=e) for e in (1, 2, 16, 17, 2**31 - 2))) == 1
        assert variants(*(partial(launch, rows=rows) for rows in (1, 16, 100, 512))) == 1


def test_sums_compile_for_whole_vectors_and_for_the_rest() -> None:
    counts = [16, 32, 4096, 16 * 1001]
    assert variants(*(partial(sum_of_rows, count=count) for count in counts)) == 1
    odd = [17, 31, 4097]
    assert variants(*(partial(sum_of_rows, count=count) for count in (*counts, *odd))) == 2


def test_sums_are_loaded_by_whole_vectors() -> None:
    with recorded() as launches:
        sum_of_rows()
    text = launches[0].compiled(90).asm["ptx"]
    # 2048 elements by 128 threads: 16 of 2 bytes each, 16 bytes at a time.
    assert len(re.findall(r"ld\.global\S*\.v4", text)) == 2 * 4
    assert len(re.findall(r"st\.global\S*\.v4", text)) == 2


def test_merging_of_any_rows_compiles_once() -> None:
    begins = [0, 1, 5, 16, 63]
    assert variants(*(partial(merged, begin=begin) for begin in begins)) == 1
    assert variants(*(partial(merged, heads=heads) for heads in (1, 2, 4, 16))) == 1
