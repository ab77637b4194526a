"""The steps of on_gpu.py in order of worth, and the claims of cuda/README.md that they settle."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: In a command: the folder of the results.
RESULTS = "@results"
#: A wait that cannot end aborts a rank with a message well within any step's time.
_WAITS = {"SYMM_CP_TIMEOUT_MS": "30000"}
_ON_GPUS = "tests/cuda/test_on_gpus.py"

Command = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """A command that is expected to take some seconds, and is killed after half as many more.

    `simulated`: the command, and variables, for the simulated driver of the tests; none without
    one. `program` must be installed.
    """

    name: str
    why: str
    seconds: float
    command: Command
    variables: Mapping[str, str] = field(default_factory=dict)
    simulated: tuple[Command, Mapping[str, str]] | None = None
    program: str = ""

    def on(self, *, simulated: bool) -> Step:
        """Returns the step as it runs on a GPU, or on the simulated driver."""
        if not simulated or self.simulated is None:
            return self
        command, variables = self.simulated
        return replace(self, command=command, variables=variables)

    def __str__(self) -> str:
        """The step as a shell command, except for the folder of the results."""
        variables = (f"{name}={shlex.quote(text)}" for name, text in self.variables.items())
        return " ".join([*variables, shlex.join(self.command)])

    @property
    def tests(self) -> bool:
        """Whether the step runs tests, one of which must pass."""
        return "pytest" in self.command

    def missing(self) -> str:
        """Returns why it cannot run here; empty if it can."""
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not installed"
        return ""


def _python(*arguments: str) -> Command:
    return (sys.executable, *arguments)


def _pytest(name: str, *arguments: str) -> Command:
    """A package that is missing skips the modules that import it: see tests/missing.py."""
    file = f"--junitxml={RESULTS}/{name}.xml"
    options = ("-p", "no:cacheprovider", "-p", "tests.missing", "-ra", "--maxfail=8", file)
    return _python("-m", "pytest", *options, *arguments)


def _tests(
    name: str, why: str, seconds: float, *arguments: str, simulated: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Step:  # fmt: skip
    short = (_pytest(name, *simulated), variables or {}) if simulated else None
    return Step(name, why, seconds, _pytest(name, "-m", "gpu", *arguments), {}, short)


def _loopback(
    name: str, why: str, seconds: float, *arguments: str, simulated: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Step:  # fmt: skip
    script = ("benchmarks/loopback.py", "--json", f"{RESULTS}/{name}.json")
    traces = ("--trace", f"{RESULTS}/{name}")
    short = None
    if simulated:
        options = ("--driver", "simulated", "--seconds", "0", "--ranks", "2", *simulated)
        short = _python(*script, *options), variables or {}
    return Step(name, why, seconds, _python(*script, *traces, *arguments), _WAITS, short)


def _selftest(
    name: str, why: str, seconds: float, ranks: int = 2, variables: Mapping[str, str] | None = None,
    mode: str | None = None,
) -> Step:  # fmt: skip
    options = ("--device", "cuda", "--ranks", str(ranks), "--json", f"{RESULTS}/{name}.json")
    command = _python("-m", "symm_cp", "selftest", *options)
    test = _pytest(name, "tests/cuda/test_first_run.py", "-k", "all_ops_are_checked")
    short = (test, {"SYMM_CP_TEST_SIMULATION": mode}) if mode is not None else None
    return Step(name, why, seconds, command, variables or {}, short)


_BUILD = _python("-m", "symm_cp", "build")
_LLAMA = ("--ranks", "8", "--model", "8B", "--seconds", "0.4")
# Tiles run in a step of their own, since a kernel that polls could hang.
_STREAMS = ("--without", "tiles")

#: Before the first list, on the simulated driver.
COLLECT = Step(
    "collect", "the tests of all steps", 30, _python("benchmarks/on_gpu.py", "--collect")
)

#: Nine minutes.
FIRST: tuple[Step, ...] = (
    Step("build", "the native part", 40, _BUILD, {}, (_BUILD, {})),
    _loopback(
        "loopback", "host and device time and gaps of all ops at 8 ranks, by each algorithm", 100,
        *_LLAMA, *_STREAMS, simulated=_STREAMS,
    ),
    _loopback(
        "tiles", "matmuls by tiles, and their kernels alone against torch.mm", 60,
        *_LLAMA, "--algorithm", "tiles",
        simulated=("--algorithm", "tiles", "--case", "with the gathered"),
        variables={"TRITON_INTERPRET": "1"},
    ),
    _tests(
        "gpu-tests", "kernels and calls of the driver, in one process", 60,
        "tests/cuda/test_gpu.py", simulated=("tests/cuda/test_driver.py", "-k", "belongs"),
    ),
    _selftest("selftest", "whether signals, copies, graphs and all ops work at all", 60, mode="{}"),
    _selftest(
        "selftest-one-queue", "all streams in one queue: an order of issue that is wrong deadlocks",
        60, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, mode='{"one_queue": true}',
    ),
    _tests(
        "graphs", "all ops in graphs, replayed with other inputs on 2 ranks", 55,
        "--all", f"{_ON_GPUS}::test_graphs_are_replayed_with_other_inputs[cuda-2]",
        simulated=("tests/cuda/test_programs.py",),
    ),
    _tests(
        "reduce-overhead", 'torch.compile(mode="reduce-overhead") on 2 ranks', 60,
        "--all", f"{_ON_GPUS}::test_graphs_of_torch_compile[cuda-2]",
        simulated=("tests/cuda/test_graph_trees.py", "-k", "captured_without_reserve"),
    ),
    _tests(
        "polling", "kernels that poll on 2 ranks that share a GPU", 45,
        "--all", f"{_ON_GPUS}::test_matmuls_by_tiles[cuda-2]",
        simulated=("tests/cuda/test_tiles.py", "-k", "where_kernels_and_streams"),
    ),
)  # fmt: skip


def _ops(name: str, seconds: float, *files: str) -> Step:
    why = f"{name}: results and gradients on ranks that may share GPUs"
    return _tests(f"ops-{name}", why, seconds, *(f"tests/ops/test_{file}.py" for file in files))


#: For the minutes that are left.
SECOND: tuple[Step, ...] = (
    _loopback("loopback-graphs", "replays of graphs", 80, *_LLAMA, "--graphs", *_STREAMS),
    _selftest("selftest-4", "patterns of more than one peer: rings, bounded staging", 70, 4),
    _tests(
        "ranks", "streams, masks, compiled code on ranks", 180,
        _ON_GPUS, "-k", "not graphs and not tiles and not cuda-4",
    ),
    _loopback(
        "loopback-70B", "all ops at 8 ranks, larger", 120,
        "--ranks", "8", "--model", "70B", "--seconds", "0.4",
    ),
    _loopback("loopback-others", "other numbers of ranks", 200, "--ranks", "2", "4", "16"),
    _selftest(
        "selftest-eager", "kernels loaded at the start: what fails only without is lazy loading",
        60, variables={"CUDA_MODULE_LOADING": "EAGER"},
    ),
    _ops("matmul", 150, "gradients", "matmul_all_reduce", "equal_inputs", "round_trips"),
    _ops("attention", 150, "attention", "attention_options", "gather_kv", "ulysses"),
    _ops("exchange", 150, "exchange_heads", "head_projection", "halo", "scan", "experts"),
    Step(
        "sanitizer", "accesses outside of memory in our kernels", 200,
        (
            *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
            *_pytest("sanitizer", "-m", "gpu", "tests/cuda/test_gpu.py"),
            *("-k", "sums or tiles"),
        ),
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # else it takes whole pools for one allocation
        program="compute-sanitizer",
    ),
    Step(
        "tune", "which algorithm of fused matmuls is fastest at which sizes, for this GPU", 200,
        _python("-m", "symm_cp", "tune", "matmul", "--device", "cuda", "--dtype", "bfloat16"),
    ),
)  # fmt: skip

STEPS = (*FIRST, *SECOND)


# --- claims ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One result within a step: a test, a check of the self-test, or a row of loopback.py."""

    step: str
    name: str
    passed: bool
    detail: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


#: Looks at rows of loopback.py; yields whether each is as claimed, and its figures.
Figures = Callable[[Sequence[Mapping[str, Any]]], Iterable[tuple[bool, str]]]


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['case']} {row.get('algorithm', '')}".strip()


def _matmuls(rows: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (row for row in rows if "matmul" in row["case"] and "alone" not in row["case"])


def _is_ahead(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[bool, str]]:
    for row in _matmuls(rows):
        if "host_us" in row and "device_us" in row:
            figures = f"{_named(row)}: host {row['host_us']:.0f}, device {row['device_us']:.0f} us"
            yield row["host_us"] < row["device_us"], figures


def _as_fast_as_torchs(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[bool, str]]:
    for row in _matmuls(rows):
        if row.get("torch_device_us") and row.get("device_us") and row["by_size"]:
            ratio = row["device_us"] / row["torch_device_us"]
            yield ratio <= 1.02, f"{_named(row)}: {ratio:.2f} of torch's"


def _small_gaps(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[bool, str]]:
    for row in _matmuls(rows):
        if "gap_us" in row and row.get("algorithm") == "shards":
            yield row["gap_us"] <= 10, f"{_named(row)}: {row['gap_us']:.1f} us"


def _tiles(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[bool, str]]:
    for row in rows:
        if row["case"] in ("tiles alone, polling", "tiles alone, counting") and row.get("alone_us"):
            speed = row["alone_us"] / row["device_us"]
            yield speed >= 0.95, f"{row['case']}: {speed:.2f} of torch.mm"


def _chosen(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[bool, str]]:
    for name in dict.fromkeys(row["case"] for row in rows):
        times = {
            row.get("algorithm", ""): (row["device_us"], row["by_size"])
            for row in rows
            if row["case"] == name and "device_us" in row
        }
        taken = [algorithm for algorithm, (_, by_size) in times.items() if by_size]
        if len(times) > 1 and taken:
            ratio = times[taken[0]][0] / min(us for us, _ in times.values())
            yield ratio <= 1.1, f"{name}: {taken[0]} takes {ratio:.2f} of the fastest"


def _lanes(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[bool, str]]:
    times = {
        (row["case"], row.get("algorithm")): row["device_us"] for row in rows if "device_us" in row
    }
    for (case, algorithm), of_lanes in times.items():
        if algorithm == "lanes" and (case, "shards") in times:
            ratio = of_lanes / times[case, "shards"]
            yield ratio < 0.98, f"{case}: {ratio:.2f} of shards"


@dataclass(frozen=True)
class Claim:
    """A row of the table of symm_cp/cuda/README.md.

    It is settled by the items of some steps whose names match; with `figures`, by rows of these.
    """

    name: str
    steps: str = "$."
    items: str = ""
    figures: Figures | None = None

    def verdict(self, items: Iterable[Item]) -> tuple[str, str]:
        """Returns "held", "not held" or "not run", and the figures or the failures."""
        mine = [
            item for item in items
            if re.fullmatch(self.steps, item.step) and re.search(self.items, item.name)
        ]  # fmt: skip
        if self.figures is not None:
            results = list(self.figures([item.row for item in mine if item.row]))
        else:
            results = [(item.passed, f"{item.name} {item.detail}".strip()) for item in mine]
        failed = [text for passed, text in results if not passed]
        if not results:
            return "not run", ""
        if failed:
            return "not held", "; ".join(failed)
        return "held", f"{len(results)} of {len(results)}"


CLAIMS: tuple[Claim, ...] = (
    Claim("signals, copies and graphs between ranks", "selftest(-4|-eager)?"),
    Claim("the same with one queue for all streams", "selftest-one-queue"),
    Claim("no kernel waits for a signal behind another stream's pull"),
    Claim("all ops and gradients", "selftest|loopback.*|ops-.*", "matmul|attention|gather|scatter"),
    Claim("inputs that are read in place", "selftest", "symmetric"),
    Claim("calls without Python", "loopback"),
    Claim("native calls of the driver", "gpu-tests", "driver|streams"),
    Claim("sums and merges (Triton)", "gpu-tests|sanitizer", "add_rows|merge"),
    Claim("torch's attention kernels", "gpu-tests", "attention_kernels|flash"),
    Claim("attention to the keys of all peers at once", "loopback", "together"),
    Claim("matmuls by tiles: kernels that poll", "tiles|gpu-tests|polling", "tiles"),
    Claim("graphs that are replayed with other inputs", "graphs|loopback-graphs"),
    Claim('`torch.compile(mode="reduce-overhead")`', "reduce-overhead"),
    Claim("masks, compiled code, callers' streams", "ranks", "masks|compiled|streams"),
    Claim("watchdog, failures in mid-call"),
    Claim("one visible GPU per process; several hosts; NVSHMEM"),
    Claim("the host issues fused matmuls faster than a GPU runs them", "loopback", "", _is_ahead),
    Claim("fused matmuls are as fast as torch's pipelines", "loopback", "", _as_fast_as_torchs),
    Claim("two compute streams share multiprocessors", "loopback", "", _lanes),
    Claim("gaps between kernels are at most 10 us", "loopback", "", _small_gaps),
    Claim("the algorithm by size takes at most 1.1 of the fastest", "loopback", "", _chosen),
    Claim("matmuls by tiles reach 0.95 of `torch.mm`", "tiles", "", _tiles),
)  # fmt: skip
