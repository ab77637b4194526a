"""`symm-cp bench`: times of fused ops, of unfused ones, and their limit."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from symm_cp.commands.bench import parsers

HELP = "time fused ops against unfused ones and against their limit"


def add_commands(commands: Any) -> None:
    """Adds the command to the subparsers of `symm-cp`. Needs no torch."""
    parsers.bench(commands.add_parser("bench", help=HELP, description=HELP))


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    code: int = import_module("symm_cp.commands.bench.command").main(args)
    return code
