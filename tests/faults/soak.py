"""Many ops of all kinds and sizes, in groups that come and go: nothing may grow, or slow down.

`python -m tests.faults.soak --ops 200000 --json benchmarks/results/soak.json`
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor

import symm_cp
from symm_cp.testing import Ranks, say

OPS = torch.ops.symm_mem
#: How many times groups are made and destroyed between two footprints of a rank.
GENERATIONS = 8
#: Elements of an op's input: from a cache line to a size that wakes the copy engine.
SMALLEST, LARGEST = 16, 1 << 17
#: One op in this many is always the same, and timed.
TIMED = 10


@dataclass
class Footprint:
    """What a rank holds, once all groups but the first are gone."""

    ops: int
    descriptors: int
    threads: int
    mappings: int  # of symmetric memory
    named_segments: int  # in /dev/shm, apart from semaphores, which other programs have there, too
    resident_mib: float


def footprint(ops: int) -> Footprint:
    """Measures this process."""
    with open("/proc/self/maps") as maps:
        mappings = sum("symm_cp" in line for line in maps)
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Footprint(
        ops,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        mappings,
        sum(not name.startswith("sem.") for name in os.listdir("/dev/shm")),
        pages * os.sysconf("SC_PAGESIZE") / 2**20,
    )


def _gather_matmul(group: dist.ProcessGroup, rows: int) -> None:
    x, weight = torch.ones(rows, 16, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    out = symm_cp.all_gather_matmul(x, weight, group=group)
    assert out[0, 0] == 16
    out.sum().backward()


def _matmul_scatter(group: dist.ProcessGroup, rows: int) -> None:
    x = torch.ones(rows * group.size(), 16, requires_grad=True)
    out = symm_cp.matmul_reduce_scatter(x, torch.ones(16, 4), group=group)
    assert out[-1, -1] == 16 * group.size()
    out.sum().backward()


def _attention(group: dist.ProcessGroup, rows: int) -> None:
    leaves = [torch.ones(1, 2, min(rows, 128), 8, requires_grad=True) for _ in range(3)]
    out = symm_cp.all_gather_attention(*leaves, group=group, is_causal=rows % 2 == 0)
    assert torch.allclose(out, torch.ones(()))
    out.sum().backward()


def _collectives(group: dist.ProcessGroup, rows: int) -> None:
    name, W, x = group.group_name, group.size(), torch.ones(rows * 16 * group.size())
    pending = [
        OPS._low_contention_all_gather(x, name),
        OPS._low_contention_reduce_scatter(x, "sum", name),
        OPS._low_contention_all_gather(x[:16], name),
    ]
    # torch keeps results that are never waited for.
    assert wait_tensor(pending[1])[-1] == W
    assert wait_tensor(pending[0]).numel() == wait_tensor(pending[2]).numel() * rows * group.size()


def _all_reduce(group: dist.ProcessGroup, rows: int) -> None:
    shared = symm_mem.empty(rows * 16, device="cpu").fill_(1)
    symm_mem.rendezvous(shared, group)
    assert OPS.one_shot_all_reduce(shared, "sum", group.group_name)[0] == group.size()
    assert OPS.two_shot_all_reduce_(shared, "sum", group.group_name)[-1] == group.size()


def _backend(group: dist.ProcessGroup, rows: int) -> None:
    """Typical calls of torch.distributed, over the package's backend in all groups but one."""
    W, rank, elements = group.size(), group.rank(), rows * 16
    x, whole = torch.ones(elements), torch.ones(elements * W)
    works = [
        dist.all_reduce(x, group=group, async_op=True),
        dist.all_gather_into_tensor(whole, torch.ones(elements), group, async_op=True),
    ]
    dist.broadcast(torch.ones(elements, dtype=torch.int64), group=group, group_src=rows % W)
    exchanged = torch.empty_like(whole)
    dist.all_to_all_single(exchanged, torch.full_like(whole, rank), group=group)
    part = torch.empty(elements, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, torch.ones(elements * W, dtype=torch.bfloat16), group=group)
    assert exchanged[-1] == W - 1
    assert part[-1] == W
    for work in works:
        assert work is not None
        work.wait()
    assert x[0] == W
    assert whole[-1] == 1
    received = torch.empty(elements)
    peers = (dist.isend, x, (rank + 1) % W), (dist.irecv, received, (rank - 1) % W)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(op, tensor, group=group, group_peer=peer) for op, tensor, peer in peers]
        if W > 1
        else []
    ):
        work.wait()
    assert W == 1 or received[-1] == W
    dist.barrier(group)


KINDS: tuple[tuple[Callable[[dist.ProcessGroup, int], None], int], ...] = (
    (_gather_matmul, 2), (_matmul_scatter, 2), (_attention, 2), (_collectives, 3), (_all_reduce, 2),
    (_backend, 7),
)  # fmt: skip


def _new_groups(choose: random.Random) -> list[dist.ProcessGroup]:
    """The world, a new group of all ranks, and the half of the ranks that includes this one."""
    world = dist.group.WORLD
    assert world is not None
    everyone = list(range(world.size()))
    choose.shuffle(everyone)
    half = max(1, len(everyone) // 2)
    parts = everyone, everyone[:half], everyone[half:]
    made = [dist.new_group(ranks, backend="symm_cp") for ranks in parts]
    return [world, made[0], made[1] if world.rank() in everyone[:half] else made[2]]


def soak(world: dist.ProcessGroup, ops: int, seed: int, looks: int) -> None:
    """Runs `ops` ops, and reports footprints and latencies as JSON."""
    everywhere = random.Random(seed)  # the same choices on all ranks
    samples, latencies, done = [], [], 0
    torch.manual_seed(seed)
    timed = torch.ones(64, 64)
    for look in range(looks):
        for generation in range(GENERATIONS):
            groups = _new_groups(everywhere)
            until = ops * (look * GENERATIONS + generation + 1) // (looks * GENERATIONS)
            while done < until:
                which, kind = everywhere.randrange(3), everywhere.randrange(len(KINDS))
                scale = everywhere.uniform(math.log2(SMALLEST), math.log2(LARGEST))
                run, count = KINDS[kind]
                run(groups[which], max(1, int(2**scale) // 64))
                done += count
                if everywhere.random() < 1 / TIMED:
                    start = time.perf_counter()
                    symm_cp.all_gather_matmul(timed, timed, group=world)
                    latencies.append((done, (time.perf_counter() - start) * 1e6))
                    done += 1
            for group in groups[1:]:
                dist.barrier(group)
                dist.destroy_process_group(group)
            del groups, group
        gc.collect()
        samples.append(asdict(footprint(done)))
        if world.rank() == 0:
            say(json.dumps({"ops": done}))
    say(json.dumps({"samples": samples, "latencies": latencies}))


def percentiles(latencies: list[tuple[int, float]]) -> dict[str, float]:
    """The 50th, 90th and 99th percentiles, in microseconds."""
    ordered = sorted(us for _, us in latencies)
    return {f"p{p}": round(ordered[len(ordered) * p // 100], 1) for p in (50, 90, 99)}


def run(
    ranks: int, ops: int, seed: int, *, looks: int = 20, progress: bool = False
) -> dict[str, Any]:
    """Soaks `ranks` new ranks; returns each rank's samples, and early and late latencies."""
    limit = datetime.timedelta(minutes=5)
    start = time.monotonic()
    with Ranks(seed).own(ranks, soak, ops, seed, looks, group_timeout=limit) as running:
        for _ in range(looks):
            said = running.hear(0, timeout=3600)
            if progress:
                print(f"\r{json.loads(said)['ops']:>9,} ops", end="", file=sys.stderr, flush=True)
        found = [json.loads(text) for text in running.hear_all()]
    latencies = found[0]["latencies"]
    fifth = len(latencies) // 5
    return {
        "command": f"python -m tests.faults.soak --ranks {ranks} --ops {ops} --seed {seed}",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - start, 1),
        "ops": found[0]["samples"][-1]["ops"],
        # The first fifth is warm-up.
        "us_in_the_second_fifth": percentiles(latencies[fifth : 2 * fifth]),
        "us_in_the_last_fifth": percentiles(latencies[-fifth:]),
        "samples_by_rank": [one["samples"] for one in found],
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ops", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report = run(given.ranks, given.ops, given.seed, progress=True)
    print(file=sys.stderr)
    for rank, samples in enumerate(report["samples_by_rank"]):
        for sample in (samples[1], samples[len(samples) // 2], samples[-1]):
            print(f"rank {rank}: {sample}")
    print({key: value for key, value in report.items() if key != "samples_by_rank"})
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
