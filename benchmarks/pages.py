"""Symmetric memory in huge pages that the system has reserved, against pages of 4 KiB.

    sysctl vm.nr_hugepages=256  # as root
    python benchmarks/pages.py

The first job takes symmetric memory, writes it and gives it back; the others read it: in order, at
random (16 rows of 4 KiB from each MiB), and as the input of an all-reduce.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from benchmarks.harness import Case, main

SIZES = (4 << 20, 16 << 20, 64 << 20)
#: Values of SYMM_CP_HUGE_PAGES.
PAGES = {"4 KiB pages": "0", "huge pages": "1"}
HUGE = 2 << 20


def _reserved() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free")), 0)


def _taken(size: int, pages: str, group: dist.ProcessGroup) -> torch.Tensor:
    os.environ["SYMM_CP_HUGE_PAGES"] = PAGES[pages]
    block = symm_mem.empty(size // 4, dtype=torch.float32, device="cpu")
    symm_mem.rendezvous(block, group)
    return block.fill_(1.0)


def _jobs(size: int, pages: str, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    block = _taken(size, pages, group)
    rows = block.view(-1, 1024)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[::16]
    out, some = torch.empty_like(block), torch.empty(len(order), 1024)
    return {
        "take and write": lambda: _taken(size, pages, group),
        "read in order": lambda: out.copy_(block),
        "read at random": lambda: torch.index_select(rows, 0, order, out=some),
        "all-reduce": lambda: torch.ops.symm_mem.one_shot_all_reduce(
            block, "sum", group.group_name
        ),
    }


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for size in SIZES:
        # On all ranks: memory that the jobs read, and memory that they allocate.
        if (needed := 2 * group.size() * size // HUGE) > _reserved():
            sys.exit(f"needs {needed} free huge pages, {_reserved()} are: see --help")
        jobs = {pages: _jobs(size, pages, group) for pages in PAGES}
        for job in jobs["huge pages"]:
            variants = {pages: calls[job] for pages, calls in jobs.items()}
            yield Case(f"{job}, {size >> 20} MiB", variants, lambda: None, inner=0)


if __name__ == "__main__":
    main(cases, __doc__)
