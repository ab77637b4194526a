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
FILES = (
    "never_behind",
    "matmul",
    "few_rows",
    "attention",
    "compile",
    "collectives",
    "collectives_4",
    "inference",
    "training",
)
#: Each group of these was measured on one machine, maybe not the machine of the files above.
SEQUENCE_FILES = (
    "ulysses_2",
    "ulysses_4",
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


def measured(name: str) -> bool:
    """Tells whether there is a file of results; sections without one are left out."""
    return (RESULTS / f"{name}.json").exists()


def load(name: str) -> tuple[dict[str, Any], Rows]:
    """A file of results, and its rows by case; of several placements, the slowest signals."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    rows = sorted(results["rows"], key=lambda row: max(row.get("signal_ns", [0.0])))
    return results, {row["case"]: row for row in rows}


def machine(files: Sequence[str] = FILES) -> str:
    """Returns the machine, torch and dates of results; all must have the same machine and torch."""
    results = [load(name)[0] for name in files if measured(name)]
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
    """The times of two ranks by those of one process on their cores, where that was measured."""
    found: dict[str, list[str]] = {}
    for text, file, case, variant in RANKS:
        row = load(file)[1].get(case) if measured(file) else None
        if row is not None and {ONE_PROCESS, variant} <= row["ms"].keys():
            times = row["ms"][variant] / row["ms"][ONE_PROCESS]
            found.setdefault(short(load(file)[0]["machine"]), []).append(f"{text} {times:.2f}")
    machines = "; ".join(f"{', '.join(texts)} on an {where}" for where, texts in found.items())
    if not machines:
        return ""
    return (
        f"Time by that of one process with both cores (above 1: slower): {machines}. So on one CPU "
        "use ranks for long sequences and tests, not for speed."
    )


def matmul() -> list[str]:
    _, rows = load("matmul")
    fused = {"fused, in place": "fused, symmetric input", "fused": "fused, plain input"}
    lines = []
    for dtype in ("float32", "bfloat16"):
        row = rows[f"all_gather_matmul {dtype}"]
        cells = [ratio(row, name) for name in (*fused, *UNFUSED)]
        lines.append([f"all-gather-matmul, {dtype}", "1", *cells])
        row = rows[f"all_gather_matmul {dtype}, return_A"]
        cells = [ratio(row, name) for name in fused]
        label = f"the same with `return_gathered`, {dtype} (limit: and a memcpy)"
        lines.append([label, "1", *cells, "", ""])
    for dtype in ("float32", "bfloat16"):
        row = rows[f"matmul_reduce_scatter {dtype}"]
        cells = [ratio(row, name) for name in ("fused", *UNFUSED)]
        lines.append([f"matmul-reduce-scatter, {dtype}", "1", "", *cells])
    title = "`python benchmarks/matmul.py` (4096 x 4096 a rank, B 4096 x 1024)"
    return table([title, "limit", *fused.values(), *UNFUSED], lines)


def attention() -> list[str]:
    _, rows = load("attention")
    names = ("fused", "fused, causal head-tail", *UNFUSED)
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
    title = "`python benchmarks/attention.py` (8 heads of 64; limit: keys already gathered)"
    return table([title, "limit", *names], lines)


def few_rows() -> list[str]:
    _, rows = load("few_rows")
    lines = []
    for name, row in rows.items():
        cells = [ratio(row, variant) for variant in ("shards", "whole", "chosen", *UNFUSED)]
        lines.append([name, "1", *cells])
    title = "`python benchmarks/few_rows.py` (a layer of Llama-3 8B, 128 tokens a rank)"
    return table([title, "limit", "by shards", "whole", "as chosen", *UNFUSED], lines)


def compiled() -> list[str]:
    _, rows = load("compile")
    names = list(dict.fromkeys(name for row in rows.values() for name in row["ratio"]))
    title = "`python benchmarks/compile.py` (a feed-forward block, 2048 x 2048 a rank)"
    lines = [
        [case, "1", *(ratio(row, name) if name in row["ratio"] else "" for name in names[1:])]
        for case, row in rows.items()
    ]
    return table([title, *names], lines)


def microseconds(row: dict[str, Any], name: str) -> str:
    if name not in row["ms"]:
        return ""
    took = row["ms"][name] * 1e3
    return f"{took:.3g}" if took < 1e3 else f"{took:,.0f}"


def collectives(file: str, wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """Medians in microseconds: this package's ops and backend, and the rivals."""
    head, rows = load(file)
    names = ("op, plain input", "op, symmetric input", "dist, symm_cp", "vllm", "mpi", "gloo")
    lines = []
    for kind, sizes in wanted.items():
        for size in sizes:
            row = rows[f"{kind} {size}"]
            cells = [microseconds(row, name) for name in names]
            lines.append([f"{kind.replace('_', '-')}, {size}", *cells])
    title = f"`python benchmarks/collectives.py --ranks {head['ranks']}`, microseconds"
    own = ("op, plain input", "op, symmetric input", "`dist.*` over `symm_cp`")
    return table([title, *own, "vLLM", "Intel MPI", "gloo"], lines)


def model_steps(
    file: str, kind: str | tuple[str, ...], title: str, names: dict[str, str]
) -> list[str]:
    """Ratios to the compute alone, one row for each case whose name begins with `kind`."""
    rows = {case: row for case, row in load(file)[1].items() if case.startswith(kind)}
    lines = [[case, "1", *(ratio(row, name) for name in names)] for case, row in rows.items()]
    return table([title, "compute alone", *names.values()], lines)


def inference() -> list[str]:
    sums = {"op": "`one_shot_all_reduce`", "dist, symm_cp": "`dist.all_reduce` over `symm_cp`"}
    sums |= {"vllm": "vLLM's op", "gloo": "gloo"}
    ways = ("fused", UNFUSED[0], "unfused (vllm)", UNFUSED[1])
    title = "`python benchmarks/inference.py` (4 layers of 1024 features)"
    return [
        *model_steps("inference", "decode", title, sums),
        *model_steps("inference", "prefill", title, dict(zip(ways, ways, strict=True))),
        *llama("inference", "8 layers of 1024 features"),
    ]


def llama(file: str, what: str) -> list[str]:
    """A model of transformers, split by transformers and by this package."""
    own = {"apply": "`apply`", "apply, sequence parallel": "`apply`, sequence parallel"}
    own |= {ONE_PROCESS: ONE_PROCESS}
    theirs = {"nothing": "no communication", "symm_cp": "over `symm_cp`"}
    theirs |= {"symm_cp, fused": "over `symm_cp`, fused", "gloo": "over gloo"}
    names = {f"transformers ({over})": f"transformers, {text}" for over, text in theirs.items()}
    measured_here = {name for row in load(file)[1].values() for name in row["ratio"]}
    names = {name: text for name, text in (names | own).items() if name in measured_here}
    title = f"`python benchmarks/{file}.py` (Llama of transformers, {what})"
    return model_steps(file, "Llama", title, names)


def training() -> list[str]:
    names = {"symm_cp": "over `symm_cp`", "gloo": "over gloo", "fsdp.use": "`fsdp.use`"}
    title = "`python benchmarks/training.py`"
    return [
        *model_steps("training", ("DDP", "FSDP2"), title, names),
        *llama("training", "8 layers of 1024 features"),
    ]


def sequences() -> list[str]:
    """All that was measured of context parallelism, and of recurrent layers."""
    return [
        *steps_of("Sequences spread over ranks", SEQUENCE_FILES),
        "",
        *steps_of("A Llama on ranks and in one process", LLAMA_FILES),
    ]


def steps_of(what: str, files: Sequence[str]) -> list[str]:
    """Returns all ratios of some files of one machine, and a heading."""
    lines = [f"{what}, on {machine(files)}:", ""]
    for file in filter(measured, files):
        _, rows = load(file)
        program = file.removesuffix("_2").removesuffix("_4")  # numbers of ranks
        program = program.removeprefix("llama_")
        names = list(dict.fromkeys(name for row in rows.values() for name in row["ratio"]))
        cases = [[case, *(ratio(row, name) for name in names)] for case, row in rows.items()]
        lines += table([f"`python benchmarks/{program}.py`", *names], cases)
    return lines


SIZES = ("8 KiB", "64 KiB", "512 KiB", "32 MiB")
#: Sections that are there once their benchmark has run.
OPTIONAL: dict[str, Callable[[], list[str]]] = {
    "inference": inference,
    "training": training,
    "collectives": lambda: collectives(
        "collectives", dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), SIZES)
    ),
    "collectives_4": lambda: collectives(
        "collectives_4", {"all_reduce": ("8 KiB", "512 KiB"), "all_gather": ("8 KiB", "512 KiB")}
    ),
}


def figures() -> str:
    """Returns the text between the marks in benchmarks/README.md."""
    lines = [
        f"Two ranks, one thread each, {machine()}.",
        "Each figure is a ratio of times measured in one run, with the variants interleaved: the",
        "time divided by that of the *limit*, which is the compute alone on input that is already",
        "there. The files in [results](results) have the times and 95% confidence intervals.",
        "",
        *matmul(),
        *few_rows(),
        *attention(),
        *compiled(),
    ]
    for name, section in OPTIONAL.items():
        lines += section() if measured(name) else []
    lines += sequences()
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
