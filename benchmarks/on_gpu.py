"""What one GPU can settle in a quarter of an hour, in order of worth; a report of a page.

    python benchmarks/on_gpu.py --minutes 9    # on_gpu/report.txt, on_gpu/results.tar.gz
    python benchmarks/on_gpu.py --list         # the steps, and the seconds that each should take
    python benchmarks/on_gpu.py --minutes 4    # goes on with the steps that have no result yet
    python benchmarks/on_gpu.py --driver simulated  # without a GPU: the first list, shortened

The first list takes nine minutes; a second one follows if time is left. Each step runs in processes
of its own, which are killed when it takes half as long again, or when the minutes are over: what it
has found by then counts. The report says of each claim in the table of symm_cp/cuda/README.md
whether it held, did not hold or was not run. Nothing but torch and this repository is needed, and
pytest for some steps. Exits with 1 if a step failed, with 2 if none passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.on_gpu_steps import (  # noqa: E402
    CLAIMS,
    COLLECT,
    FIRST,
    RESULTS,
    STEPS,
    Item,
    Step,
)

PASSED, FAILED, KILLED, SKIPPED = "passed", "failed", "timed out", "skipped"
_STATE, _REPORT, _ARCHIVE = "on_gpu.json", "report.txt", "results.tar.gz"
#: Characters of details that the report shows; the files have all.
_DETAIL = 110
#: A step begins if at least this share of its time is left.
_LEAST_SHARE = 0.5
#: A step is killed when it has taken its time this often.
_LIMIT = 1.5
_MACHINE_SECONDS = 60.0
#: Seconds between the signal on which Python writes its stacks and the one that kills.
_STACKS_SECONDS = 3.0

# In a process of its own: this one must not hold a context on a GPU that others measure.
_MACHINE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass
class Outcome:
    """The outcome of a step."""

    verdict: str
    detail: str
    command: str
    seconds: float = 0.0


@dataclass
class State:
    """The outcomes of the steps, in a file that is rewritten after each."""

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> State:
        """Reads the file, if there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        state = cls(folder.resolve())
        if (folder / _STATE).exists():
            known = json.loads((folder / _STATE).read_text())
            state.machine = known["machine"]
            state.outcomes = {name: Outcome(**o) for name, o in known["outcomes"].items()}
        return state

    def write(self) -> None:
        """Writes the file, and the report."""
        outcomes = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        text = json.dumps({"machine": self.machine, "outcomes": outcomes}, indent=1) + "\n"
        (self.folder / _STATE).write_text(text)
        (self.folder / _REPORT).write_text(report(self))

    def archive(self) -> None:
        """Packs all files into one: some machines return a few files only."""
        with tarfile.open(self.folder / _ARCHIVE, "w:gz") as archive:
            for path in sorted(self.folder.iterdir()):
                if path.name != _ARCHIVE:
                    archive.add(path, path.name)

    def finished(self, step: Step) -> bool:
        """Tells whether a step with its present command has a result."""
        outcome = self.outcomes.get(step.name)
        return outcome is not None and outcome.verdict != SKIPPED and outcome.command == str(step)


# --- running ---------------------------------------------------------------------------------


def run_limited(
    command: Sequence[str], *, seconds: float, variables: Mapping[str, str], output: Path
) -> int | None:
    """Runs a command in a session of its own, which is killed when the time is over.

    Returns its exit code; None if it was killed. Python processes write their stacks to `output`
    before. No process of the session is left, whatever happens here.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": ":".join(paths)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **more, **variables}, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STACKS_SECONDS)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tests_of(step: Step, path: Path) -> Iterator[Item]:
    for case in ElementTree.parse(path).iter("testcase"):
        wrong = [*case.findall("failure"), *case.findall("error")]
        if case.find("skipped") is None:
            detail = wrong[0].get("message", "").partition("\n")[0] if wrong else ""
            yield Item(step.name, case.get("name", ""), not wrong, detail)


def _parts_of(step: Step, path: Path) -> Iterator[Item]:
    known = json.loads(path.read_text())
    for item in (item for part in known.get("parts", []) for item in part["items"]):
        yield Item(step.name, item["name"], item["state"] == "ok", item["detail"])
    for row in known.get("rows", []):
        name, error = f"{row['case']} {row.get('algorithm', '')}", row.get("error", "")
        yield Item(step.name, name, not error, error, row)


def items_of(step: Step, folder: Path) -> list[Item]:
    """Reads what a step has found: tests that ran, parts of the self-test, rows of loopback.py."""
    items: list[Item] = []
    for suffix, read in ((".xml", _tests_of), (".json", _parts_of)):
        path = folder / f"{step.name}{suffix}"
        if path.exists():
            # A killed step may leave half of a file.
            with contextlib.suppress(ElementTree.ParseError, json.JSONDecodeError):
                items += read(step, path)
    return items


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_DETAIL]


def judge(step: Step, code: int | None, folder: Path, seconds: float) -> tuple[str, str]:
    """Returns the verdict on a step that has ended, and its reason."""
    last = _last_line(folder / f"{step.name}.txt")
    if code is None:
        return KILLED, f"killed after {seconds:.0f} s; last line: {last}"
    if code:
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return FAILED, f"{ended}; last line: {last}"
    if step.tests and not items_of(step, folder):
        return FAILED, f"no test ran; last line: {last}"
    return PASSED, last


def take(step: Step, state: State, seconds: float) -> Outcome:
    """Runs a step to its end, or to the end of its time."""
    for path in state.folder.glob(f"{step.name}.*"):
        path.unlink()
    command = [part.replace(RESULTS, str(state.folder)) for part in step.command]
    output, began = state.folder / f"{step.name}.txt", time.monotonic()
    try:
        code = run_limited(command, seconds=seconds, variables=step.variables, output=output)
    except OSError as error:
        return Outcome(FAILED, f"does not start: {error}", str(step))
    took = time.monotonic() - began
    return Outcome(*judge(step, code, state.folder, took), str(step), round(took, 1))


def run(steps: Sequence[Step], state: State, *, minutes: float, again: bool = False) -> None:
    """Runs steps in their order until the time is over."""
    deadline = time.monotonic() + minutes * 60
    for number, step in enumerate(steps, 1):
        begin = f"[{number}/{len(steps)}] {step.name}"
        if state.finished(step) and not again:
            print(f"{begin}: {state.outcomes[step.name].verdict} before", flush=True)
            continue
        left, reason = deadline - time.monotonic(), step.missing()
        if not reason and left < _LEAST_SHARE * step.seconds:
            reason = f"takes {step.seconds:g} s, {max(0, left):.0f} s are left"
        if reason:
            outcome = Outcome(SKIPPED, reason, str(step))
        else:
            print(f"{begin}: {step.why} ({step.seconds:g} s)", flush=True)
            outcome = take(step, state, min(_LIMIT * step.seconds, left))
        # An earlier result says more than the reason for not repeating it.
        if outcome.verdict != SKIPPED or not state.finished(step):
            state.outcomes[step.name] = outcome
        state.write()
        print(f"{begin}: {outcome.verdict}, {outcome.seconds:.0f} s: {outcome.detail}", flush=True)


# --- the report ------------------------------------------------------------------------------


def report(state: State) -> str:
    """Returns the machine, the steps, the claims, and the rows of loopback.py."""
    known = state.machine
    date = datetime.date.today().isoformat()
    head = f"{date}, torch {known.get('torch')}, CUDA {known.get('cuda')}, {known.get('gpus')}"
    width = max(len(step.name) for step in STEPS)
    lines = [head, known.get("driver", ""), ""]
    items: list[Item] = []
    for step in (COLLECT, *STEPS):
        outcome = state.outcomes.get(step.name)
        if outcome is not None:
            took = f"{outcome.seconds:5.0f} of {step.seconds:3.0f} s"
            lines.append(f"{step.name:{width}}  {outcome.verdict:9} {took}  {outcome.detail}")
            found = items_of(step, state.folder)
            if outcome.verdict == FAILED and all(item.passed for item in found):
                found.append(Item(step.name, step.name, False, outcome.detail))
            items += found
    lines.append("")
    for claim in CLAIMS:
        try:
            verdict, detail = claim.verdict(items)
        except Exception as error:  # the next steps must run
            verdict, detail = "UNREADABLE", f"{type(error).__name__}: {error}"
        if claim.figures is not None and "driver" in known:
            verdict, detail = "not run", ""  # its times mean nothing
        lines.append(f"{verdict:8}  {claim.name}{': ' if detail else ''}{detail[: 4 * _DETAIL]}")
    text = state.folder / "loopback.txt"
    measured = text.read_text(errors="replace").splitlines() if text.exists() else []
    return "\n".join([*lines, "", *(line.split("  driver ")[0] for line in measured), ""])


def exit_code(steps: Sequence[Step], outcomes: Mapping[str, Outcome]) -> int:
    """Returns 1 if a step has failed or was killed, 2 if none has passed, else 0."""
    verdicts = {outcomes[step.name].verdict for step in steps if step.name in outcomes}
    if verdicts & {FAILED, KILLED}:
        return 1
    return 0 if PASSED in verdicts else 2


def describe_machine() -> dict[str, Any]:
    """Returns the versions of torch and CUDA, and the GPUs that torch finds."""
    done = subprocess.run(
        [sys.executable, "-c", _MACHINE], capture_output=True, text=True, check=False,
        timeout=_MACHINE_SECONDS, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"torch does not find out which GPUs there are:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def collect() -> int:
    """Collects the tests of all steps, and runs none; returns 1 if a step has none."""
    import pytest

    empty = []
    for step in STEPS:
        if step.tests:
            arguments = step.command[step.command.index("pytest") + 1 :]
            kept = [part for part in arguments if not part.startswith("--junitxml")]
            if pytest.main([*kept, "--collect-only"]):
                empty.append(step.name)
    print(f"on_gpu: steps without tests: {', '.join(empty) or 'none'}")
    return int(bool(empty))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, [step.name for step in STEPS]
    add("--driver", choices=("real", "simulated"), default="real", help="(%(default)s)")
    add("--results", type=Path, default=Path("on_gpu"), metavar="FOLDER", help="(%(default)s)")
    add("--minutes", type=float, default=9.0, help="for this call (%(default)g)")
    add("--only", nargs="+", choices=names, metavar="STEP", help="these steps, in their order")
    add("--again", action="store_true", help="run steps that have a result, too")
    add("--list", action="store_true", help="print the steps, and run none")
    add("--collect", action="store_true", help="collect the steps' tests, and run none")
    return parser.parse_args(arguments)


@contextmanager
def _ends_by_exception() -> Iterator[None]:
    """Inside, a request to end runs `finally` clauses, which kill the step and write the report."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; see the top of this file for its exit codes."""
    args = _parse(arguments)
    simulated = args.driver == "simulated"
    steps = (COLLECT, *FIRST) if simulated else STEPS
    steps = [step.on(simulated=simulated) for step in steps]
    steps = [step for step in steps if args.only is None or step.name in args.only]
    if args.list:
        print("\n".join(f"{s.name:20} {s.seconds:4.0f} s  {s.why}\n    {s}" for s in steps))
        return 0
    if args.collect:
        return collect()
    state = State.of(args.results)
    try:
        state.machine = describe_machine()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"on_gpu: {error}", file=sys.stderr)
        return 2
    if simulated:
        state.machine["driver"] = "THE SIMULATED DRIVER: nothing below is about a GPU"
    elif not state.machine["gpus"]:
        print("on_gpu: torch finds no CUDA device; try --driver simulated", file=sys.stderr)
        return 2
    # A hung step would leave gigabytes of core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with _ends_by_exception():
        try:
            run(steps, state, minutes=args.minutes, again=args.again)
        finally:
            state.write()
            state.archive()
            print(f"\n{report(state)}\n{state.folder / _REPORT}", flush=True)
    return exit_code(steps, state.outcomes)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
