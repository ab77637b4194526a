"""The arguments of `symm-cp bench`, `trace`, `calibrate` and `tune`, without torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from symm_cp.parsing import Deprecated, add_json, add_plot
from symm_cp.ranks import add_rendezvous, counts, positive

#: The default of `--shapes` for each kind of job.
DEFAULTS = {
    "matmul": "256x512x256,512x1024x512,1024x2048x1024",
    "attention": "256x8x64,512x8x64,1024x8x64,2048x8x64",
    "collectives": "4KiB,64KiB,1MiB,16MiB",
    "train": "256x2x256",
}
KINDS = tuple(DEFAULTS)
DTYPES = ("bfloat16", "float32", "float64")
#: The backends by which a device's ranks communicate.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: Variants to time fused ops against; a backend means unfused ops over it.
AGAINST = ("limit", "unfused", "communication", "torch", "gloo", "nccl", "symm_cp")
#: The ops of `symm-cp trace`, each with the kind of shape that it takes.
OPS = {
    "all-gather-matmul": ("matmul", "512x1024x512"),
    "matmul-reduce-scatter": ("matmul", "512x1024x512"),
    "attention": ("attention", "1024x8x64"),
    "all-gather": ("collectives", "16MiB"),
    "reduce-scatter": ("collectives", "16MiB"),
}
#: A copy of `symm_cp.tuning.WAYS`, whose import needs torch.
WAYS = ("shards", "whole")

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


def trace(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp trace`."""
    add = parser.add_argument
    add("op", choices=sorted(OPS))
    add("--shapes", metavar="SHAPE", help="a single one, as in --shapes of symm-cp bench")
    add("--shape", dest="shapes", action=Deprecated, instead="--shapes")
    add("--ranks", type=positive, default=2, help="(%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    add("--calls", type=positive, default=3, help="calls to record (%(default)s)")
    add("--way", choices=WAYS, default="shards", help="of fused matmuls (%(default)s)")
    add(
        "--machine",
        help="machine to simulate: a name or a TOML file (default: the file of symm-cp calibrate; "
        "without one, a brief measurement)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("trace.json"),
        help="file for Perfetto (%(default)s)",
    )
    add_plot(parser)
    add_rendezvous(parser)


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp calibrate`."""
    add = parser.add_argument
    add("--ranks", type=positive, default=2, help="processes that measure at once (%(default)s)")
    add("--seconds", type=float, default=0.15, help="approximate time for each point (%(default)s)")
    add(
        "--threads",
        type=positive,
        help="threads of a rank, to measure the size from which they share copies and reductions "
        "(default: cores per rank)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: where trace and tune look for it)",
    )
    add(
        "--force",
        action="store_true",
        help="write the measurement even if other programs use the cores",
    )
    add_rendezvous(parser)


def tune(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp tune`."""
    add = parser.add_argument
    kinds = ("matmul", "attention")
    add(
        "kind",
        nargs="?",
        choices=kinds,
        default=kinds[0],
        help="attention only on CUDA (%(default)s)",
    )
    add("--shapes", help="as --shapes of symm-cp bench")
    add("--tokens", type=positive, help="tokens of all ranks, for models (512; CUDA: 8192)")
    add("--ranks", type=positive, default=2, help="(%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    add("--device", choices=sorted(BACKENDS), default="cpu", help="(%(default)s)")
    add("--seconds", type=float, default=1.0, help="approximate time for each op (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="file to write (default: where ops look for it)")
    add_rendezvous(parser)
