"""Cost curves: each op over its sizes, and over the number of ranks; and cliffs in them.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Runs `symm-cp bench` for 2 ranks over sizes from 1 KiB to 256 MiB (matmuls and attention: from a
tenth of a millisecond to a second), and for 1 to 16 ranks at one size; more ranks than cores share
them. A cliff is a ratio to the limit that grows by more than 2 from one size to the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.cli import main as symm_cp
from symm_cp.commands.bench import plots
from symm_cp.commands.harness import report
from symm_cp.commands.harness.measure import FUSED, IN_PLACE

SIZES = {
    "collectives": "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB",
    "matmul": "64x128x64,128x256x128,256x512x256,512x1024x512,1024x2048x1024,2048x4096x2048",
    "attention": "64x8x64,128x8x64,256x8x64,512x8x64,1024x8x64,2048x8x64,4096x8x64",
}
RANKS = {"collectives": "1MiB", "matmul": "512x1024x512", "attention": "512x8x64"}


def bench(kind: str, shapes: str, ranks: str, seconds: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rows.json")
        command = ["bench", kind, "--shapes", shapes, "--ranks", ranks, "--seconds", seconds]
        code = symm_cp([*command, "--json", out])
        if code != 0:
            sys.exit(code)
        return json.loads(Path(out).read_text())["rows"]


def cliffs(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields where the ratio to the limit more than doubles from one size to the next."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        curve = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["size"])
        for before, after in itertools.pairwise(curve):
            for name in {FUSED, IN_PLACE} & before["ratio"].keys():
                grown = after["ratio"][name] / before["ratio"][name]
                if grown > 2:
                    yield f"{after['case']}: {name}: {grown:.1f} times the ratio before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows, the machine and the date here")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write plots (PNG) there")
    args = parser.parse_args()
    by_size = [row for kind, shapes in SIZES.items() for row in bench(kind, shapes, "2", "1.5")]
    by_ranks = [row for kind, shapes in RANKS.items() for row in bench(kind, shapes, "1..16", "1")]
    steep = list(cliffs(by_size))
    print("\n".join(steep) or "no cliffs")
    head = report.heading(["python", *sys.argv], "cpu")
    if args.plot is not None:
        plots.draw(args.plot / "sizes", by_size, head)
        plots.draw(args.plot / "ranks", by_ranks, head)
    if args.json is not None:
        report.write_json(args.json, {**head, "cliffs": steep}, [*by_size, *by_ranks])


if __name__ == "__main__":
    main()
