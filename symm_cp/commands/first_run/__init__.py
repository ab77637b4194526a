"""`symm-cp selftest`: reports what works between ranks of this machine, for pasting into issues.

On the CPU, and on GPUs if there are any, ranks try signals, collectives and each op.

Each part runs in its own processes, which are killed when its time is over, so the command ends
within two minutes whatever hangs. Ranks record each item before they begin it and after it has
ended: items that began but did not end have hung.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.commands import doctor
from symm_cp.commands.first_run import checks
from symm_cp.commands.first_run.checks import Check
from symm_cp.group.memory import resolve
from symm_cp.parsing import STDOUT, write_json
from symm_cp.ranks import exit_as_rank, is_rank, run_limited

#: The most seconds for the whole command, for the environment, and for each part.
_BUDGET, _ENVIRONMENT_LIMIT, _PART_LIMIT = 110.0, 45.0, 50.0
#: A wait that takes longer aborts the rank with a message, before the part's time is over.
_WAIT_LIMIT_MS = 15_000
_CPU, _GPUS = "CPU", "GPUs"
#: Peers must detect a rank's death within this many seconds. Detection takes 0.1 on an idle
#: machine; the rest is for busy machines.
_NOTICED_SECONDS = 5.0
_PREFIXES = ("SYMM_CP_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "NVIDIA_", "TRITON_")

#: Starts the ranks of a part: takes its name, the number of ranks, seconds, and environment
#: variables.
Start: TypeAlias = "Callable[[str, int, float, Mapping[str, str]], Part]"
#: Records an item: takes its name and its facts.
Say: TypeAlias = "Callable[[str, Mapping[str, Any]], object]"


@dataclass
class Item:
    """One test of a part, on all ranks; its state is "ok", "failed" or "hung".

    Items without a test are "info", or "missing" on this machine.
    """

    name: str
    state: str
    detail: str = ""
    milliseconds: float | None = None


@dataclass
class Part:
    """The results of one start of the ranks."""

    name: str
    items: list[Item]
    #: How the processes ended: "ended", "killed after 50 s" or their exit codes.
    outcome: str

    @property
    def failed(self) -> list[Item]:
        """The items that did not work."""
        return [item for item in self.items if item.state in ("failed", "hung")]


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp selftest`.

    Returns 0 if everything works, 1 if something does not, 2 if nothing was tested.
    """
    if args.part is None and is_rank():
        print("symm-cp selftest: starts its ranks itself: run it without torchrun", file=sys.stderr)
        return 2
    if args.part is not None:
        _run_as_part(args)
    began = time.monotonic()

    def start(part: str, ranks: int, seconds: float, variables: Mapping[str, str]) -> Part:
        left = _BUDGET - (time.monotonic() - began)
        return run_part(args.arguments, part, ranks, min(seconds, left), variables)

    environment = start("environment", 1, _ENVIRONMENT_LIMIT, {})
    count = gpus(environment)
    if count == 0 and args.device == "cuda":
        _print_items(environment)
        print("symm-cp selftest: nothing was tested: torch finds no CUDA device", file=sys.stderr)
        return 2
    parts, ranks = [environment], args.ranks or 2
    if args.device != "cuda":
        parts.append(start(_CPU, ranks, _PART_LIMIT, {}))
    if args.device != "cpu" and count > 0:
        ranks = args.ranks or min(max(count, 2), 8)
        variables = {"SYMM_CP_TIMEOUT_MS": str(_WAIT_LIMIT_MS)}
        parts.append(start(_GPUS, ranks, _PART_LIMIT, variables))
    _report(parts, ranks, args.json, seconds=time.monotonic() - began)
    if count == 0 and args.json != STDOUT:
        print("GPUs were not tested: torch finds no CUDA device.")
    return 1 if any(part.failed for part in parts) else 0


def _run_as_part(args: argparse.Namespace) -> NoReturn:
    say = writer(args.results, int(os.environ["RANK"]))
    if args.part == "environment":
        sys.exit(describe_environment(say))
    if args.part == _CPU:
        exit_as_rank(lambda group: examine_cpu(group, say), args.rendezvous, "symm_cp")
    device = torch.device("cuda", torch.cuda.current_device())
    exit_as_rank(lambda group: examine(group, device, say), args.rendezvous)


# The work of ranks.

_VERDICT = "self-test"


def writer(folder: Path, rank: int) -> Say:
    """Returns a function that records items of a rank, each immediately."""
    path = folder / f"{rank}.jsonl"

    def say(name: str, known: Mapping[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"name": name, **known}) + "\n")

    return say


def describe_environment(say: Say) -> int:
    """Records facts about this machine for readers of the report."""
    if torch.cuda.is_available():
        torch.cuda.init()
        say("GPUs", {"state": "info", "detail": str(torch.cuda.device_count())})
    else:
        say("GPUs", {"state": "info", "detail": "0"})
    for finding in doctor.examine():
        if finding.section in ("versions", "native part", "backends"):
            known = {"state": finding.state, "detail": finding.detail}
            say(f"{finding.section}: {finding.name}", known)
    say("CUDA of torch", {"state": "info", "detail": str(torch.version.cuda)})
    version = getattr(sys.modules.get("triton"), "__version__", "not loaded")
    say("Triton", {"state": "info", "detail": version})
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES):
            say(f"${name}", {"state": "info", "detail": os.environ[name]})
    return 0


def examine_cpu(group: dist.ProcessGroup, say: Say) -> int:
    """Tests a group on the CPU as one of its ranks; at the end the last rank exits without notice.

    Returns 1 if something does not work.
    """
    failed = False
    for check in checks.cpu_checks(group):
        say(check.name, {"state": "hung"})
        try:
            wrong = check.wrong(check.run())
            took = check.milliseconds(lambda: None)
        except Exception as error:
            say(check.name, {"state": "failed", "detail": _first_line(error)})
            return 1  # the other ranks may be in the middle of the call
        say(check.name, {"state": "failed" if wrong else "ok", "detail": wrong,
                         "milliseconds": took})  # fmt: skip
        failed |= bool(wrong)
    if group.size() > 1:
        failed |= not _notices_a_lost_peer(group, say)
    return int(failed)


def _notices_a_lost_peer(group: dist.ProcessGroup, say: Say) -> bool:
    name, last = "a lost peer is noticed", group.size() - 1
    say(name, {"state": "hung"})
    x = torch.ones(4, 4)
    symm_cp.matmul_all_reduce(x, x, group=group)
    if group.rank() == last:
        say(name, {"state": "ok"})
        os._exit(0)
    began = time.monotonic()
    try:
        symm_cp.matmul_all_reduce(x, x, group=group)
        found = "no error"
    except RuntimeError as error:
        found = _first_line(error)
    seconds = time.monotonic() - began
    noticed = f"rank {last}" in found and seconds <= _NOTICED_SECONDS
    detail = f"after {seconds:.2f} s" if noticed else f"after {seconds:.2f} s: {found}"
    say(name, {"state": "ok" if noticed else "failed", "detail": detail})
    sys.stdout.flush()
    os._exit(int(not noticed))  # a group that lacks a rank cannot be destroyed in order


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def examine(group: dist.ProcessGroup, device: torch.device, say: Say) -> int:
    """Tests a group as one of its ranks; returns 1 if something does not work."""
    state, failed = resolve(group), False
    say(_VERDICT, {"state": "hung"})
    verdict = cuda.device_for(state, device).verdict(state)
    batches, graphs = ("yes" if b else "NO" for b in (verdict.batches, verdict.graphs))
    detail = f"batches: {batches}; graphs: {graphs}"
    if verdict.reason:
        detail += f"; {verdict.reason}"
    works = "ok" if verdict.passed else "failed"
    say(_VERDICT, {"state": works, "detail": detail, "milliseconds": verdict.seconds * 1e3})
    synchronize = cuda.device_for(state, device).synchronize
    override = symm_cp.override_cuda_ops() if device.type == "cuda" else nullcontext()
    with override:
        for check in checks.checks(group, device):
            say(check.name, {"state": "hung"})
            try:
                wrong = check.wrong(check.run())
                took = check.milliseconds(synchronize)
                again = check.wrong(check.run())  # now from a plan, without Python
                wrong = wrong or again
                if not wrong and device.type == "cuda" and verdict.graphs:
                    wrong = _in_graph(check, group, device)
            except Exception as error:
                say(check.name, {"state": "failed", "detail": _first_line(error)})
                return 1  # the other ranks may be in the middle of the call
            known = {"state": "failed" if wrong else "ok", "detail": wrong}
            say(check.name, {**known, "milliseconds": took})
            failed |= bool(wrong)
    return int(failed or not verdict.passed)


def _in_graph(check: Check, group: dist.ProcessGroup, device: torch.device) -> str:
    """Captures a call and replays it three times; returns the error of the result, if any."""
    symm_cp.reserve(group, 1 << 20, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check.run()  # libraries allocate memory at first use
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = check.run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wrong = check.wrong(results)
    return f"in a graph: {wrong}" if wrong else ""


# The work of the command.


def run_part(
    arguments: list[str], part: str, ranks: int, seconds: float, variables: Mapping[str, str]
) -> Part:
    """Starts the ranks of a part, ends them after `seconds`, and reads their items."""
    with tempfile.TemporaryDirectory(prefix="symm-cp-") as folder:
        line = ["-m", "symm_cp", *arguments, "--part", part, "--results", folder]
        codes = run_limited(
            [*line, "--rendezvous", folder], ranks, seconds=seconds, variables=variables
        )
        said = [_read(Path(folder, f"{rank}.jsonl")) for rank in range(ranks)]
    if None in codes:
        outcome = f"killed after {seconds:.0f} s"
    else:
        outcome = "ended" if not any(codes) else f"exit codes {codes}"
    result = Part(part, merged(said), outcome)
    if outcome != "ended" and not result.failed:
        result.items.append(Item("processes", "failed", outcome))
    return result


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns a rank's last record of each item; leaves out a line that was cut off."""
    last: dict[str, dict[str, Any]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            known = json.loads(text)
        except json.JSONDecodeError:
            continue
        last[known.pop("name")] = known
    return last


def merged(said: list[dict[str, dict[str, Any]]]) -> list[Item]:
    """Merges the items of all ranks: each has the state of the rank with the worst result."""
    worst = ("failed", "hung", "missing", "info", "ok")
    items = []
    for name in dict.fromkeys(name for of_rank in said for name in of_rank):
        states = [of_rank.get(name, {"state": "hung"}) for of_rank in said]
        rank = min(range(len(said)), key=lambda r: worst.index(states[r]["state"]))
        state, detail = states[rank]["state"], states[rank].get("detail", "")
        if state in ("failed", "hung"):
            detail = f"rank {rank}: {detail or 'did not end'}"
        times = [known["milliseconds"] for known in states if "milliseconds" in known]
        items.append(Item(name, state, detail, max(times, default=None)))
    return items


def gpus(environment: Part) -> int:
    """Returns the number of GPUs in the environment; 0 also if the query hung."""
    found = [item for item in environment.items if item.name == "GPUs" and item.state == "info"]
    return int(found[0].detail) if found else 0


def _print_items(part: Part) -> None:
    print(f"\n{part.name} ({part.outcome})")
    width = max((len(item.name) for item in part.items), default=0)
    marks = {"failed": "! ", "hung": "! "}
    for item in part.items:
        took = "" if item.milliseconds is None else f"{item.milliseconds:9.3f} ms"
        state = "" if item.state == "info" else item.state
        mark = marks.get(item.state, "  ")
        line = f"  {mark}{item.name:<{width}}  {state:<7}{took}  {item.detail}"
        print(line.rstrip())


def _report(parts: list[Part], ranks: int, file: Path | None, *, seconds: float) -> None:
    failed = [(part.name, item) for part in parts for item in part.failed]
    if file is not None:
        write_json(file, {"ranks": ranks, "parts": [asdict(part) for part in parts]})
    if file == STDOUT:
        return
    print(f"symm-cp selftest: {ranks} ranks, {seconds:.0f} s")
    for part in parts:
        _print_items(part)
    if not failed:
        print(f"\nAll works: {', '.join(part.name for part in parts[1:])}.")
        return
    print(f"\n{len(failed)} failed:")
    for name, item in failed:
        print(f"  {name}: {item.name}: {item.detail}")
    print("Please report it with all of the above.")
