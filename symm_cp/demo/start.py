"""`symm-cp demo`: checks the arguments, then starts the ranks (torchrun has started its own)."""

from __future__ import annotations

import argparse
import sys

from symm_cp import native
from symm_cp.demo.arguments import check
from symm_cp.ranks import exit_as_rank, is_rank, run_ranks


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp demo` and returns the exit code, 0 if all losses agree."""
    try:
        options = check(args)
        native.load()  # built once, before the ranks start
    except (ValueError, native.BuildError) as error:
        print(f"symm-cp demo: {error}", file=sys.stderr)
        return 2
    if is_rank():
        from symm_cp.demo.train import run_rank

        exit_as_rank(lambda group: run_rank(options, group), options.rendezvous)
    return run_ranks("demo", options.ranks, args.arguments)
