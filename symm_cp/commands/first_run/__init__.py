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
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.commands.first_run import checks
from symm_cp.commands.first_run.checks import Check
from symm_cp.group.memory import resolve
from symm_cp.parsing import STDOUT, write_json
from symm_cp.ranks import exit_as_rank, is_rank, run_limited

#: The most seconds for each of the two parts.
_PART_LIMIT = 50.0
#: A wait that takes longer aborts the rank with a message, before the part's time is over.
_WAIT_LIMIT_MS = 15_000
_CPU, _GPUS = "CPU", "GPUs"
_VERDICT = "self-test"
#: Peers must detect a rank's death within this many seconds. Detection takes 0.1 on an idle
#: machine; the rest is for busy machines.
_NOTICED_SECONDS = 5.0

#: Records an item: takes its name and its facts.
Say: TypeAlias = "Callable[[str, Mapping[str, Any]], object]"


@dataclass
class Item:
    """One test of a part, on all ranks; its state is "ok", "failed" or "hung"."""

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
        return [item for item in self.items if item.state != "ok"]


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp selftest`.

    Returns 0 if everything works, 1 if something does not, 2 if nothing was tested.
    """
    if args.part is not None:
        _run_as_part(args)
    count = torch.cuda.device_count()
    error = ""
    if is_rank():
        error = "starts its ranks itself: run it without torchrun"
    elif args.device == "cuda" and count == 0:
        error = "nothing was tested: torch finds no CUDA device; see symm-cp doctor"
    if error:
        print(f"symm-cp selftest: {error}", file=sys.stderr)
        return 2
    began, parts, ranks = time.monotonic(), [], args.ranks or 2
    if args.device != "cuda":
        parts.append(run_part(args.arguments, _CPU, ranks, _PART_LIMIT, {}))
    if args.device != "cpu" and count > 0:
        ranks = args.ranks or min(max(count, 2), 8)
        variables = {"SYMM_CP_TIMEOUT_MS": str(_WAIT_LIMIT_MS)}
        parts.append(run_part(args.arguments, _GPUS, ranks, _PART_LIMIT, variables))
    if args.json is not None:
        write_json(args.json, {"ranks": ranks, "parts": [asdict(part) for part in parts]})
    if args.json != STDOUT:
        _report(parts, f"{ranks} ranks, {time.monotonic() - began:.0f} s")
        if count == 0:
            print("GPUs were not tested: torch finds no CUDA device.")
    return 1 if any(part.failed for part in parts) else 0


def _run_as_part(args: argparse.Namespace) -> NoReturn:
    say = writer(args.results, int(os.environ["RANK"]))
    if args.part == _CPU:
        exit_as_rank(lambda group: examine_cpu(group, say), args.rendezvous, "symm_cp")
    device = torch.device("cuda", torch.cuda.current_device())
    exit_as_rank(lambda group: examine(group, device, say), args.rendezvous)


# The work of ranks.


def writer(folder: Path, rank: int) -> Say:
    """Returns a function that records items of a rank, each immediately."""
    path = folder / f"{rank}.jsonl"

    def say(name: str, known: Mapping[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"name": name, **known}) + "\n")

    return say


def examine_cpu(group: dist.ProcessGroup, say: Say) -> int:
    """Tests a group on the CPU as one of its ranks; at the end the last rank exits without notice.

    Returns 1 if something does not work.
    """
    work = _all_work(checks.cpu_checks(group), say, lambda: None)
    if work is not None and group.size() > 1:
        work &= _notices_a_lost_peer(group, say)
    return int(not work)


def examine(group: dist.ProcessGroup, device: torch.device, say: Say) -> int:
    """Tests a group on a device as one of its ranks; returns 1 if something does not work."""
    state = resolve(group)
    made = cuda.device_for(state, device)
    say(_VERDICT, {"state": "hung"})
    verdict = made.verdict(state)
    batches, graphs = ("yes" if b else "NO" for b in (verdict.batches, verdict.graphs))
    detail = f"batches: {batches}; graphs: {graphs}"
    if verdict.reason:
        detail += f"; {verdict.reason}"
    say(_VERDICT, {"state": "ok" if verdict.passed else "failed", "detail": detail,
                   "milliseconds": verdict.seconds * 1e3})  # fmt: skip

    def in_graph(check: Check) -> str:
        return _in_graph(check, group, device)

    on_gpu = device.type == "cuda"
    replay = in_graph if on_gpu and verdict.graphs else None
    with symm_cp.override_cuda_ops() if on_gpu else nullcontext():
        work = _all_work(checks.checks(group, device), say, made.synchronize, replay)
    return int(not (work and verdict.passed))


def _all_work(
    all_checks: Iterable[Check],
    say: Say,
    synchronize: Callable[[], object],
    in_graph: Callable[[Check], str] | None = None,
) -> bool | None:
    """Makes all checks; returns whether all results are right, or None as soon as one raises."""
    work = True
    for check in all_checks:
        say(check.name, {"state": "hung"})
        try:
            wrong = [check.wrong(check.run())]
            took = check.milliseconds(synchronize)
            wrong.append(check.wrong(check.run()))  # now from a plan, without Python
            if in_graph is not None:
                wrong.append(in_graph(check))
        except Exception as error:
            say(check.name, {"state": "failed", "detail": _first_line(error)})
            return None  # the other ranks may be in the middle of the call
        detail = next(filter(None, wrong), "")
        state = "failed" if detail else "ok"
        say(check.name, {"state": state, "detail": detail, "milliseconds": took})
        work &= not detail
    return work


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
    worst = ("failed", "hung", "ok")
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


def _report(parts: list[Part], what_ran: str) -> None:
    versions = (
        f"symm_cp {symm_cp.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    print(f"symm-cp selftest: {what_ran}; {versions}, {platform.platform()}")
    for part in parts:
        print(f"\n{part.name} ({part.outcome})")
        width = max((len(item.name) for item in part.items), default=0)
        for item in part.items:
            took = "" if item.milliseconds is None else f"{item.milliseconds:9.3f} ms"
            mark = " " if item.state == "ok" else "!"
            line = f"  {mark} {item.name:<{width}}  {item.state:<7}{took}  {item.detail}"
            print(line.rstrip())
    failed = sum(len(part.failed) for part in parts)
    if failed:
        print(f"\n{failed} failed: please report it with all of the above and symm-cp doctor.")
    else:
        print(f"\nAll works: {', '.join(part.name for part in parts)}.")
