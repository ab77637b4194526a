"""`symm-cp explain -- COMMAND`: lists the passes' decisions on each graph that a program compiles.

With `--eager` the program runs uncompiled, and the report lists the collectives that it calls, and
which of them an op of `symm_cp` could fuse with its neighbours (`symm_cp/inductor/eager.py`).

The program runs unchanged, as with `symm-cp exec`, with the passes of `symm_cp.inductor.enable`
unless it sets its own. Each process records its graphs in a file (`symm_cp/inductor/notes.py`),
which is read after all processes have ended. All graphs are compiled anew: a graph from a cache
would record nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from symm_cp import __version__
from symm_cp.commands import run
from symm_cp.parsing import STDOUT, add_json, size_text, what_ran, write_json

HELP = "run a program, and list the collectives of its compiled graphs: fused, or why not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp explain`."""
    parser.usage = (
        "symm-cp explain [-h] [--json [FILE]] [--eager] [--backend-for NAMES] -- COMMAND ..."
    )
    add_json(parser, "the graphs of all processes")
    parser.add_argument(
        "--eager",
        action="store_true",
        help="run the program without torch.compile, and list which collectives an op could fuse",
    )
    run.add_program(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the program and prints the report; returns the program's exit code."""
    command, code = run.command_of("explain", args)
    if not command:
        return code
    with tempfile.TemporaryDirectory(prefix="symm-cp-explain-") as folder:
        settings = {"SYMM_CP_EXPLAIN": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        if args.eager:
            settings = {"SYMM_CP_EXPLAIN_EAGER": folder, "TORCHDYNAMO_DISABLE": "1"}
        with run.environment(args):
            ended = subprocess.run(
                command,
                env={**os.environ, **settings},
                stdout=sys.stderr if args.json == STDOUT else None,  # for the report alone
                check=False,
            )
        noted = _noted(Path(folder))
    graphs, breaks = list(_graphs(noted)), _first(noted, "breaks")
    in_python = _first(noted, "in_python")
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    if args.json is not None:
        found = {"graphs": graphs, "graph_breaks": breaks, "in_python": in_python}
        write_json(args.json, {"command": command, "exit_code": code, **found})
    if args.json != STDOUT:
        how = "torch.compile is off" if args.eager else "torch.compile"
        print(what_ran(__version__, command, f"{len(noted)} processes with notes", how))
        print(report(graphs, breaks, in_python, eager=args.eager))
    if code:
        print(f"symm-cp explain: the program ended with exit code {code}", file=sys.stderr)
    return code


def _noted(folder: Path) -> list[list[dict[str, Any]]]:
    """Returns the notes of each process, by rank."""
    noted = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    ]
    return sorted(filter(None, noted), key=lambda notes: notes[-1]["rank"])


def _graphs(noted: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields the graphs of all processes, by rank, in the order in which each compiled them."""
    for of_process in noted:
        graphs = [note for note in of_process if "collectives" in note]
        for number, graph in enumerate(graphs, 1):
            yield {"graph": number, **graph}


def _first(noted: list[list[dict[str, Any]]], kind: str) -> dict[str, Any]:
    """Returns the note of a kind of the first rank that has any."""
    found = (note[kind] for notes in noted for note in notes if kind in note)
    return next(found, {})


_NOTHING_COMPILED = (
    "no graph with a collective was compiled: the passes see what torch.compile compiles "
    "with its default backend (inductor); --eager lists collectives of uncompiled programs"
)


def report(
    graphs: list[dict[str, Any]],
    breaks: Mapping[str, int] = MappingProxyType({}),
    in_python: Mapping[str, str] = MappingProxyType({}),
    *,
    eager: bool = False,
) -> str:
    """Returns the text of a report: the graphs of the first rank, and the ranks that differ."""
    broken = [f"{text} ({count} x)" for text, count in breaks.items()]
    if in_python:
        broken.append("made by Python at each call, as no record of them can be replayed:")
        broken += [f"- {op.partition('::')[2]}: {reason}" for op, reason in in_python.items()]
    if not graphs:
        nothing = "no collective was called" if eager else _NOTHING_COMPILED
        return "\n".join([nothing, *broken])
    ranks: dict[int, list[dict[str, Any]]] = {}
    for graph in graphs:
        ranks.setdefault(graph["rank"], []).append(graph)
    first, own = next(iter(ranks.items()))
    decisions = [each for graph in own for each in graph["collectives"]]
    fused = sum(each["calls"] for each in decisions if each["fused_into"])
    count = sum(each["calls"] for each in decisions)
    lines = [f"rank {first}: {fused} of {count} collectives fused"]
    for graph in own:
        lines += [_title(graph), *map(_line, graph["collectives"])]
    lines += broken
    advice = Counter[str]()
    for each in decisions:
        advice[each["advice"]] += each["calls"] if each["advice"] else 0
    advice += Counter()  # drops the empty text
    lines += ["what to change:"] if advice else []
    lines += [f"- {text} ({count} x)" for text, count in advice.items()]
    others = [rank for rank, found in ranks.items() if _fates(found) != _fates(own)]
    if others:
        lines.append(f"ranks {others} compiled other graphs than rank {first}: --json has them")
    return "\n".join(lines)


def _title(graph: dict[str, Any]) -> str:
    if graph.get("eager"):
        fusible = sum(each["calls"] for each in graph["collectives"] if each["could_be"])
        return f"called by uncompiled code; symm_cp could fuse or hide {fusible}"
    joint = ", of forward and backward before they are split" if graph.get("joint") else ""
    return f"graph {graph['graph']}{joint}"


def _line(each: dict[str, Any]) -> str:
    size = size_text(each["bytes"])
    calls = f", {each['calls']} calls" if each["calls"] > 1 else ""
    fate = f"left alone: {each['reason']}"
    if each["fused_into"]:
        fate = f"fused into {each['fused_into']}"
    elif each["runs_as"]:
        fate = f"runs as {each['runs_as']}: {each['reason']}"
    at = f", at {each['where']}" if each["where"] else ""
    return f"- {each['name']} ({size} on {each['ranks']} ranks{calls}{at}): {fate}"


def _fates(graphs: list[dict[str, Any]]) -> list[Any]:
    return [
        [(each["name"], each["bytes"], each["fused_into"]) for each in graph["collectives"]]
        for graph in graphs
    ]
