"""Runs a command that measures on several ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch.distributed as dist

from symm_cp import native
from symm_cp.ranks import exit_as_rank, is_rank, run_ranks


def run_command(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace], object],
    run_rank: Callable[[argparse.Namespace, dist.ProcessGroup], int],
    start: Callable[[argparse.Namespace], int] | None = None,
) -> int:
    """Runs `run_rank` on all ranks, starting them unless this process is one; returns an exit code.

    Before the ranks start, `check` raises `ValueError`, `RuntimeError` or `OSError` for invalid
    arguments, and the native part is built. `start` replaces the default of starting ranks once.
    """
    if is_rank():
        exit_as_rank(lambda group: run_rank(args, group), args.rendezvous)
    try:
        check(args)
        native.load()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"symm-cp {args.command}: {error}", file=sys.stderr)
        return 2
    return start(args) if start else run_ranks(args.command, args.ranks, args.arguments)
