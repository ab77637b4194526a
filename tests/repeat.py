"""Repeats tests, and says how often each fails: `python -m tests.repeat [options] [tests]`.

A run is one process of pytest, with the tests in random order and other inputs. Everything that is
not an option of this command goes to pytest: folders, files, node ids, -k, -m, --all; without any,
the plain suite runs. For example:

    python -m tests.repeat -n 20 --busy half
    python -m tests.repeat -n 200 --busy half --delays 2000 tests/faults tests/test_stores.py
    python -m tests.repeat -n 50 --cores 1 --stop tests/test_peers.py -k refuses
    python -m tests.repeat -n 1 --seed 1234 --busy all --delays 2000 ...   # a run again

Each run has the next seed, which is both the order's and SYMM_CP_TEST_SEED. The output of every
failing run lies in the folder of --log, beside log.txt, which has a line for each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symm_cp.testing import delays

SEED_VARIABLE = "SYMM_CP_TEST_SEED"
#: Seconds for a test before pytest writes down where each thread is.
STACKS_AFTER = 240
#: Whether a busy loop runs beside the n-th run.
BUSY = {"none": lambda n: False, "half": lambda n: n % 2 == 1, "all": lambda n: True}
NO_TESTS = 5  # pytest's exit code

_ROOT = Path(__file__).resolve().parent.parent
_LOOP = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == {parent}:
    while True: pass
"""


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run of the tests."""

    seed: int
    busy: bool
    delays: int  # microseconds
    cores: int

    def __str__(self) -> str:
        said = [f"seed {self.seed}"]
        said += ["busy"] if self.busy else []
        said += [f"delays {self.delays} us"] if self.delays else []
        said += [f"on {self.cores} of {len(os.sched_getaffinity(0))} cores"] if self.cores else []
        return ", ".join(said)


@dataclass
class Run:
    """One process of pytest that has ended."""

    conditions: Conditions
    code: int
    seconds: float
    output: str
    passed: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    in_time: bool = True

    @property
    def green(self) -> bool:
        return self.code == 0 and self.in_time


@contextlib.contextmanager
def busy_loops(wanted: bool) -> Iterator[None]:
    """Inside, a busy loop runs for each core."""
    command = [sys.executable, "-S", "-c", _LOOP.format(parent=os.getpid())]
    count = len(os.sched_getaffinity(0)) if wanted else 0
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def read(record: Path, run: Run) -> None:
    """Reads the outcomes of tests into `run`; tests that began and did not end have failed."""
    running: dict[str, None] = {}
    lines = record.read_text().splitlines() if record.exists() else []
    for what, test in (json.loads(line) for line in lines):
        if what == "started":
            running[test] = None
        elif what == "ended":
            running.pop(test, None)
        elif what == "failed":
            run.failed.append(test)
            run.passed.discard(test)
        elif what == "passed":
            run.passed.add(test)
    run.failed = list(dict.fromkeys([*run.failed, *running]))
    if not run.green and not run.failed:
        run.failed = [f"(no test: pytest ended with {run.code})"]


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Handles Ctrl-C and SIGTERM at the end: raised within Popen, they would lose its process."""
    came: list[int] = []
    usual = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, a process runs; at the end, also on Ctrl-C, it is killed with its descendants."""
    process = None
    try:
        with signals_later():
            process = subprocess.Popen(command, start_new_session=True, **options)
        yield process
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_once(tests: Sequence[str], conditions: Conditions, limit: float) -> Run:
    """Runs pytest; `limit` is in seconds, after which it is killed with all that it has started."""
    environment = {**os.environ, delays.VARIABLE: str(conditions.delays)}
    environment.setdefault(SEED_VARIABLE, str(conditions.seed))
    command = [sys.executable, "-m", "pytest", "-p", "tests.random_order"]
    command += [f"--order-seed={conditions.seed}", "-o", f"faulthandler_timeout={STACKS_AFTER}"]
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="symm-cp-repeat-") as folder:
        record, output = Path(folder, "record"), Path(folder, "output")
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with output.open("wb") as written, busy_loops(conditions.busy):
            begin = time.monotonic()
            in_time = False
            with started(
                [*command, f"--record={record}", *tests],
                cwd=_ROOT, env=environment, stdout=written, **streams,
            ) as process:  # fmt: skip
                if conditions.cores:  # before it has threads or processes of its own
                    os.sched_setaffinity(process.pid, cores[: conditions.cores])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    in_time = process.wait(limit) is not None
            code, seconds = process.returncode, time.monotonic() - begin
        text = output.read_text(errors="replace")
        run = Run(conditions, code, seconds, text, in_time=in_time)
        read(record, run)
    return run


def failure_rates(runs: Sequence[Run]) -> list[str]:
    """Lines that say of each test that failed how often, and in which runs."""
    failures: dict[str, list[Conditions]] = defaultdict(list)
    for run in runs:
        for test in run.failed:
            failures[test].append(run.conditions)
    lines = []
    for test, conditions in sorted(failures.items(), key=lambda entry: -len(entry[1])):
        count = len(conditions) + sum(test in run.passed for run in runs)
        lines.append(f"{len(conditions)} of {count} failed: {test}")
        lines += [f"    {each}" for each in conditions]
    return lines


def summary(runs: Sequence[Run]) -> str:
    """The last line: how many runs were green, beside a busy loop and not, and their times."""
    parts = [f"{sum(run.green for run in runs)} of {len(runs)} runs green"]
    for said, busy in (("alone", False), ("beside busy loops", True)):
        some = [run for run in runs if run.conditions.busy == busy]
        if not some:
            continue
        seconds = sorted(run.seconds for run in some)
        times = f"{seconds[0]:.0f} to {seconds[-1]:.0f} s"
        parts.append(f"{sum(run.green for run in some)} of {len(some)} {said} ({times})")
    tests = sum(len(run.passed) + len(run.failed) for run in runs)
    return "; ".join([*parts, f"{tests} tests in {sum(run.seconds for run in runs):.0f} s"])


def _parser() -> argparse.ArgumentParser:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.repeat",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=int, default=10, help="runs (10)")
    parser.add_argument("--seed", type=int, help="seed of the first run (drawn)")
    parser.add_argument(
        "--busy", choices=BUSY, default="none", help="runs beside a busy loop on each core (none)"
    )
    parser.add_argument(
        "--delays", type=int, default=0, metavar="US",
        help="random delays of up to so many microseconds around every wait, signal and request to "
        "a store; 2000 is a good value (0: none)",
    )  # fmt: skip
    parser.add_argument(
        "--cores", type=int, default=0, metavar="N", help="run on N cores only (0: on all)"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first run that fails")
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="S",
        help="seconds until a run is killed, and has failed (3600)",
    )  # fmt: skip
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="for output (in /tmp)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeats the tests; returns 0 if all runs were green."""
    parser = _parser()
    options, tests = parser.parse_known_args(arguments)
    if options.n < 1 or options.delays < 0 or options.cores < 0:
        parser.error("-n must be at least 1, --delays and --cores at least 0")
    first = options.seed if options.seed is not None else random.randrange(1 << 31)
    folder = options.log or Path(tempfile.mkdtemp(prefix="symm-cp-repeat-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    with (folder / "log.txt").open("a") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=log, flush=True)

        say(f"{options.n} runs of pytest {' '.join(tests)}; output of failing runs: {folder}")
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(options.n):
                busy = BUSY[options.busy](number)
                conditions = Conditions(first + number, busy, options.delays, options.cores)
                run = run_once(tests, conditions, options.limit)
                if run.code == NO_TESTS:
                    print(run.output, file=sys.stderr)
                    parser.error("pytest found no tests")
                runs.append(run)
                result = f"passed {len(run.passed)}"
                if not run.green:
                    name = f"run-{number + 1}-seed-{conditions.seed}.txt"
                    (folder / name).write_text(run.output)
                    what = "failed" if run.in_time else f"did not end within {options.limit:.0f} s"
                    result = f"{what}: {' '.join(run.failed)} ({name})"
                say(f"run {number + 1} ({conditions}): {run.seconds:.1f} s, {result}")
                if options.stop and not run.green:
                    break
        for line in [*failure_rates(runs), summary(runs)]:
            say(line)
    return int(not runs or not all(run.green for run in runs))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the summary comes then, too
    sys.exit(main())
