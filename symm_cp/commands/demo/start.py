"""`symm-cp demo`: checks the arguments, then starts the ranks, unless torchrun has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from symm_cp import native
from symm_cp.commands.demo import arguments
from symm_cp.commands.demo.decoding import options as decoding_options
from symm_cp.ranks import exit_as_rank, is_rank, run_ranks


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp demo` and returns the exit code, 0 if all losses, or all tokens, agree."""
    try:
        run = _decoding(args) if args.decode else _training(args)
        native.load()  # built once, before the ranks start
    except (ValueError, native.BuildError) as error:
        print(f"symm-cp demo: {error}", file=sys.stderr)
        return 2
    if is_rank():
        exit_as_rank(run.rank, args.rendezvous)
    return run_ranks("demo", run.world_size, args.arguments)


@dataclass(frozen=True)
class _Run:
    """A demo with checked arguments: its number of ranks, and the work of a rank."""

    world_size: int
    rank: Callable[[dist.ProcessGroup], int]


def _training(args: argparse.Namespace) -> _Run:
    options = arguments.check(args)

    def rank(group: dist.ProcessGroup) -> int:
        from symm_cp.commands.demo.train import run_rank

        return run_rank(options, group)

    return _Run(options.ranks, rank)


def _decoding(args: argparse.Namespace) -> _Run:
    options = decoding_options.check(args)
    decoding_options.config_of(options)  # raises errors once, before every rank reports them

    def rank(group: dist.ProcessGroup) -> int:
        from symm_cp.commands.demo.decoding.run import run_rank

        return run_rank(options, group)

    return _Run(options.ranks, rank)
