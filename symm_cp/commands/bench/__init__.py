"""`symm-cp bench`, `trace`, `calibrate` and `tune`: times of ops, measured and predicted."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from symm_cp.commands.bench import parsers

# Each command's module and help text. Parsers need no torch.
_COMMANDS = {
    "bench": ("command", "time fused ops against unfused ones and against their limit"),
    "trace": (
        "timeline",
        "record a timeline of each lane of each rank, next to a simulation of the schedule",
    ),
    "calibrate": (
        "calibrate",
        "measure what kernels, copies and calls cost here, for predictions (trace, tune)",
    ),
    "tune": ("tune", "measure which way of fused ops is fastest here, and save it for them"),
}


def add_commands(commands: Any) -> None:
    """Adds these commands to the subparsers of `symm-cp`."""
    for name, (_, text) in _COMMANDS.items():
        getattr(parsers, name)(commands.add_parser(name, help=text, description=text))


def main(args: argparse.Namespace) -> int:
    """Runs one of the commands and returns its exit code."""
    module = import_module(f"symm_cp.commands.bench.{_COMMANDS[args.command][0]}")
    code: int = module.main(args)
    return code
