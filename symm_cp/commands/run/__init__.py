"""`symm-cp run`: torchrun, with this package's backend in place of gloo on CPU.

Programs need no edit. What makes the exchange is `startup/sitecustomize.py`, a folder that comes
first in the `PYTHONPATH` of the programs started here, so Python runs them just as torchrun has it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HELP = "start a program as torchrun does; gloo's groups on CPU use shared memory instead"
_EPILOG = (
    "Process groups for which the program asks gloo, or no backend on a machine without "
    "accelerators, get the backend symm_cp for CPU tensors. dist.get_backend() still says what the "
    "program asked for. Groups of nccl, and tensors on accelerators, are left as they are."
)
_STARTUP = Path(__file__).resolve().parent / "startup"


def _names(text: str) -> str:
    names = [name.strip().lower() for name in text.split(",")]
    if not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} must be names of backends, or none")
    if "mpi" in names:
        raise argparse.ArgumentTypeError("mpi cannot be replaced: mpirun starts its ranks")
    return ",".join(names)


def parser() -> argparse.ArgumentParser:
    """Returns torchrun's parser with the options of `symm-cp run`."""
    from torch.distributed.run import get_args_parser

    torchrun = get_args_parser()
    torchrun.prog, torchrun.description, torchrun.epilog = "symm-cp run", HELP, _EPILOG
    torchrun.add_argument(
        "--backend-for",
        type=_names,
        default="gloo",
        metavar="NAMES",
        help="backends, with commas between, that symm_cp replaces on CPU; none: no backend "
        "(%(default)s)",
    )
    return torchrun


def _check() -> None:
    """Raises `RuntimeError` if process groups could not be made as asked."""
    import torch
    from torch.distributed import distributed_c10d

    from symm_cp import native

    if not hasattr(distributed_c10d, "_new_process_group_helper"):
        raise RuntimeError(f"torch {torch.__version__} makes process groups in an unknown way")
    native.load()  # built once, before the ranks start


@contextmanager
def _environment(names: str) -> Iterator[None]:
    """Sets the environment that programs inherit, inside."""
    path = os.pathsep.join(filter(None, [str(_STARTUP), os.environ.get("PYTHONPATH")]))
    before = dict(os.environ)
    os.environ.update(PYTHONPATH=path, SYMM_CP_BACKEND_FOR=names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(arguments: Sequence[str]) -> int:
    """Runs `symm-cp run` and returns the exit code, torchrun's."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    args = parser().parse_args(arguments)
    names = args.backend_for
    if names != "none":
        try:
            _check()
        except RuntimeError as error:
            print(
                f"symm-cp run: {error}\nsymm-cp run: --backend-for none leaves gloo in place",
                file=sys.stderr,
            )
            return 2
    with _environment("" if names == "none" else names):
        try:
            record(torchrun.run)(args)
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            return 1
        except SignalException as error:  # the ranks have been sent it, too
            print(f"\nsymm-cp run: ended by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval
    return 0
