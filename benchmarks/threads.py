"""Copies and reductions by all threads of a rank, against one thread and against a memcpy.

    python benchmarks/threads.py --ranks 1 --threads 2
    python benchmarks/threads.py --ranks 2 --threads 2

One rank is timed against torch's copy of the bytes by all its threads: its copies, its reductions
of two sources (the copy then moves the bytes that these read and write) and its packing of heads.
Several ranks are timed against themselves with one thread: "as chosen" divides where the ranks have
cores for all their threads, "divided" always does.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import symm_cp
from benchmarks.harness import Case, main
from symm_cp import native
from symm_cp.native.wire import DType, ReduceOp

SIZES = tuple(1 << exponent for exponent in (18, 20, 22, 24, 26))
#: As csrc/base/team.h numbers them.
CHOICES = {"one thread": 0, "as chosen": 1, "divided": 2}
#: Of attention: bytes of a head in a row.
HEADS, ROW = 16, 256
#: Reductions from here on are timed past the caches; ops measure which way is faster.
STREAMED = 4 << 20


def _chosen(choice: int, call: Callable[[], object]) -> Callable[[], object]:
    library = native.load()

    def run() -> object:
        library.symm_cp_set_threads(choice, 1)
        return call()

    return run


def _size(size: int) -> str:
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def _alone(size: int) -> Iterator[Case]:
    library = native.load()
    x, y, out = torch.randn(size // 4), torch.randn(size // 4), torch.zeros(size // 4)
    longer = torch.randn(size // 8 * 3)
    room = torch.zeros_like(longer)
    sources = (ctypes.c_void_p * 2)(x.data_ptr(), y.data_ptr())
    streaming = size >= STREAMED

    def copy() -> None:
        library.symm_cp_copy_result(out.data_ptr(), x.data_ptr(), size)

    def reduce() -> None:
        to, count = out.data_ptr(), size // 4
        library.symm_cp_reduce(to, sources, 2, count, DType.FLOAT32, ReduceOp.SUM, streaming)

    def pack() -> None:
        library.symm_cp_pack_heads(out.data_ptr(), x.data_ptr(), HEADS, size // ROW // HEADS, ROW)

    def check_copy() -> None:
        assert torch.equal(out, x)

    def check_reduce() -> None:
        assert torch.equal(out, x + y)

    def check_pack() -> None:
        of_heads = x.view(-1, HEADS, ROW // 4).transpose(0, 1)
        assert torch.equal(out.view(of_heads.shape), of_heads)

    jobs = (
        ("copy", copy, check_copy, lambda: out.copy_(x)),
        ("reduce", reduce, check_reduce, lambda: room.copy_(longer)),
        ("pack", pack, check_pack, lambda: out.copy_(x)),
    )
    for job, call, check, memcpy in jobs:
        # All variants include the time to set the number of threads.
        variants = {"memcpy": _chosen(0, memcpy)}
        variants |= {name: _chosen(choice, call) for name, choice in CHOICES.items()}

        def checked(call: Callable[[], None] = call, check: Callable[[], None] = check) -> None:
            call()
            check()

        yield Case(f"{job}, {_size(size)}", variants, checked, inner=0)


def _together(group: dist.ProcessGroup, size: int) -> Iterator[Case]:
    name, W = group.group_name, group.size()
    x = torch.randn(size // 4)
    block = symm_mem.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)
    symm_mem.rendezvous(block, group)
    over = dist.new_group(list(range(W)), backend="symm_cp")
    whole = torch.empty(W * len(x))
    heads = x.view(1, -1, 16, 64).transpose(1, 2)
    jobs: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name),
        "all-reduce, in place": lambda: torch.ops.symm_mem.one_shot_all_reduce(block, "sum", name),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, x, group=over),
        "heads": lambda: symm_cp.sequence_to_heads(heads, group=group),
    }
    for job, call in jobs.items():
        variants = {name: _chosen(choice, call) for name, choice in CHOICES.items()}
        found = {name: variant() for name, variant in variants.items()}

        def check(found: dict[str, object] = found) -> None:
            tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)

        label = f"{job}, {_size(size)}, {W} ranks"
        yield Case(label, variants, check, inner=0, threaded=("divided",))


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for size in SIZES:
        yield from _alone(size) if group.size() == 1 else _together(group, size)


if __name__ == "__main__":
    main(cases, __doc__)
