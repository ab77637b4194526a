"""`symm-cp bench`, `trace`, `calibrate` and `tune`: times of ops, measured and predicted."""

from __future__ import annotations

import argparse
from typing import Any

from symm_cp.bench import calibrate, command, timeline, tune

_COMMANDS = {"bench": command, "trace": timeline, "calibrate": calibrate, "tune": tune}


def add_commands(commands: Any) -> None:
    """Adds these commands to the subparsers of `symm-cp`."""
    for name, module in _COMMANDS.items():
        parser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs one of the commands and returns its exit code."""
    return _COMMANDS[args.command].main(args)
