"""`symm-cp demo`: checks the arguments, then starts the ranks, unless torchrun did."""

from __future__ import annotations

import argparse
import sys

from symm_cp import launch, native
from symm_cp.demo import options as demo_options


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp demo` and returns the exit code: 0 when all losses agree."""
    try:
        options = demo_options.check(given)
        native.load()  # built once, before the ranks start
    except (ValueError, native.BuildError) as error:
        print(f"symm-cp demo: {error}", file=sys.stderr)
        return 2
    if launch.is_rank():
        from symm_cp.demo.train import run_rank

        launch.leave(launch.as_rank(lambda group: run_rank(options, group), options.rendezvous))
    return launch.run_ranks("demo", options.ranks, given.arguments)
