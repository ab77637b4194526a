"""Thresholds of ops on GPUs agree with the model of 8 H100, and the model with measurements."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import gpu_algorithms
from benchmarks.gpu_algorithms import Attention, Matmul

# All-gather-matmuls in bfloat16 on 8 H100, as others have measured them: rows of a rank, columns,
# inner dimension, microseconds of NCCL and then one matmul, and of torch's op, which goes by shards
# (meta-pytorch/kraken#2, M, N and K; the last one is pytorch#143160's).
MEASURED = [
    (128, 6656, 4096, 142, 277),
    (128, 6656, 8192, 284, 635),
    (128, 6656, 16384, 514, 1167),
    (256, 6656, 4096, 273, 310),
    (256, 6656, 8192, 499, 548),
    (256, 6656, 16384, 953, 1333),
    (512, 6656, 4096, 515, 456),
    (512, 6656, 8192, 912, 838),
    (512, 6656, 16384, 1810, 1633),
    (256, 3584, 8192, 301, 354),
]


@pytest.mark.parametrize(("rows", "columns", "inner", "whole", "shards"), MEASURED)
def test_which_way_would_8_h100_take(
    rows: int, columns: int, inner: int, whole: float, shards: float
) -> None:
    matmul = Matmul("gather", rows, inner, columns)
    found = matmul.seconds(8)
    assert found["whole"] * 1e6 == pytest.approx(whole, rel=0.15)
    # Shards of few tiles vary: libraries divide some products along the inner dimension as well.
    assert found["shards"] * 1e6 == pytest.approx(shards, rel=0.35)
    assert (found["whole"] < found["shards"]) == (whole < shards)
    assert matmul.by_size() == ("whole" if whole < shards else "shards")


def test_thresholds_take_the_faster_way_of_the_model() -> None:
    costs: dict[str, list[float]] = {}
    chosen = set()
    for case, ranks in gpu_algorithms.cases():
        seconds, algorithm = case.seconds(ranks), case.by_size()
        op = case.op if isinstance(case, Matmul) else "attention"
        costs.setdefault(op, []).append(seconds[algorithm] / min(seconds.values()))
        chosen.add((op, algorithm))
    ops = {op: set(Matmul(op, 1, 1, 1).seconds(2)) for op in costs if op != "attention"}
    assert chosen == {
        (op, algorithm) for op, algorithms in ops.items() for algorithm in algorithms
    } | {
        ("attention", "pipeline"),
        ("attention", "together"),
    }
    for op, each in costs.items():
        assert statistics.mean(each) < 1.01, op
        assert max(each) < 1.31, op


def test_few_rows_are_summed_whole_and_many_part_by_part() -> None:
    for ranks in (2, 4, 8):
        for rows, algorithm in ((1, "whole"), (8192, "shards")):
            matmul = Matmul("all-reduce", rows, 4096, 4096)
            seconds = matmul.seconds(ranks)
            assert min(seconds, key=seconds.__getitem__) == matmul.by_size() == algorithm


def test_what_the_page_on_devices_says_of_eight_gpus() -> None:
    seconds = Attention(32768, 32, 8).seconds(8)
    assert {algorithm: round(each * 1e3, 2) for algorithm, each in seconds.items()} == {
        "pipeline": 2.22,
        "together": 1.9,
    }
