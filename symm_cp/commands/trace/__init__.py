"""`symm-cp trace`: records a timeline of each lane of each rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from symm_cp.parsing import DTYPES, Deprecated, add_plot, shapes
from symm_cp.ranks import add_rendezvous, positive

HELP = "record a timeline of each lane of each rank"

#: The ops, each with the names of its sizes (for each rank) and their defaults.
OPS = {
    "all-gather-matmul": ("ROWSxINNERxCOLUMNS", (512, 1024, 512)),
    "matmul-reduce-scatter": ("ROWSxINNERxCOLUMNS", (512, 1024, 512)),
    "attention": ("TOKENSxHEADSxFEATURES", (1024, 8, 64)),
    "all-gather": ("ELEMENTS", (1 << 22,)),
    "reduce-scatter": ("ELEMENTS", (1 << 22,)),
}
#: A copy of `symm_cp.tuning.ALGORITHMS`, whose import needs torch.
ALGORITHMS = ("shards", "whole")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp trace`. Needs no torch."""
    add = parser.add_argument
    add("op", choices=sorted(OPS))
    names = ", ".join(f"{names} of {op}" for op, (names, _) in OPS.items())
    add("--shapes", type=shapes, metavar="SHAPE", help=f"a single one, for each rank: {names}")
    add("--shape", dest="shapes", type=shapes, action=Deprecated, instead="--shapes")
    add("--ranks", type=positive, default=2, help="(%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    add("--calls", type=positive, default=3, help="calls to record (%(default)s)")
    add("--algorithm", choices=ALGORITHMS, default="shards", help="of fused matmuls (%(default)s)")
    out = Path("trace.json")
    add("--out", type=Path, metavar="FILE", default=out, help="file for Perfetto (%(default)s)")
    add_plot(parser)
    add_rendezvous(parser)
