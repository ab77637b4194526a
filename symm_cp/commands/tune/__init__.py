"""`symm-cp tune`: measures which algorithm of an op is fastest here, and saves it for the ops."""

from __future__ import annotations

import argparse

from symm_cp.parsing import DTYPES, shapes
from symm_cp.ranks import add_rendezvous, positive

HELP = "measure which algorithm of fused ops is fastest here, and save it for them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp tune`. Needs no torch."""
    add = parser.add_argument
    kinds = ("matmul", "attention")
    add("kind", nargs="?", choices=kinds, default=kinds[0], help="attention: on CUDA (%(default)s)")
    add(
        "--shapes",
        type=shapes,
        help="for each rank: ROWSxINNERxCOLUMNS of matmuls, TOKENSxHEADSxKV_HEADSxFEATURES of "
        "attention (those of a layer of Llama-3 8B with 8,192 tokens)",
    )
    add("--ranks", type=positive, default=2, help="(%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    add("--seconds", type=float, default=1.0, help="approximate time for each op (%(default)s)")
    add_rendezvous(parser)
