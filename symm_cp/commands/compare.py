"""`symm-cp compare -- SCRIPT`: runs a training script on one rank and on several, and compares.

The script runs unchanged, as with `symm-cp run`. It must train on the same whole batches on any
number of ranks. `symm_cp/testing/steps.py` records in each rank what its optimizers see.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from symm_cp import __version__
from symm_cp.parsing import what_ran
from symm_cp.ranks import positive

HELP = "run a training script on one rank and on several: which gradient differs first, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp compare`."""
    parser.usage = "symm-cp compare [-h] [--ranks N] [--steps N] [--dtype DTYPE] -- SCRIPT ..."
    add = parser.add_argument
    add("--ranks", type=positive, default=2, help="(%(default)s)")
    add("--steps", type=positive, default=3, help="optimizer steps to compare (%(default)s)")
    add(
        "--dtype",
        choices=["float64", "float32", "keep"],
        default="float64",
        help="torch's default dtype; keep: the script's (%(default)s)",
    )
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="as for torchrun")


def main(args: argparse.Namespace) -> int:
    """Runs the script twice and prints the report; returns 1 if the runs differ."""
    script = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not script:
        print("symm-cp compare: SCRIPT is missing: symm-cp compare -- SCRIPT ...", file=sys.stderr)
        return 2
    if importlib.util.find_spec("pytest") is None:
        print("symm-cp compare: needs pytest: pip install symm_cp[testing]", file=sys.stderr)
        return 2
    import torch

    from symm_cp.testing.compare import compared

    runs = []
    with tempfile.TemporaryDirectory(prefix="symm-cp-compare-") as folder:
        for ranks in (1, args.ranks):
            path = Path(folder, str(ranks))
            path.mkdir()
            settings = {"SYMM_CP_COMPARE": f"{args.steps} {args.dtype} {path}"}
            start = [sys.executable, "-m", "symm_cp", "run", "--standalone"]
            ended = subprocess.run(
                [*start, f"--nproc-per-node={ranks}", *script],
                env={**os.environ, **settings},
                stdout=sys.stderr,  # for the report alone
                check=False,
            )
            if ended.returncode:
                print(
                    f"symm-cp compare: on {ranks} ranks the script ended with exit code "
                    f"{ended.returncode}; --dtype keep leaves its dtypes as they are",
                    file=sys.stderr,
                )
                return ended.returncode if ended.returncode > 0 else 128 - ended.returncode
            files = (path / f"{rank}.pt" for rank in range(ranks))
            # The script's own ranks wrote them, into a folder of this user's.
            runs.append([torch.load(f, weights_only=False) if f.exists() else [] for f in files])
    comparison = compared(runs[0][0], runs[1])
    compared_steps = f"gradients, norms and weights of up to {args.steps} steps"
    print(what_ran(__version__, script, f"1 and {args.ranks} ranks", args.dtype, compared_steps))
    print(comparison)
    return 0 if comparison.equal else 1
