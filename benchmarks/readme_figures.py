"""Writes the figures in README.md and benchmarks/README.md from the files in benchmarks/results/.

    python benchmarks/readme_figures.py

Each of those files names the command that made it, the machine and the date.
"""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: Each group of files was measured on one machine, maybe not the machine of the other groups.
FILES = ("never_behind", "matmul", "attention", "compile", "inference", "collectives")
SEQUENCE_FILES = (
    "methods",
    "exchange_2",
    "exchange_4",
    "recurrent",
    "attention_masks",
    "context_parallel",
    "diffusers_step",
)
LLAMA_FILES = ("llama_inference", "llama_training")
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"

Rows = dict[str, dict[str, Any]]


def load(name: str) -> tuple[dict[str, Any], Rows]:
    """A file of results, and its rows by case; of several placements, the slowest signals."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    rows = sorted(results["rows"], key=lambda row: max(row.get("signal_ns", [0.0])))
    return results, {row["case"]: row for row in rows}


def machine(files: Sequence[str] = FILES) -> str:
    """Returns the machine, torch and dates of results; all must have the same machine and torch."""
    results = [load(name)[0] for name in files]
    ((cpu, torch),) = {(result["machine"], result["torch"]) for result in results}
    dates = sorted({result["date"] for result in results})
    return f"{short(cpu)}, torch {torch}, {' to '.join(dates[:: max(1, len(dates) - 1)])}"


def short(processor: str) -> str:
    """A processor's name without its trade marks."""
    return processor.replace("(R)", "").replace(" Processor", "")


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    """A table without the columns that are empty in all lines."""
    filled = [not index or any(line[index] for line in lines) for index in range(len(head))]
    head, *lines = ([*itertools.compress(line, filled)] for line in (head, *lines))
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)] + [""]


def ratio(row: dict[str, Any], name: str) -> str:
    return f"{row['ratio'][name]:.2f}" if name in row["ratio"] else ""


#: The unfused variants: over this package's backend of torch.distributed, and over gloo.
UNFUSED = ("unfused (symm_cp)", "unfused (gloo)")

#: The rows of the table in README.md: text, file, case, the fused variant and the unfused ones.
HEAD = (
    (
        "all-gather-matmul, 4096 x 4096 a rank, bfloat16",
        ("matmul", "all_gather_matmul bfloat16"),
        ("fused", *UNFUSED),
    ),
    (
        "matmul-reduce-scatter, 4096 x 4096 a rank, bfloat16",
        ("matmul", "matmul_reduce_scatter bfloat16"),
        ("fused", *UNFUSED),
    ),
    (
        "attention over 4096 tokens, forward, bfloat16",
        ("attention", "attention forward bfloat16, 4096 tokens"),
        ("fused", *UNFUSED),
    ),
    (
        "compiled feed-forward block, forward and backward, float32",
        ("compile", "block, forward and backward, float32"),
        ("compiled, fused", *(f"compiled, {name}" for name in UNFUSED)),
    ),
)


def head() -> str:
    """Returns the text between the marks in README.md."""
    lines = []
    for text, (file, case), variants in HEAD:
        row = load(file)[1][case]
        lines.append([text, *(ratio(row, variant) for variant in variants)])
    before = (
        "Time of an op by the time of the same compute without communication: lower is better, "
        "1.00 if communication costs nothing. Unfused is the collective, then the compute, over "
        f"this project's backend and over gloo. 2 ranks of one thread, {machine()}"
    )
    after = [
        below_one([line[1] for line in lines]),
        against_unfused(),
        against_one_process(),
        "Not measured: several CPUs, GPUs.",
    ]
    return "\n".join(
        [
            *textwrap.wrap(f"{before}:", 110),
            "",
            *table(["", "fused", *UNFUSED], lines),
            *textwrap.wrap(" ".join(filter(None, after)), 110),
            "",
        ]
    )


def against_unfused() -> str:
    """States the worst ratio of a fused op to its unfused form."""
    _, rows = load("never_behind")
    worst = max(row["behind"] for row in rows.values())
    return (
        f"At worst, of {len(rows)} cases, a fused op takes {worst:.2f} of its unfused form's time."
    )


def below_one(fused: Sequence[str]) -> str:
    """Explains how a fused op can be faster than its compute alone, if one is."""
    if not any(cell and float(cell) < 1 for cell in fused):
        return ""
    return "Values below 1: our output reuses memory, the compute alone allocates it."


#: Comparisons with one process in README.md: text, file, case, the variant of the ranks.
RANKS = (
    (
        "decoding",
        "llama_inference",
        "Llama, decode after 256 tokens, bfloat16",
        "apply",
    ),
    ("training", "llama_training", "Llama, training step of 256 tokens, bfloat16", "apply"),
    (
        "training with context parallelism on 4,096 tokens",
        "context_parallel",
        "Llama, training step, bfloat16",
        "head-tail",
    ),
)
ONE_PROCESS = "one process, all threads"


def against_one_process() -> str:
    """States the times of two ranks by those of one process on their cores."""
    found: dict[str, list[str]] = {}
    for text, file, case, variant in RANKS:
        head, rows = load(file)
        times = rows[case]["ms"][variant] / rows[case]["ms"][ONE_PROCESS]
        found.setdefault(short(head["machine"]), []).append(f"{text} {times:.2f}")
    machines = "; ".join(f"{', '.join(texts)} on an {where}" for where, texts in found.items())
    return (
        f"Time by that of one process with both cores (above 1: slower): {machines}. So on one CPU "
        "use ranks for long sequences and tests, not for speed."
    )


def ratios(file: str) -> list[str]:
    """Returns the table of a file: each variant's time by that of the first one, the limit."""
    program = file.removesuffix("_2").removesuffix("_4")  # numbers of ranks
    _, rows = load(file)
    if file == "inference":  # llama_inference has measured this model for longer
        rows = {case: row for case, row in rows.items() if not case.startswith("Llama")}
    names = list(dict.fromkeys(name for row in rows.values() for name in row["ratio"]))
    lines = [[case, *(ratio(row, name) for name in names)] for case, row in rows.items()]
    return table([f"`python benchmarks/{program.removeprefix('llama_')}.py`", *names], lines)


def microseconds(row: dict[str, Any], name: str) -> str:
    if name not in row["ms"]:
        return ""
    took = row["ms"][name] * 1e3
    return f"{took:.3g}" if took < 1e3 else f"{took:,.0f}"


def collectives() -> list[str]:
    """Medians in microseconds: this package's ops and backend, and the rivals."""
    _, rows = load("collectives")
    names = ("op, plain input", "op, symmetric input", "dist, symm_cp", "vllm", "mpi", "gloo")
    sizes = ("8 KiB", "64 KiB", "512 KiB", "32 MiB")
    lines = [
        [f"{kind}, {size}", *(microseconds(rows[f"{kind} {size}"], name) for name in names)]
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for size in sizes
    ]
    return table(["`python benchmarks/collectives.py`, microseconds", *names], lines)


def figures() -> str:
    """Returns the text between the marks in benchmarks/README.md."""
    others = {"Sequences spread over ranks": SEQUENCE_FILES, "A Llama of transformers": LLAMA_FILES}
    lines = [
        f"Two ranks, one thread each, {machine()}.",
        "Each figure is a ratio of times measured in one run, with the variants interleaved: the",
        "time divided by that of the first column, the compute alone on input that is already",
        "there. The files in [results](results) have the times and 95% confidence intervals.",
        "",
    ]
    for file in FILES[1:-1]:  # never_behind has too many cases
        lines += ratios(file)
    lines += collectives()
    for heading, files in others.items():
        lines += [f"{heading}, on {machine(files)}:", ""]
        for file in files:
            lines += ratios(file)
    return "\n".join(lines)


#: Functions that write the text between each file's marks.
BLOCKS: dict[str, Callable[[], str]] = {"README.md": head, "benchmarks/README.md": figures}


def replaced(text: str, block: str) -> str:
    """The text with the block put between the marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{block}{END}{after}"


if __name__ == "__main__":
    for name, block in BLOCKS.items():
        (ROOT / name).write_text(replaced((ROOT / name).read_text(), block()))
        sys.stdout.write(block())
