"""The steps of first_hour.py, in order of worth: what to know first when time on a GPU is short."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

#: In a command: the folder of the results.
RESULTS = "@results"
#: pytest's output if a test has passed: it also exits with 0 if all tests were skipped.
_SOME_PASSED = r"\b[1-9]\d* passed"
#: A wait that cannot end aborts a rank with a message well within any step's time.
_WAITS = {"SYMM_CP_TIMEOUT_MS": "30000"}


@dataclass(frozen=True)
class Step:
    """A command that ends within a number of seconds, or is killed.

    It passes if it exits with 0 and its output matches `expects`. `program` must be installed.
    With `mps`, NVIDIA's MPS runs meanwhile. `skip`: reason not to run it at all.
    """

    name: str
    why: str
    command: tuple[str, ...]
    seconds: float
    variables: Mapping[str, str] = field(default_factory=dict)
    expects: str = ""
    program: str = ""
    mps: bool = False
    skip: str = ""

    def __str__(self) -> str:
        """The step as a shell command, except for the folder of the results."""
        variables = (f"{name}={shlex.quote(text)}" for name, text in self.variables.items())
        return " ".join([*variables, shlex.join(self.command)])

    def missing(self) -> str:
        """Returns why it cannot run here; empty if it can."""
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not installed"
        return self.skip


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _pytest(*arguments: str) -> tuple[str, ...]:
    return _python("-m", "pytest", "-p", "no:cacheprovider", "-ra", "--maxfail=8", *arguments)


def _selftest(name: str, why: str, ranks: int, seconds: float = 125, **more: object) -> Step:
    file = f"{RESULTS}/{name}.json"
    command = _python("-m", "symm_cp", "selftest", "--device", "cuda")
    step = Step(name, why, (*command, "--ranks", str(ranks), "--json", file), seconds)
    return replace(step, **more)  # type: ignore[arg-type]


def _loopback(name: str, why: str, seconds: float, *arguments: str) -> Step:
    files = ("--json", f"{RESULTS}/{name}.json", "--trace", f"{RESULTS}/{name}")
    command = _python("benchmarks/loopback.py", *files, *arguments)
    return Step(name, why, command, seconds, _WAITS)


def _tests(name: str, why: str, seconds: float, *paths: str) -> Step:
    return Step(name, why, _pytest("-m", "gpu", *paths), seconds, expects=_SOME_PASSED)


def _ops(name: str, files: Sequence[str], seconds: float = 300) -> Step:
    why = f"{name}: results and gradients against references, on ranks that may share GPUs"
    paths = (f"tests/ops/test_{file}.py" for file in files)
    return _tests(f"ops-{name}", why, seconds, *paths)


def _suite(name: str, case: str, why: str, **more: object) -> Step:
    file = f"{RESULTS}/suite-{name}.json"
    options = ("--ranks", "2", "--seconds", "0.5", "--case", case, "--json", file)
    command = _python("benchmarks/cuda_suite.py", *options)
    step = Step(f"suite-{name}", why, command, 180, _WAITS)
    return replace(step, **more)  # type: ignore[arg-type]


STEPS: tuple[Step, ...] = (
    Step(
        "doctor",
        "driver, GPUs, peer access, settings that harm: read with any failure below",
        _python("-m", "symm_cp", "doctor"),
        60,
    ),
    _selftest("selftest-2", "whether signals, copies, graphs and all ops work at all", 2),
    _selftest("selftest-4", "patterns of more than one peer: rings, bounded staging", 4),
    _selftest(
        "selftest-one-connection",
        "all streams in one hardware queue: an order of issue that is wrong deadlocks",
        2,
        variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    _selftest(
        "selftest-eager",
        "kernels loaded at the start: a failure that goes away is one of lazy loading",
        2,
        variables={"CUDA_MODULE_LOADING": "EAGER"},
    ),
    _loopback(
        "loopback", "host and device time of each op at 2 to 16 ranks", 420, "--seconds", "0.3"
    ),
    _loopback(
        "loopback-graphs", "captured calls, and their replay", 240, "--graphs", "--ranks", "8"
    ),
    _tests("gpu", "kernels and calls of the driver, in one process", 300, "tests/cuda/test_gpu.py"),
    _tests(
        "gpu-ranks",
        "graphs, streams, polling, watchdog, compiled code on ranks",
        480,
        *("tests/cuda", "--ignore=tests/cuda/test_gpu.py"),
        "--deselect=tests/cuda/test_first_run.py::test_the_command",  # selftest-2
    ),
    _ops("matmul", ("gradients", "matmul_all_reduce", "equal_inputs", "round_trips")),
    _ops("attention", ("attention", "attention_options", "gather_kv", "ulysses")),
    _ops("exchange", ("exchange_heads", "head_projection", "halo", "scan", "experts")),
    _ops("decoding", ("spread_cache",)),
    _ops("random", ("random",)),
    _tests(
        "gpu-others",
        "the rest that needs a GPU: passes for torch.compile, NVSHMEM, tuning",
        300,
        *("tests", "--ignore=tests/cuda", "--ignore=tests/ops"),
    ),
    Step(
        "sanitizer",
        "accesses outside of memory in our kernels",
        (
            *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
            *_pytest("-m", "gpu", "tests/cuda/test_gpu.py"),
            *("-k", "add_rows or merge or tiles"),
        ),
        420,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # else it takes whole pools for one allocation
        expects=_SOME_PASSED,
        program="compute-sanitizer",
    ),
    _suite("matmul", "gather-matmul, Llama", "all-gather-matmul against torch's and unfused"),
    _suite("scatter", "reduce-scatter, Llama", "matmul-reduce-scatter against torch's and unfused"),
    _suite("host", "host time", "launch times next to torch's"),
    _suite("barrier", "a barrier", "a signal there and back"),
    _suite("beside", "beside an all-gather", "what transfers cost a matmul that runs meanwhile"),
    _suite("tiles", "by tiles", "the matmuls by tiles alone, and their tilings, against torch.mm"),
    _suite("attention", "attention forward", "attention, both ways, against one call"),
    _suite("graphs", "of 1024 rows a rank", "a replayed graph against eager calls"),
    _selftest("selftest-mps", "the same where ranks run at the same time", 4, mps=True),
    _suite(
        "matmul-mps",
        "gather-matmul, Llama",
        "the speed of ranks on one GPU that do not take turns",
        mps=True,
    ),
    _suite("attention-mps", "attention forward", "likewise, of attention", mps=True),
    *(
        Step(
            name,
            f"which algorithm of {kind} is fastest at which sizes, for this GPU",
            _python("-m", "symm_cp", "tune", kind, "--device", "cuda", "--dtype", "bfloat16"),
            300,
        )
        for name, kind in (("tune", "attention"), ("tune-matmul", "matmul"))
    ),
)

_ALL_OPS = ("tests/cuda/test_first_run.py", "-k", "all_ops_are_checked")
_SIMULATION = "SYMM_CP_TEST_SIMULATION"
_SHORT_LOOPBACK = ("--simulated", "--seconds", "0", "--ranks", "2", "--case")


def _looped(name: str, *arguments: str) -> tuple[str, ...]:
    (step,) = (step for step in STEPS if step.name == name)
    return (*step.command, *_SHORT_LOOPBACK, *arguments)


def _simulated(path: str, *arguments: str) -> tuple[str, ...]:
    return _pytest("--all", path, "-k", *arguments)


#: Commands and variables that replace steps on the simulated driver of the tests.
_SHORTENED: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "doctor": (STEPS[0].command, {}),
    "selftest-2": (_pytest(*_ALL_OPS), {}),
    "selftest-one-connection": (_pytest(*_ALL_OPS), {_SIMULATION: '{"one_queue": true}'}),
    "loopback": (_looped("loopback", "all-gather-matmul"), {}),
    "loopback-graphs": (_looped("loopback-graphs", "attention, causal"), {}),
    "gpu": (_pytest("tests/cuda/test_driver.py", "-k", "batched or belongs"), {}),
    "gpu-ranks": (_simulated("tests/cuda/test_runtime.py", "one_batch or read_in_place"), {}),
    "ops-matmul": (_simulated("tests/ops/test_matmul_all_reduce.py", "simulated and forward"), {}),
    "ops-attention": (_simulated("tests/ops/test_gather_kv.py", "simulated"), {}),
    "ops-exchange": (_simulated("tests/ops/test_halo.py", "simulated"), {}),
}


def simulated() -> tuple[Step, ...]:
    """Returns the steps for a run without a GPU: shortened, or skipped where that is impossible."""
    steps = []
    for step in STEPS:
        if step.name not in _SHORTENED:
            steps.append(replace(step, skip=step.skip or "has no form on the simulated driver"))
            continue
        command, variables = _SHORTENED[step.name]
        steps.append(replace(step, command=command, variables=variables))
    return tuple(steps)
