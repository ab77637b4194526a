"""Trains the variants on the same batches, and measures their steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.context_parallel import HeadTail
from symm_cp.demo import compiled, variants
from symm_cp.demo.arguments import DemoOptions
from symm_cp.demo.comparison import Result, show
from symm_cp.demo.data import batches, read_text
from symm_cp.demo.model import VOCABULARY, Rotation, Transformer, rotation
from symm_cp.demo.progress import Progress
from symm_cp.demo.variants import ModelVariant, RankGrid

_LEARNING_RATE = 2e-3


@dataclass
class Trainer:
    """A variant in training: its optimizer, losses and seconds of each step."""

    variant: ModelVariant
    positions: Rotation
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = self.variant.model.parameters()
        self._optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, grid: RankGrid | None) -> None:
        """Trains on this rank's part of a batch, (S / W, B), or on all of it without a grid."""
        start = time.perf_counter()
        logits = self.variant.model(inputs, self.positions)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
        if grid is not None:
            loss = loss / grid.all.size()
        loss.backward()
        if grid is not None:
            self.variant.sum_gradients(grid)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


class DemoRun:
    """The whole demo on one rank."""

    def __init__(
        self, options: DemoOptions, group: dist.ProcessGroup, *, quiet: bool = False
    ) -> None:
        self.options = options
        self.group = group
        self.rank = group.rank()
        self.grid = _grid(options, group)
        config = options.model
        text, self.text_name = read_text(options.text)
        self.text_bytes = len(text)
        self.batches = batches(text, options.steps, options.seq, options.batch, options.seed)
        torch.manual_seed(options.seed)
        self.model = Transformer(config).to(options.dtype)
        self.positions = rotation(options.seq, config.head_dim, options.dtype)
        self.progress = Progress(4 * options.steps) if self.rank == 0 and not quiet else None

    def result(self) -> Result:
        """Trains all variants; returns the same result on all ranks."""
        dense = self.train_dense()
        spread = self.train_spread()
        if self.progress is not None:
            self.progress.close()
        return Result(
            options=self.options,
            text=f"{self.text_bytes / 1e6:.1f} MB of {self.text_name}",
            parameters=sum(p.numel() for p in self.model.parameters()),
            losses={t.variant.name: self.total(t.losses).tolist() for t in (dense, *spread)},
            seconds={t.variant.name: self.slowest(t.seconds).tolist() for t in (dense, *spread)},
        )

    def train_dense(self) -> Trainer:
        """Trains on rank 0; the others sleep at a barrier until each step is done."""
        trainer = Trainer(variants.dense(self.model), self.positions)
        for batch in self.batches:
            if self.rank == 0:
                trainer.step(batch[:-1], batch[1:], None)
            else:
                trainer.losses.append(0.0)
                trainer.seconds.append(0.0)
            self.advance(trainer)
            dist.barrier(self.group)
        return trainer

    def train_spread(self) -> list[Trainer]:
        """Trains the other variants, a step of each in turn, so that drift affects them equally."""
        spread = trainers(self, compiled if self.options.compile else variants)
        for index, batch in enumerate(self.batches):
            inputs, targets = self.own_part(batch[:-1]), self.own_part(batch[1:])
            first = index % len(spread)
            for trainer in (*spread[first:], *spread[:first]):
                dist.barrier(self.group)
                trainer.step(inputs, targets, self.grid)
                self.advance(trainer)
        return spread

    def rows(self) -> torch.Tensor:
        """Returns the positions that this tensor-parallel group holds."""
        return self.grid.layout.positions(self.grid.context.rank())

    def own_part(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the sequence."""
        tensor = self.grid.tensor
        return batch[self.rows()].chunk(tensor.size())[tensor.rank()]

    def total(self, losses: list[float]) -> torch.Tensor:
        """Returns the sum over the ranks, each of which has its part of the mean."""
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total

    def slowest(self, seconds: list[float]) -> torch.Tensor:
        """Returns the time of the slowest rank for each step."""
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return slowest

    def advance(self, trainer: Trainer) -> None:
        """Shows a finished step."""
        if self.progress is not None:
            step = f"step {len(trainer.losses)}/{self.options.steps}"
            self.progress.advance(f"{trainer.variant.name}: {step}, {trainer.seconds[-1]:.2f} s")


def trainers(run: DemoRun, kind: ModuleType) -> list[Trainer]:
    """Returns trainers of the spread variants: unfused, fused, and the compute alone."""
    cos, sin = (t[run.rows()] for t in run.positions)
    makers = (kind.unfused, kind.fused, variants.compute_alone)
    return [Trainer(make(run.model, run.grid), (cos, sin)) for make in makers]


def _grid(options: DemoOptions, group: dist.ProcessGroup) -> RankGrid:
    """Returns the groups: neighbours share features, ranks one tensor group apart a sequence."""
    numbers = torch.arange(options.ranks).view(options.cp, -1)
    mesh = DeviceMesh("cpu", numbers, mesh_dim_names=("cp", "tp"))
    layout = HeadTail(options.seq, options.cp)
    return RankGrid(group, mesh.get_group("tp"), mesh.get_group("cp"), layout)


def run_rank(options: DemoOptions, group: dist.ProcessGroup) -> int:
    """Runs the demo as one rank of a group; returns the exit code."""
    result = DemoRun(options, group).result()
    if group.rank() == 0:
        show(result)
    # All ranks have the same result; torchrun takes the exit code from any of them.
    return 0 if result.agree() else 1
