"""Simulated against measured times of ops on CPU.

    python benchmarks/predictions.py --ranks 2 --json benchmarks/results/predictions_2.json

Machine and kernels are measured in the same run, on all ranks at once, so that contention for
memory and cores is included; the rest is the schedule, as in `symm-cp trace`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from benchmarks.harness import Case, main
from symm_cp import tuning
from symm_cp.commands.bench import calibrate, shapes
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.bench.timeline import predicted
from symm_cp.commands.harness.measure import FUSED, Row

SHAPES = {
    "matmul": "256x512x256,384x768x384,512x1024x512,768x1536x768,1024x2048x1024,1280x2560x1280",
    "attention": "256x4x64,512x4x64,1024x4x64,2048x4x64",
}


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    machine = calibrate.measure(group)
    with tuning.forced("shards"):
        for kind, text in SHAPES.items():
            for wanted in shapes.wanted(kind, text, group.size(), 0):
                job = wanted.make(Setting(group))
                if job.work is None:
                    continue
                seconds = predicted(job, machine, group, 1).total

                def error(row: Row, seconds: float = seconds) -> dict[str, object]:
                    return {
                        "predicted_ms": seconds * 1e3,
                        "error": seconds / row.median("op") - 1,
                    }

                yield Case(job.case.name, {"op": job.case.variants[FUSED]}, after=error)


if __name__ == "__main__":
    main(cases, __doc__)
