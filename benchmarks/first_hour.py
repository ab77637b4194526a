"""All that needs a GPU, in order of worth and bounded in time: for the first hour on a machine.

    python benchmarks/first_hour.py                      # 45 minutes at most, then a report
    python benchmarks/first_hour.py --list               # the steps, and their outcomes
    python benchmarks/first_hour.py --minutes 9          # where a call has a limit: call it again
    python benchmarks/first_hour.py --only loopback gpu --again

Each step runs in processes of its own, which are killed when its time is over. Results are written
as they come, to `--results` (first_hour): the output of each step, its own files, `first_hour.json`
and `report.txt`. Another call goes on with the steps that have no result yet; `--again` repeats
those that have one. A step that may not fit into the time that is left is skipped, and so is one
whose program is missing. Exits with 1 if a step failed or was killed, and with 2 if none passed.

`--simulated` runs a shortened form of the steps without a GPU, as far as they have one, over the
driver of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import bounded
from benchmarks.first_hour_steps import RESULTS, STEPS, Step, simulated

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED, KILLED, SKIPPED = "passed", "failed", "timed out", "skipped"
_STATE, _REPORT = "first_hour.json", "report.txt"
#: Characters of a step's last line that the report shows; the file has all.
_DETAIL = 110
_MACHINE_SECONDS = 60.0

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
    #: The file of its output, in the folder of the results.
    output: str = ""
    ended: str = ""


@dataclass
class State:
    """The outcomes of the steps, in a file that is rewritten at each change."""

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    #: The process of the step that runs now.
    running: bounded.Started | None = None

    @classmethod
    def of(cls, folder: Path) -> State:
        """Reads the file, if there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        state = cls(folder.resolve())
        path = folder / _STATE
        if path.exists():
            known = json.loads(path.read_text())
            state.machine = known["machine"]
            state.outcomes = {name: Outcome(**o) for name, o in known["outcomes"].items()}
            state.running = known["running"] and tuple(known["running"])
        return state

    def write(self) -> None:
        """Writes the file; one that is killed meanwhile leaves the earlier one."""
        known = {
            "machine": self.machine,
            "outcomes": {name: asdict(outcome) for name, outcome in self.outcomes.items()},
            "running": self.running,
        }
        scratch = self.folder / f"{_STATE}.new"
        scratch.write_text(json.dumps(known, indent=1) + "\n")
        scratch.replace(self.folder / _STATE)

    def finished(self, step: Step) -> bool:
        """Tells whether a step with its present command has a result."""
        outcome = self.outcomes.get(step.name)
        return outcome is not None and outcome.verdict != SKIPPED and outcome.command == str(step)

    def take_over(self) -> None:
        """Kills the step that a killed call has left running."""
        if self.running is not None:
            if bounded.kill_group(self.running):
                print("first_hour: killed the step that an earlier call has left running")
            self.running = None
            self.write()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_DETAIL]


def judge(step: Step, code: int | None, output: Path) -> tuple[str, str]:
    """Returns the verdict on a step that has ended, and its reason."""
    last = _last_line(output)
    if code is None:
        return KILLED, f"killed after {step.seconds:g} s; last line: {last}"
    if code < 0:
        return FAILED, f"ended by {signal.Signals(-code).name}; last line: {last}"
    if code > 0:
        return FAILED, f"exit code {code}; last line: {last}"
    if not re.search(step.expects, output.read_text(errors="replace")):
        return FAILED, f"its output has nothing like {step.expects!r}; last line: {last}"
    return PASSED, last


def take(step: Step, state: State) -> Outcome:
    """Runs a step to its end, or to the end of its time."""
    output = state.folder / f"{step.name}.txt"
    command = [part.replace(RESULTS, str(state.folder)) for part in step.command]

    def started(process: bounded.Started) -> None:
        state.running = process
        state.write()

    began = time.monotonic()
    with ExitStack() as stack:
        try:
            variables = stack.enter_context(bounded.mps()) if step.mps else {}
        except bounded.MpsError as error:
            return Outcome(SKIPPED, f"no MPS: {error}", str(step))
        try:
            code = bounded.run(
                command, seconds=step.seconds, variables={**step.variables, **variables},
                output=output, folder=ROOT, on_start=started,
            )  # fmt: skip
        except OSError as error:
            return Outcome(FAILED, f"does not start: {error}", str(step))
        finally:
            state.running = None
    verdict, detail = judge(step, code, output)
    seconds, ended = time.monotonic() - began, datetime.datetime.now().isoformat(" ", "seconds")
    return Outcome(verdict, detail, str(step), round(seconds, 1), output.name, ended)


def run(steps: Sequence[Step], state: State, *, minutes: float, again: bool = False) -> None:
    """Runs steps in their order, as long as each fits into the time."""
    deadline = time.monotonic() + minutes * 60
    for number, step in enumerate(steps, 1):
        begin = f"[{number}/{len(steps)}] {step.name}"
        if state.finished(step) and not again:
            print(f"{begin}: {state.outcomes[step.name].verdict} before", flush=True)
            continue
        left = deadline - time.monotonic()
        reason = step.missing()
        if not reason and step.seconds > left:
            reason = f"needs up to {step.seconds:g} s, {max(0, left):.0f} s are left"
        if reason:
            outcome = Outcome(SKIPPED, reason, str(step))
        else:
            print(f"{begin}: {step.why} (at most {step.seconds:g} s)", flush=True)
            outcome = take(step, state)
        # An earlier result says more than the reason for not repeating it.
        if outcome.verdict != SKIPPED or not state.finished(step):
            state.outcomes[step.name] = outcome
        state.write()
        print(f"{begin}: {outcome.verdict}, {outcome.seconds:.0f} s: {outcome.detail}", flush=True)


def report(steps: Sequence[Step], state: State) -> str:
    """Returns the table of the steps."""
    machine = state.machine
    head = f"torch {machine.get('torch')}, CUDA {machine.get('cuda')}, GPUs: {machine.get('gpus')}"
    width = max(len(step.name) for step in steps)
    lines = [head, "", f"{'step':{width}}  {'verdict':9} {'seconds':>7}  output and last line"]
    for step in steps:
        known = state.outcomes.get(step.name, Outcome("-", "not run yet", ""))
        took = f"{known.seconds:7.1f}" if known.output else " " * 7
        where = f"{known.output}: " if known.output else ""
        lines.append(f"{step.name:{width}}  {known.verdict:9} {took}  {where}{known.detail}")
    return "\n".join([*lines, ""])


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


def _listed(steps: Sequence[Step], state: State) -> str:
    lines = []
    for step in steps:
        known = state.outcomes.get(step.name)
        verdict = known.verdict if known is not None else "-"
        lines.append(f"{step.name:24} {verdict:9} {step.seconds:4.0f} s  {step.why}\n    {step}")
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, [step.name for step in STEPS]
    add("--results", type=Path, default=Path("first_hour"), metavar="FOLDER", help="(%(default)s)")
    add("--minutes", type=float, default=45.0, help="for this call (%(default)g)")
    add("--only", nargs="+", choices=names, metavar="STEP", help="these steps, in their order")
    add("--again", action="store_true", help="run steps that have a result, too")
    add("--list", action="store_true", help="print the steps, and run none")
    add("--simulated", action="store_true", help="shortened, without a GPU")
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
    steps = simulated() if args.simulated else STEPS
    chosen = [step for step in steps if args.only is None or step.name in args.only]
    state = State.of(args.results)
    if args.list:
        print(_listed(chosen, state))
        return 0
    try:
        state.machine = describe_machine()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"first_hour: {error}", file=sys.stderr)
        return 2
    if not args.simulated and not state.machine["gpus"]:
        print("first_hour: torch finds no CUDA device; try --simulated", file=sys.stderr)
        return 2
    bounded.without_core_files()
    state.take_over()
    with _ends_by_exception():
        try:
            run(chosen, state, minutes=args.minutes, again=args.again)
        finally:
            state.write()
            text = report(steps, state)
            (state.folder / _REPORT).write_text(text)
            print(f"\n{text}\n{state.folder / _REPORT}", flush=True)
    return exit_code(chosen, state.outcomes)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
