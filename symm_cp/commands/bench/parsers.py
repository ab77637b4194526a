"""The arguments of `symm-cp bench`, without torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from symm_cp.parsing import DTYPES, add_json, add_plot
from symm_cp.ranks import add_rendezvous, counts, positive

#: The default of `--shapes` for each kind of job.
DEFAULTS = {
    "matmul": "256x512x256,512x1024x512,1024x2048x1024",
    "attention": "256x8x64,512x8x64,1024x8x64,2048x8x64",
    "collectives": "4KiB,64KiB,1MiB,16MiB",
    "train": "256x2x256",
}
KINDS = tuple(DEFAULTS)
#: The backends by which a device's ranks communicate.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: Variants to time fused ops against; a backend means unfused ops over it.
AGAINST = ("limit", "unfused", "communication", "torch", "gloo", "nccl", "symm_cp")
_SHAPES = (
    "models (llama3-8b, llama3-70b, qwen3-32b) or, for each rank, ROWSxINNERxCOLUMNS of matmuls, "
    "TOKENSxHEADSxHEAD_DIM of attention, bytes (4KiB) of collectives"
)


def bench(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp bench`."""
    add = parser.add_argument
    add("kind", nargs="?", choices=(*KINDS, "all"), default="all", help="(%(default)s)")
    add("--ranks", type=counts, default=[2], help="a list (1,2,4) or doubling numbers (1..16); (2)")
    add("--shapes", help=_SHAPES)
    add("--tokens", type=positive, help="tokens of all ranks, for models (512; CUDA: 8192)")
    add("--dtype", default="float32", help=f"one or more of {', '.join(DTYPES)} (%(default)s)")
    add("--device", choices=sorted(BACKENDS), default="cpu", help="(%(default)s)")
    add(
        "--against",
        default="limit,unfused,communication",
        help=f"one or more of {', '.join(AGAINST)}; unfused ops run over gloo (CUDA: nccl), or "
        "over each backend that is named (%(default)s)",
    )
    add("--seconds", type=float, default=4.0, help="approximate time for each case (%(default)s)")
    add_json(parser, "all results")
    add("--csv", type=Path, metavar="FILE", help="write a line for each variant to this file")
    add_plot(parser)
    add("--rows", type=Path, help=argparse.SUPPRESS)
    add_rendezvous(parser)
