"""The predictions for a Llama-3 layer on GPUs, which are made without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import predicted_layer
from symm_cp.commands.plan.models import MODELS
from symm_cp.schedule.machine import MACHINES

H100, LLAMA = MACHINES["h100"], MODELS["llama3-8b"]


def rows(ranks: int = 8) -> dict[tuple[str, str], predicted_layer.Row]:
    found = predicted_layer.matmul_rows(LLAMA, H100, ranks)
    return {(row.op.partition(",")[0], row.way): row for row in found}


def test_every_way_of_every_matmul_is_there() -> None:
    names = [matmul.name for matmul in predicted_layer.matmuls(LLAMA)]
    ways = ["unfused", "torch", "shards", "whole", "tiles"]
    assert list(rows()) == [(name, way) for name in names for way in ways]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_counts(ranks: int) -> None:
    found = rows(ranks)
    # One kernel per shard; one copy of the own shard, and one from each peer.
    by_shards = predicted_layer.Counts(ranks, ranks, *[ranks - 1] * 3)
    assert found["qkv", "shards"].counts == by_shards
    assert found["qkv", "tiles"].counts.kernels == 1
    assert found["qkv", "tiles"].counts.copies == ranks
    # The products, and the sum.
    assert found["out", "shards"].counts.kernels == ranks + 1
    # Streams wait for peers, and for the kernel's counters.
    assert found["out", "tiles"].counts.kernels == 2
    assert found["out", "tiles"].counts.waits == 2 * (ranks - 1)
    # As measured over the idle driver: benchmarks/host_time.py.
    assert found["qkv", "torch"].counts.barriers == 3
    assert found["out", "torch"].counts.barriers == 2 * ranks


def test_no_way_is_faster_than_its_products_or_its_transfers() -> None:
    found = rows()
    for matmul in predicted_layer.matmuls(LLAMA):
        product = 1e6 * matmul.product(H100, 8)
        for way in ("unfused", "torch", "shards", "whole", "tiles"):
            assert found[matmul.name, way].microseconds >= min(
                product, 8e6 * matmul.product(H100, 1)
            )
            assert found[matmul.name, way].microseconds >= 7e6 * H100.transfer(matmul.part)


def test_attention_to_all_peers_at_once_takes_two_or_three_kernels() -> None:
    counts = {(row.op, row.way): row.counts for row in predicted_layer.attention_rows(LLAMA, H100)}
    # Each kernel but the first is followed by a merge.
    assert counts["attention 8192", "pipeline"].kernels == 8 + 7
    assert counts["attention 8192", "together"].kernels == 2 + 1
    assert counts["attention 8192 causal", "together"].kernels == 3 + 2


def test_the_script_writes_what_it_predicts(tmp_path: Path) -> None:
    script = Path(predicted_layer.__file__)
    result = tmp_path / "rows.json"
    run = subprocess.run(
        [sys.executable, str(script), "--json", str(result)],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    written = json.loads(result.read_text())
    assert written["machine"] == "predicted, no GPU: 8 x h100"
    assert len(run.stdout.splitlines()) == 1 + len(written["rows"])
    assert {row["model"] for row in written["rows"]} == {"llama3-8b", "llama3-70b"}
