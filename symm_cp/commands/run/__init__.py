"""`symm-cp run`: torchrun, with this package's backend instead of gloo on CPU.

`symm-cp exec` does the same for a program that starts its ranks itself, or has only one. Programs
need no edit. `startup/sitecustomize.py` replaces the backend: its folder comes first in the
`PYTHONPATH` of the programs started here, so Python runs them, and all their children, just as
it would have.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from symm_cp import cores

HELP = "start a program as torchrun does; gloo's groups on CPU use shared memory instead"
EXEC_HELP = "start any program; gloo's groups on CPU, also in children, use shared memory instead"
_EPILOG = (
    "Process groups that the program requests with gloo, or without a backend on a machine without "
    "accelerators, get the backend symm_cp for CPU tensors. dist.get_backend() still returns the "
    "requested backend. Groups of nccl, and tensors on accelerators, do not change."
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
    _add_options(torchrun)
    _add_numa(torchrun)
    return torchrun


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend-for",
        type=_names,
        default="gloo",
        metavar="NAMES",
        help="backends, with commas between, that symm_cp replaces on CPU; none: no backend "
        "(%(default)s)",
    )
    parser.add_argument(
        "--cuda-on-cpu",
        type=int,
        metavar="DEVICES",
        help='use the CPU for "cuda", as if there were this many GPUs: for tests',
    )


def _add_numa(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numa",
        choices=(*cores.UNITS, "none"),
        default="none",
        help="divide the cores that this process may use among the ranks of this host, node by "
        "node or socket by socket; each rank runs a thread on each of its cores, unless "
        "OMP_NUM_THREADS is set (%(default)s)",
    )


def add_exec(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp exec`."""
    parser.epilog = _EPILOG
    parser.usage = (
        "symm-cp exec [-h] [--backend-for NAMES] [--cuda-on-cpu DEVICES] [--numa UNIT] "
        "-- COMMAND ..."
    )
    _add_numa(parser)
    add_program(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds the program, and the options for starting it."""
    _add_options(parser)
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="a program and its arguments"
    )


def _check() -> None:
    """Raises `RuntimeError` if process groups could not get the requested backend."""
    import torch
    from torch.distributed import distributed_c10d

    from symm_cp import native

    if not hasattr(distributed_c10d, "_new_process_group_helper"):
        raise RuntimeError(f"torch {torch.__version__} makes process groups in an unknown way")
    native.load()  # built once, before the ranks start


@contextmanager
def environment(args: argparse.Namespace) -> Iterator[None]:
    """Sets the environment that programs inherit, in the `with` block, as `args` say."""
    names, cuda_on_cpu = args.backend_for, args.cuda_on_cpu
    names = "" if names == "none" else names
    path = os.pathsep.join(filter(None, [str(_STARTUP), os.environ.get("PYTHONPATH")]))
    before = dict(os.environ)
    os.environ.update(PYTHONPATH=path, SYMM_CP_BACKEND_FOR=names)
    if getattr(args, "numa", "none") != "none":
        threads = "" if "OMP_NUM_THREADS" in before else ":threads"
        os.environ[cores.VARIABLE] = args.numa + threads
    if cuda_on_cpu:
        os.environ["SYMM_CP_CUDA_ON_CPU"] = str(cuda_on_cpu)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _could_build(command: str, names: str) -> bool:
    """Tells whether groups can use symm_cp, or do not need it; prints why if they cannot."""
    try:
        if names != "none":
            _check()
    except RuntimeError as error:
        print(
            f"symm-cp {command}: {error}\n"
            f"symm-cp {command}: --backend-for none leaves gloo in place",
            file=sys.stderr,
        )
        return False
    return True


def _shares(args: argparse.Namespace) -> list[cores.Share] | None:
    """Returns the cores of each rank on this host, as `--numa` says; prints an error, if any."""
    from torch.distributed.run import determine_local_world_size

    if args.numa == "none":
        return []
    try:
        ranks = determine_local_world_size(args.nproc_per_node)
        shares = cores.shares(args.numa, ranks, os.sched_getaffinity(0))
    except ValueError as error:
        print(f"symm-cp run: --numa {args.numa}: {error}", file=sys.stderr)
        return None
    for rank, share in enumerate(shares):
        threads = os.environ.get("OMP_NUM_THREADS", share.threads)
        print(f"symm-cp run: local rank {rank} on {share}, {threads} threads", file=sys.stderr)
    return shares


def _isolated(program: str, arguments: Sequence[str]) -> str:
    """Returns the option that makes Python ignore the environment, or "" if there is none."""
    path, options = Path(program), list(arguments)
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError:
        first = b""
    if first.startswith(b"#!"):
        words = first[2:].decode(errors="replace").split()
        path = Path(next((word for word in words if "python" in Path(word).name), ""))
        options = [word for word in words if word.startswith("-")]
    if not path.name.startswith("python"):
        return ""
    for option in options:
        if not option.startswith("-") or option[1:2] in ("", "-", "c", "m"):
            break
        if set(option[1:]) & {"I", "E"}:
            return option
    return ""


def command_of(name: str, args: argparse.Namespace) -> tuple[list[str], int]:
    """Returns the program with its arguments, and 0; or an empty list, and an exit code."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        print(f"symm-cp {name}: COMMAND is missing: symm-cp {name} -- COMMAND ...", file=sys.stderr)
        return [], 2
    program = shutil.which(command[0])
    if program is None:
        print(f"symm-cp {name}: {command[0]}: no such command", file=sys.stderr)
        return [], 127
    names = args.backend_for
    if names != "none" and (option := _isolated(program, command[1:])):
        print(
            f"symm-cp {name}: {command[0]} runs Python with {option}, by which it ignores the "
            "environment that redirects its groups: leave the option out",
            file=sys.stderr,
        )
        return [], 2
    return (command, 0) if _could_build(name, names) else ([], 2)


def main_exec(args: argparse.Namespace) -> int:
    """Runs `symm-cp exec`: this process becomes the program. Returns an exit code if it cannot."""
    command, code = command_of("exec", args)
    if not command:
        return code
    sys.stdout.flush()
    with environment(args):
        os.execvp(command[0], command)
    raise AssertionError  # execvp does not return


def main(arguments: Sequence[str]) -> int:
    """Runs `symm-cp run` and returns the exit code, torchrun's."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    args = parser().parse_args(arguments)
    names = args.backend_for
    shares = _shares(args)
    if shares is None or not _could_build("run", names):
        return 2
    with environment(args):
        if shares:  # otherwise torchrun sets 1, with a warning
            os.environ.setdefault("OMP_NUM_THREADS", str(shares[0].threads))
        try:
            record(torchrun.run)(args)
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            return 1
        except SignalException as error:  # torchrun has sent the signal to the ranks, too
            print(f"\nsymm-cp run: ended by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval
    return 0
