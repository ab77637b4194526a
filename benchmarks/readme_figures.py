"""Writes the figures of README.md from the files in benchmarks/results/.

    python benchmarks/readme_figures.py

Every file there names the command that made it, the machine and the date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.bench.measure import duration

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"

Rows = dict[str, dict[str, Any]]


def load(name: str) -> tuple[dict[str, Any], Rows]:
    """A file of results, and its rows by case."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return found, {row["case"]: row for row in found["rows"]}


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)] + [""]


def ratio(row: dict[str, Any], name: str) -> str:
    return f"{row['ratio'][name]:.2f}" if name in row["ratio"] else ""


def error(of: float) -> str:
    return f"{of:+.0%}".replace("-0%", "+0%")


def matmul() -> list[str]:
    _, rows = load("matmul")
    fused = ("fused, symmetric input", "fused, plain input")
    lines = []
    for dtype in ("float32", "bfloat16"):
        row = rows[f"all_gather_matmul {dtype}"]
        cells = [ratio(row, name) for name in (*fused, "unfused (gloo)")]
        lines.append([f"all-gather-matmul, {dtype}", "1", *cells])
        row = rows[f"all_gather_matmul {dtype}, return_A"]
        cells = [ratio(row, name) for name in fused]
        what = f"the same with `return_gathered`, {dtype} (limit: and a memcpy)"
        lines.append([what, "1", *cells, ""])
    for dtype in ("float32", "bfloat16"):
        row = rows[f"matmul_reduce_scatter {dtype}"]
        cells = [ratio(row, name) for name in ("fused", "unfused (gloo)")]
        lines.append([f"matmul-reduce-scatter, {dtype}", "1", "", *cells])
    what = "`python benchmarks/matmul.py` (4096 x 4096 a rank, B 4096 x 1024)"
    return table([what, "limit", *fused, "unfused (gloo)"], lines)


def attention() -> list[str]:
    _, rows = load("attention")
    names = ("fused", "fused, causal head-tail", "unfused (gloo)")
    wanted = [
        *(
            (way, dtype, 4096)
            for dtype in ("float32", "bfloat16")
            for way in ("forward", "backward")
        ),
        *(("forward", "float32", tokens) for tokens in (512, 2048, 8192, 16384)),
    ]
    lines = []
    for way, dtype, tokens in wanted:
        row = rows[f"attention {way} {dtype}, {tokens} tokens"]
        cells = [ratio(row, name) for name in names]
        lines.append([f"{way}, {tokens} tokens in all, {dtype}", "1", *cells])
    what = "`python benchmarks/attention.py` (8 heads of 64; limit: keys are there already)"
    return table([what, "limit", *names], lines)


def few_rows() -> list[str]:
    _, rows = load("few_rows")
    lines = []
    for name, row in rows.items():
        cells = [ratio(row, variant) for variant in ("shards", "whole", "chosen", "unfused (gloo)")]
        lines.append([name, "1", *cells])
    what = "`python benchmarks/few_rows.py` (a layer of Llama-3 8B, 128 tokens a rank)"
    return table([what, "limit", "by shards", "whole", "as chosen", "unfused (gloo)"], lines)


def predictions() -> list[str]:
    files = [load(f"predictions_{ranks}")[1] for ranks in (2, 4, 8)]
    lines = []
    for name in files[0]:
        cells = [
            f"{duration(rows[name]['ms']['op'] / 1e3)}, {error(rows[name]['error'])}"
            for rows in files
        ]
        lines.append([name.removesuffix(", float32"), *cells])
    what = "`python benchmarks/predictions.py` (measured; simulated is so much more or less)"
    return table([what, "2 ranks", "4 ranks", "8 ranks"], lines)


def compiled() -> list[str]:
    _, rows = load("compile")
    (row,) = rows.values()
    names = list(row["ratio"])
    what = "`python benchmarks/compile.py` (2048 x 2048 a rank, forward and backward)"
    cells = ["1", *(ratio(row, name) for name in names[1:])]
    return table([what, *names], [["feed-forward block, float32", *cells]])


def collectives() -> list[str]:
    _, rows = load("collectives")
    names = ("symmetric input", "plain input", "gloo")
    lines = []
    for kind in ("all_gather", "reduce_scatter"):
        for kib in (4, 1024, 16384):
            row = rows[f"{kind} {kib} KiB a rank"]
            size = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
            what = f"{kind.replace('_', '-')}, {size} a rank"
            cells = [duration(row["ms"][name] / 1e3) for name in ("memcpy", *names)]
            lines.append([what, *cells])
    lines.append(
        ["barrier of a handle", "", duration(rows["barrier"]["ms"]["handle"] / 1e3), "", ""]
    )
    what = "`python benchmarks/collectives.py`"
    return table([what, "memcpy of the result", *names], lines)


def section() -> str:
    """What stands between the marks in README.md."""
    head, _ = load("matmul")
    lines = [
        f"Two ranks with one thread each, on {head['machine']},",
        f"torch {head['torch']}, {head['date']}. Each figure is a ratio of times taken in one run,",
        "variants in turn, to the *limit*: the compute alone, on input that is there already. The",
        "files in `benchmarks/results/` have the times, and the intervals that hold with 95%.",
        "",
        *matmul(),
        *few_rows(),
        *attention(),
        *predictions(),
        *compiled(),
        *collectives(),
    ]
    return "\n".join(lines)


def replaced(readme: str) -> str:
    """The README with the section put in."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{section()}{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(replaced(path.read_text()))
    sys.stdout.write(section())
