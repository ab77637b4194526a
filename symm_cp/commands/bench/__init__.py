"""`symm-cp bench`: times of fused ops, of unfused ones, and their limit."""

from __future__ import annotations

import argparse
from pathlib import Path

from symm_cp.parsing import add_json, add_plot
from symm_cp.ranks import add_rendezvous, counts, positive

HELP = "time fused ops against unfused ones and against their limit"
#: The default of `--shapes` for each kind of job.
DEFAULTS = {
    "matmul": "256x512x256,512x1024x512,1024x2048x1024",
    "attention": "256x8x64,512x8x64,1024x8x64,2048x8x64",
    "collectives": "4KiB,64KiB,1MiB,16MiB",
}
_SHAPES = (
    "models (llama3-8b, llama3-70b, qwen3-32b) or, for each rank, ROWSxINNERxCOLUMNS of matmuls, "
    "TOKENSxHEADSxHEAD_DIM of attention, bytes (4KiB) of collectives"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp bench`. Needs no torch."""
    add = parser.add_argument
    add("kind", nargs="?", choices=(*DEFAULTS, "all"), default="all", help="(%(default)s)")
    add("--ranks", type=counts, default=[2], help="a list (1,2,4) or doubling numbers (1..16); (2)")
    add("--shapes", help=_SHAPES)
    add("--tokens", type=positive, default=512, help="of all ranks, for models (%(default)s)")
    add("--dtype", default="float32", help="one or more (float32,bfloat16); (%(default)s)")
    add("--seconds", type=float, default=4.0, help="approximate time for each case (%(default)s)")
    add_json(parser, "all results")
    add_plot(parser)
    add("--rows", type=Path, help=argparse.SUPPRESS)
    add_rendezvous(parser)
