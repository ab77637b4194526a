"""Collectives against a memcpy of their bytes and against gloo, and the handle's barrier.

python benchmarks/collectives.py --ranks 2 --json benchmarks/results/collectives.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from benchmarks.matmul import symmetric

_KIB = 1024


def _gather_case(group: dist.ProcessGroup, nbytes: int) -> Case:
    ops, wait = torch.ops.symm_mem, torch.ops._c10d_functional.wait_tensor.default
    name, ranks = group.group_name, group.size()
    shard = torch.randn(nbytes // 4)
    shared = symmetric(shard, group)
    full, copy = torch.randn(ranks * nbytes // 4), torch.empty(ranks * nbytes // 4)

    def fused(tensor: torch.Tensor) -> torch.Tensor:
        return wait(ops._low_contention_all_gather.default(tensor, name))

    def in_inference_mode() -> torch.Tensor:
        with torch.inference_mode():
            return fused(shared)

    def check() -> None:
        dist.all_gather_into_tensor(full, shard, group=group)
        assert torch.equal(fused(shared), full) and torch.equal(fused(shard), full)

    return Case(
        f"all_gather {nbytes // _KIB} KiB a rank",
        {
            "memcpy": lambda: torch.empty_like(copy).copy_(full),
            "symmetric input": lambda: fused(shared),
            "the same, inference mode": in_inference_mode,
            "plain input": lambda: fused(shard),
            "gloo": lambda: dist.all_gather_into_tensor(torch.empty_like(copy), shard, group=group),
        },
        check,
        inner=max(1, min(200, (1 << 20) // nbytes)),
    )


def _scatter_case(group: dist.ProcessGroup, nbytes: int) -> Case:
    """`nbytes` is what a rank ends up with."""
    ops = torch.ops.symm_mem
    name, ranks = group.group_name, group.size()
    full = torch.randn(ranks * nbytes // 4)
    shared = symmetric(full, group)
    out = torch.empty(nbytes // 4)
    want = torch.empty_like(out)

    def fused(tensor: torch.Tensor) -> None:
        ops.reduce_scatter_out.default(tensor, name, False, out)

    def gloo() -> None:
        dist.reduce_scatter_tensor(want, full, group=group)

    def check() -> None:
        gloo()
        for tensor in (shared, full):
            fused(tensor)
            torch.testing.assert_close(out, want)

    return Case(
        f"reduce_scatter {nbytes // _KIB} KiB a rank",
        {
            "memcpy": lambda: want.copy_(out),
            "symmetric input": lambda: fused(shared),
            "plain input": lambda: fused(full),
            "gloo": gloo,
        },
        check,
        inner=max(1, min(200, (1 << 20) // nbytes)),
    )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    tensor = symm_mem.empty(1, device="cpu")
    handle = symm_mem.rendezvous(tensor, group)
    yield Case("barrier", {"handle": handle.barrier}, inner=2000)
    made = [_gather_case(group, kib * _KIB) for kib in (4, 64, 1024, 4096, 16384, 65536)]
    made += [_scatter_case(group, kib * _KIB) for kib in (4, 64, 1024, 16384)]
    for case in made:
        case.repetitions = 25
        yield case


if __name__ == "__main__":
    main(cases, __doc__)
