"""`symm-cp demo`: trains a small transformer in one process and on several ranks; a first example.

`split` shows tensor parallelism, `split_by_torch` torch's own, which `--compile` has fused, and
`Trainer` context parallelism (`--cp`). B, S, D: batch, sequence, features.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs

import symm_cp
from symm_cp.commands.harness.measure import Row, duration, slowest
from symm_cp.commands.harness.start import run_command
from symm_cp.parsing import STDOUT, write_json
from symm_cp.ranks import threads, threads_of
from symm_cp.schedule.simulate import Timeline
from symm_cp.schedule.steps import Compute, Copy, Signal, Wait

LAYERS, DIM, HEADS, BATCH, SEQUENCE, VOCABULARY = 2, 256, 8, 4, 512, 256
_WARM_UP = 2  # steps that allocate workspaces and compile
_COLUMNS = 72  # of the timeline
_ONE = "one process"
_MARKS: dict[type, str] = {Compute: "#", Copy: "<", Signal: "<", Wait: "."}

Batch: TypeAlias = Mapping[str, torch.Tensor]
Split: TypeAlias = Callable[[nn.Module, DeviceMesh], nn.Module]


class Attention(nn.Module):
    """Causal self-attention; on a rank, `q`, `k` and `v` have the features of some heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (B, S, D) to (B, S, D)."""
        heads = (w(x).unflatten(-1, (-1, DIM // HEADS)) for w in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        self.norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.feed_norm, self.feed = nn.RMSNorm(DIM), nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (B, S, D) to (B, S, D)."""
        x = x + self.attention(self.norm(x))
        return x + self.feed(self.feed_norm(x))


class Transformer(nn.Module):
    """Predicts the next byte at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQUENCE, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Maps bytes (B, S) to logits (B, S, 256)."""
        x = self.embedding(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the mean loss of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


_COLUMNWISE = ("attention.q", "attention.k", "attention.v", "feed.0")
_ROWWISE = ("attention.out", "feed.2")


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits the weights over the ranks of a mesh, with communication inside the matmuls."""
    plan = {f"layers.*.{name}": "colwise" for name in _COLUMNWISE}
    plan |= {f"layers.*.{name}": "rowwise" for name in _ROWWISE}
    return symm_cp.tensor_parallel.apply(model, mesh, plan, sequence_parallel=True)


def split_by_torch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits the weights by torch's styles: collectives before and after the matmuls."""
    part, whole = Shard(1), Replicate()  # of the sequence
    take_part, gather = (
        torchs.PrepareModuleInput(input_layouts=a, desired_input_layouts=b, use_local_output=True)
        for a, b in ((whole, part), (part, whole))
    )
    block = {
        **dict.fromkeys(("norm", "feed_norm"), torchs.SequenceParallel(use_local_output=True)),
        **dict.fromkeys(("attention", "feed"), gather),
        **dict.fromkeys(_COLUMNWISE, torchs.ColwiseParallel()),
        **dict.fromkeys(_ROWWISE, torchs.RowwiseParallel(output_layouts=part)),
    }
    plan = {f"layers.*.{name}": style for name, style in block.items()}
    return torchs.parallelize_module(model, mesh, {"layers.0": take_part, **plan, "norm": gather})


class Trainer:
    """A variant in training, with its losses and the seconds of its steps.

    With a mesh, its ranks share each sequence. A rank that is `idle` does not train.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        *,
        count: int = 1,
        idle: bool = False,
    ) -> None:
        self.model, self.mesh, self.count, self.idle = model, mesh, count, idle
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Batch) -> None:
        """Trains on a batch, which is the same on all ranks."""
        start, loss = time.perf_counter(), math.nan
        if not self.idle:
            with threads(self.count):
                loss = self._gradients(batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.losses.append(loss)
        self.seconds.append(time.perf_counter() - start)

    def _gradients(self, batch: Batch) -> float:
        if self.mesh is None:
            loss = loss_of(self.model(batch["input_ids"], batch["position_ids"]), batch)
            loss.backward()
            return loss.item()
        with symm_cp.training_step(
            self.model, batch, self.mesh, loss_function=loss_of, shift_labels=False
        ) as step:
            step.loss.backward()
        return step.loss.item()


def trainers(args: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Trainer]:
    """Returns all variants by name, with equal weights: one process first, ours last."""
    ranks = group.size()
    mesh = init_device_mesh("cpu", (args.cp, ranks // args.cp), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    whole = Transformer()
    found = {
        f"{_ONE}, {count} thread{'s' * (count > 1)}": Trainer(
            copy.deepcopy(whole), count=count, idle=group.rank() > 0
        )
        for count in sorted({1, threads_of(ranks)})
    }

    def add(name: str, split: Split, passes: dict[str, object] | None = None) -> None:
        model = copy.deepcopy(whole)
        if args.cp == 1 or args.cp < ranks:
            model = split(model, mesh["tp"])
        if args.compile:
            model.compile(options=passes)
        found[f"{ranks} ranks, {name}"] = Trainer(model, mesh["cp"] if args.cp > 1 else None)

    if args.cp == 1:  # torch has no context parallelism for CPU
        add("torch", split_by_torch)
    if args.compile:  # the passes find torch's collectives, and fuse them
        add("symm_cp", split_by_torch, symm_cp.inductor.compile_options())
    else:
        add("symm_cp", split)
    return found


def batches(steps: int) -> list[Batch]:
    """Returns random windows of Python source."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - SEQUENCE, (steps, BATCH, 1), generator=draw)
    windows = text[starts + torch.arange(SEQUENCE + 1)].long()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return [
        {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions}
        for ids in windows
    ]


def picture(timeline: Timeline) -> list[str]:
    """Draws what each rank did: a line for a rank, a column for an equal part of the time."""
    width = timeline.total / _COLUMNS
    lines = []
    for rank in sorted({event.rank for event in timeline.events}):
        own = [event for event in timeline.events if event.rank == rank]
        times = (timeline.begin + (column + 0.5) * width for column in range(_COLUMNS))
        steps = (next((e.step for e in own if e.start <= t < e.end), None) for t in times)
        lines.append(
            f"rank {rank} |" + "".join(_MARKS.get(type(step), " ") for step in steps) + "|"
        )
    return lines


def compare(losses: Mapping[str, list[float]]) -> tuple[float, float]:
    """Returns how far losses are from those of one process, and how far they may be.

    A split loss sums in another order: rounding errors of some tens of units in the last place,
    which training carries from step to step. The distance is infinite if a loss is not a number.
    """
    wanted, *others = losses.values()
    apart = [abs(loss - want) for own in others for loss, want in zip(own, wanted, strict=True)]
    allowed = 50 * torch.finfo(torch.float32).eps * wanted[0] * len(wanted)
    return (math.inf if any(map(math.isnan, apart)) else max(apart)), allowed


def show(losses: Mapping[str, list[float]], row: Row, timeline: Timeline) -> None:
    """Prints losses, times and the timeline."""
    columns = f"{'first loss':>12}{'last':>9}{'a step':>10}"
    print(f"{'':<26}{columns}   time / {row.limit} (95% interval)")
    for name, own in losses.items():
        cells = f"{own[0]:>12.5f}{own[-1]:>9.5f}{duration(row.median(name)):>10}"
        print(f"{name:<26}{cells}" + ("" if name.startswith(_ONE) else f"   {row.claim(name)}"))
    apart, allowed = compare(losses)
    verdict = "agree" if apart <= allowed else "DIFFER"
    print(f"losses {verdict}: at most {apart:.1e} apart, {allowed:.1e} allowed\n")
    print(f"the fused ops of a step of {duration(timeline.total)}: # compute, < exchange, . wait")
    print("\n".join(picture(timeline)), flush=True)


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Trains all variants as one of the ranks; returns 0 if their losses agree."""
    args.ranks = group.size()  # torchrun's, if that has started them
    check(args)
    variants = trainers(args, group)
    for batch in batches(args.steps):
        for trainer in variants.values():  # in turn: drift of the machine's speed affects all
            trainer.step(batch)
            dist.barrier(group)  # ranks that wait here sleep
    with symm_cp.trace() as recording:
        trainer.step(batch)
    timeline = recording.all_ranks(group)
    seconds = {
        name: tuple(slowest(own.seconds[: args.steps], group)) for name, own in variants.items()
    }
    if group.rank() > 0:
        return 0
    losses = {name: own.losses[: args.steps] for name, own in variants.items()}
    timed = {name: times[_WARM_UP:] or times for name, times in seconds.items()}
    apart, allowed = compare(losses)
    agree = apart <= allowed
    if args.json != STDOUT:
        alone = [name for name in timed if name.startswith(_ONE)]
        # On a busy machine threads that wait for each other may be slower than one.
        base = min(alone, key=lambda name: statistics.median(timed[name]))
        show(losses, Row("a training step", {base: timed[base], **timed}), timeline)
    if args.json is not None:
        write_json(args.json, {"agree": agree, "losses": losses, "seconds": seconds})
    return 0 if agree else 1


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` if the model cannot be split over the ranks."""
    args.ranks = args.ranks or max(2, args.cp)
    tensor, rest = divmod(args.ranks, args.cp)
    if rest:
        raise ValueError(f"--ranks {args.ranks} is not divisible by --cp {args.cp}")
    if args.compile and args.cp > 1 and tensor > 1:
        raise ValueError(f"--compile --cp {args.cp} requires --ranks {args.cp}, not {args.ranks}")
    if HEADS % tensor:
        raise ValueError(f"{HEADS} attention heads are not divisible by {tensor} ranks")
    if SEQUENCE % (2 * args.cp):
        raise ValueError(
            f"--cp {args.cp}: {SEQUENCE} positions cannot be split into {2 * args.cp} equal chunks"
        )


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp demo`; returns the exit code, 0 if all losses agree."""
    return run_command(args, check, run_rank)
