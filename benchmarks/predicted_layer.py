"""The fused ops of a Llama-3 layer on 8 H100, predicted. No GPU is used, and none was measured.

    python benchmarks/predicted_layer.py --json benchmarks/results/predicted_layer.json

For each matmul of a layer with tensor parallelism: the collective and then the matmul, torch's own
pipeline, and this package's ways. For attention of a sequence spread over 8 GPUs: a kernel for each
rank's keys, and one for those of all peers. All take the same costs, those of
symm_cp/schedule/machine.py, by which the ops choose.

- *unfused*: the peers' parts, one after the other over the link, and one matmul after or before.
- *torch*: the steps of torch's two streams. Kernels take turns on the GPU, and copies on the link;
  a barrier costs a kernel and a signal.
- *shards*, *whole*, *tiles*: the op's own schedule, simulated. A kernel that polls or counts
  is taken to be as fast as the library's, and to do equal shares of its work for each shard. This
  favours *tiles*: those kernels have not been timed.

The host's time is left out (host_time.py measures it). Kernels, copies, signals to peers and waits
for peers, events (which one stream records and another one waits for) and torch's barriers are
counted, of rank 0 (attention: of the rank with the most kernels), before any are put into batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.commands.harness import report
from symm_cp.commands.plan.models import MODELS, Model
from symm_cp.schedule import Compute, Copy, Schedule, Signal, Wait
from symm_cp.schedule.attention_work import AttentionWork
from symm_cp.schedule.layout import head_tail, sequential
from symm_cp.schedule.machine import MACHINES, Machine
from symm_cp.schedule.mask import CAUSAL, NO_MASK
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    ALL_GATHER_AND_POLL,
    CONSUME_AND_REDUCE_SCATTER,
    PRODUCE_AND_REDUCE_SCATTER,
    Variant,
)
from symm_cp.schedule.tiles import tiles, tiles_of_others
from symm_cp.schedule.work import Work

RANKS, TOKENS, ITEM, DTYPE = 8, 8192, 2, "bfloat16"
CONTEXTS = (8192, 32768)
NAMES = ("llama3-8b", "llama3-70b")


@dataclass(frozen=True)
class Counts:
    """Numbers of kernels, copies and other commands that a call issues."""

    kernels: int = 0
    copies: int = 0
    signals: int = 0
    waits: int = 0
    events: int = 0
    barriers: int = 0


@dataclass(frozen=True)
class Row:
    """A way of an op."""

    model: str
    op: str
    way: str
    microseconds: float
    counts: Counts

    def line(self) -> str:
        counts = " ".join(f"{count:3} {name}" for name, count in asdict(self.counts).items())
        return f"{self.model:10} {self.op:34} {self.way:9} {self.microseconds:8.1f} us  {counts}"


@dataclass(frozen=True)
class Matmul:
    """An all-gather-matmul, or a matmul-reduce-scatter: rows of a rank's part, and the weight."""

    name: str
    scatters: bool
    rows: int
    inner: int
    columns: int

    def product(self, machine: Machine, parts: int) -> float:
        return machine.product(parts * self.rows, self.inner, self.columns, DTYPE, ITEM)

    @property
    def part(self) -> int:
        """The bytes that a rank sends each peer, or lets it read."""
        return self.rows * (self.columns if self.scatters else self.inner) * ITEM


def matmuls(model: Model, ranks: int = RANKS) -> tuple[Matmul, ...]:
    """Returns a layer's matmuls on one rank; `up` and `gate` are one matmul."""
    rows, hidden, d = TOKENS // ranks, model.hidden, model.head_dim
    return (
        Matmul("qkv", False, rows, hidden, (model.heads + 2 * model.kv_heads) * d // ranks),
        Matmul("out", True, rows, model.heads * d // ranks, hidden),
        Matmul("up and gate", False, rows, hidden, 2 * model.feed_forward // ranks),
        Matmul("down", True, rows, model.feed_forward // ranks, hidden),
    )


def counted(schedule: Schedule) -> Counts:
    """Counts the steps of a rank; a signal to itself is an event, or a word of its own."""
    steps = [step for lane in schedule.lanes.values() for step in lane]
    signals = [step for step in steps if isinstance(step, Signal)]
    waits = [step for step in steps if isinstance(step, Wait)]
    peers = sum(step.to != schedule.rank for step in signals)
    # A word that a kernel raises is awaited by a stream, as a peer's flag is.
    raised = {flag for step in steps if isinstance(step, Compute) for flag, _ in step.raises}
    awaited = sum(step.source != schedule.rank or step.flag in raised for step in waits)
    return Counts(
        sum(isinstance(step, Compute) for step in steps),
        sum(isinstance(step, Copy) for step in steps),
        peers,
        awaited,
        len(signals) - peers,
    )


def ours(matmul: Matmul, machine: Machine, ranks: int) -> Iterator[tuple[str, float, Counts]]:
    """Predicts this package's ways."""
    one, whole = matmul.product(machine, 1), matmul.product(machine, ranks)

    def predicted(variant: Variant, kernel: float) -> tuple[float, Counts]:
        work = Work(matmul.name, variant, lambda _: kernel, matmul.part, matmul.part)
        schedules = work.schedules(ranks)
        return work.predict(machine, ranks).total, counted(schedules[0])

    if matmul.scatters:
        plain, together = (PRODUCE_AND_REDUCE_SCATTER.staged(together=on) for on in (False, True))
        seconds, counts = predicted(plain, one)
        yield "shards", seconds, counts
        # One matmul; then its parts are copied to where peers read them.
        seconds, counts = predicted(plain, machine.copy(matmul.part))
        copied = replace(counts, kernels=2, copies=counts.copies + ranks)
        yield "whole", seconds + whole, copied
        yield "tiles", *predicted(together, whole)
    else:
        yield "shards", *predicted(ALL_GATHER_AND_CONSUME.staged(), one)
        seconds, counts = predicted(ALL_GATHER_AND_CONSUME.staged(keep=True), 0.0)
        yield "whole", seconds + whole, replace(counts, kernels=1)
        yield "tiles", *predicted(ALL_GATHER_AND_POLL.staged(), whole)


def unfused(matmul: Matmul, machine: Machine, ranks: int) -> tuple[float, Counts]:
    """Predicts a collective, which is a kernel, and one matmul."""
    moved = (ranks - 1) * machine.transfer(matmul.part)
    return machine.kernel_seconds + moved + matmul.product(machine, ranks), Counts(kernels=2)


class _TwoStreams:
    """End times of torch's steps on two streams; the GPU and the link do one step at a time."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.streams = [0.0, 0.0]
        self.gpu = self.link = 0.0
        self.kernels = self.copies = self.barriers = 0

    def kernel(self, stream: int, seconds: float) -> None:
        end = max(self.streams[stream], self.gpu) + seconds
        self.streams[stream] = self.gpu = end
        self.kernels += 1

    def pull(self, stream: int, nbytes: float) -> None:
        end = max(self.streams[stream], self.link) + self.machine.transfer(nbytes)
        self.streams[stream] = self.link = end
        self.copies += 1

    def copy(self, stream: int, nbytes: float) -> None:
        self.streams[stream] += self.machine.copy(nbytes)
        self.copies += 1

    def barrier(self, stream: int) -> None:
        self.streams[stream] += self.machine.kernel_seconds + self.machine.signal_seconds
        self.barriers += 1

    def fork(self) -> None:
        self.streams[1] = max(self.streams)

    def join(self) -> None:
        self.streams[0] = max(self.streams)

    def result(self) -> tuple[float, Counts]:
        # The streams wait for each other twice. Barriers are kernels.
        kernels = self.kernels + self.barriers
        counts = Counts(kernels, self.copies, events=2, barriers=self.barriers)
        return max(self.streams), counts


def torchs(matmul: Matmul, machine: Machine, ranks: int) -> tuple[float, Counts]:
    """Predicts `_pipelined_multi_all_gather_and_consume`, or `_pipelined_produce_and_all2all`."""
    run, one = _TwoStreams(machine), matmul.product(machine, 1)
    run.barrier(0)
    if not matmul.scatters:
        run.copy(0, matmul.part)
        run.barrier(0)
        run.fork()
        run.kernel(0, one)
        for step in range(1, ranks):
            run.pull(step % 2, matmul.part)
            run.kernel(step % 2, one)
        run.join()
        run.barrier(0)
        return run.result()
    run.fork()
    for step in range(1, ranks):
        run.kernel(step % 2, one)
        run.barrier(step % 2)
        run.pull(step % 2, matmul.part)
        run.barrier(step % 2)
    run.kernel(0, one)
    run.join()
    run.barrier(0)
    run.kernel(0, machine.reduce(matmul.part, ranks))
    return run.result()


def matmul_rows(model: Model, machine: Machine, ranks: int = RANKS) -> Iterator[Row]:
    for matmul in matmuls(model, ranks):
        kind = "matmul-reduce-scatter" if matmul.scatters else "all-gather-matmul"
        ways = [("unfused", *unfused(matmul, machine, ranks))]
        ways += [("torch", *torchs(matmul, machine, ranks)), *ours(matmul, machine, ranks)]
        for way, seconds, counts in ways:
            yield Row(model.name, f"{matmul.name}, {kind}", way, seconds * 1e6, counts)


def _attention_counts(work: AttentionWork, ranks: int, way: str) -> Counts:
    """Counts kernels (to attend and merge) and other steps, on the rank with the most kernels."""
    together = way == "together"
    pattern = CONSUME_AND_REDUCE_SCATTER if work.backward else ALL_GATHER_AND_CONSUME
    variant = pattern.staged(together=True) if together else pattern.staged()
    found = []
    for rank, schedule in enumerate(variant.schedules(ranks)):
        mask, own = work.masks[0], tiles(work.keys, work.masks[0], rank, rank)
        others = (
            [tiles_of_others(work.keys, mask, rank)]
            if together
            else [tiles(work.keys, mask, rank, peer) for peer in range(ranks) if peer != rank]
        )
        attending = len(own) + sum(map(len, others))
        steps = [step for lane in schedule.lanes.values() for step in lane]
        sums = sum(isinstance(s, Compute) and s.kernel in ("reduce", "add") for s in steps)
        # Each tile but the first of a row is merged; in the backward pass each is added.
        merges = attending - 1
        found.append(replace(counted(schedule), kernels=attending + merges + sums))
    return max(found, key=lambda counts: counts.kernels)


def attention_rows(model: Model, machine: Machine, ranks: int = RANKS) -> Iterator[Row]:
    for tokens in CONTEXTS:
        for causal in (False, True):
            layout = (head_tail if causal else sequential)(tokens, ranks)
            mask = CAUSAL if causal else NO_MASK
            forward = AttentionWork(
                1, model.heads, model.kv_heads, model.head_dim, model.head_dim, DTYPE, ITEM,
                layout, layout, (mask,),
            )  # fmt: skip
            for work in (forward, replace(forward, backward=True)):
                op = f"attention {tokens}{' causal' * causal}{' backward' * work.backward}"
                for way, seconds in work.seconds_on_streams(machine, on_device=True).items():
                    counts = _attention_counts(work, ranks, way)
                    yield Row(model.name, op, way, seconds * 1e6, counts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=MACHINES, default="h100")
    parser.add_argument("--json", type=Path, help="write the rows and the date here")
    args = parser.parse_args()
    machine, found = MACHINES[args.machine], []
    print(f"predicted, no GPU: {RANKS} x {args.machine}, {TOKENS} tokens, {DTYPE}")
    for model in (MODELS[name] for name in NAMES):
        for row in (*matmul_rows(model, machine), *attention_rows(model, machine)):
            print(row.line(), flush=True)
            found.append(asdict(row))
    if args.json is not None:
        head = report.heading(["python", *sys.argv], "cpu")
        head |= {"machine": f"predicted, no GPU: {RANKS} x {args.machine}"}
        report.write_json(args.json, head, found)


if __name__ == "__main__":
    main()
