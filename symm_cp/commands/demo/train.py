"""Trains the variants on the same batches, and measures their steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from symm_cp.commands.demo import compiled, variants
from symm_cp.commands.demo.arguments import DemoOptions
from symm_cp.commands.demo.comparison import WIDEST_INTERVAL, Result, after_warm_up, show
from symm_cp.commands.demo.data import batches, read_text
from symm_cp.commands.demo.model import VOCABULARY, Rotation, Transformer, rotation
from symm_cp.commands.demo.variants import ModelVariant, RankGrid
from symm_cp.commands.harness.measure import slowest
from symm_cp.commands.harness.paired import COMPUTE, FUSED, ratio
from symm_cp.commands.harness.progress import Progress
from symm_cp.context_parallel import HeadTail
from symm_cp.ranks import threads, threads_of

_LEARNING_RATE = 2e-3


@dataclass
class Trainer:
    """A variant in training: its optimizer, losses and seconds of each step."""

    variant: ModelVariant
    positions: Rotation
    grid: RankGrid | None = None  # None: one process trains on whole batches
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = self.variant.model.parameters()
        self._optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Trains on this rank's part of a batch, (S / W, B), or on all of it without a grid."""
        grid = self.grid
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
        self.grids = {name: _grid(options, group, name) for name in _unfused_backends()}
        self.grid = self.grids["gloo"]
        config = options.model
        text, self.text_name = read_text(options.text)
        self.text_bytes = len(text)
        self.batches = batches(text, options.most_steps, options.seq, options.batch, options.seed)
        torch.manual_seed(options.seed)
        self.all_threads = threads_of(options.ranks)
        self.model = Transformer(config).to(options.dtype)
        self.positions = rotation(options.seq, config.head_dim, options.dtype)
        self.progress = (
            Progress(self._variants() * options.steps) if self.rank == 0 and not quiet else None
        )

    def result(self) -> Result:
        """Trains all variants; returns the same result on all ranks."""
        dense = [self.train_dense(threads) for threads in sorted({1, self.all_threads})]
        spread = self.train_spread()
        if self.progress is not None:
            self.progress.close()
        return Result(
            options=self.options,
            text=f"{self.text_bytes / 1e6:.1f} MB of {self.text_name}",
            parameters=sum(p.numel() for p in self.model.parameters()),
            losses={
                t.variant.name: self.total(t.losses[: self.options.steps]).tolist()
                for t in (*dense, *spread)
            },
            seconds={t.variant.name: slowest(t.seconds, self.group) for t in (*dense, *spread)},
        )

    def train_dense(self, count: int) -> Trainer:
        """Trains on rank 0, with `count` threads; the others sleep until each step is done."""
        trainer = Trainer(variants.dense(self.model, count), self.positions)
        for batch in self.batches[: self.options.steps]:
            if self.rank == 0:
                with threads(count):
                    trainer.step(batch[:-1], batch[1:])
            else:
                trainer.losses.append(0.0)
                trainer.seconds.append(0.0)
            self.advance(trainer)
            dist.barrier(self.group)
        return trainer

    def train_spread(self) -> list[Trainer]:
        """Trains the other variants, a step of each in turn, so that drift affects them equally.

        After `--steps` it continues until the times of the fused steps are certain.
        """
        spread = trainers(self, compiled if self.options.compile else variants)
        for index, batch in enumerate(self.batches):
            if index >= self.options.steps:
                if self.is_certain(spread):
                    break
                if self.progress is not None:
                    self.progress.extend(len(spread))
            inputs, targets = self.own_part(batch[:-1]), self.own_part(batch[1:])
            first = index % len(spread)
            for trainer in (*spread[first:], *spread[:first]):
                dist.barrier(self.group)
                trainer.step(inputs, targets)
                self.advance(trainer)
        return spread

    def is_certain(self, spread: list[Trainer]) -> bool:
        """Tells, identically on all ranks, whether the fused step's interval is narrow enough."""
        seconds = {t.variant.name: after_warm_up(slowest(t.seconds, self.group)) for t in spread}
        return ratio(seconds[FUSED], seconds[COMPUTE]).width <= WIDEST_INTERVAL

    def rows(self) -> torch.Tensor:
        """Returns the positions that this tensor-parallel group holds."""
        return self.grid.layout.positions(self.grid.context.rank())

    def own_part(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the sequence."""
        tensor = self.grid.tensor
        return batch[self.rows()].chunk(tensor.size())[tensor.rank()]

    def total(self, losses: list[float]) -> torch.Tensor:
        """Returns the sum over the ranks; each rank has its part of the mean."""
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total

    def _variants(self) -> int:
        return 2 + len({1, self.all_threads}) + len(self.grids)

    def advance(self, trainer: Trainer) -> None:
        """Shows a finished step."""
        if self.progress is not None:
            step = f"step {len(trainer.losses)}"
            self.progress.advance(f"{trainer.variant.name}: {step}, {trainer.seconds[-1]:.2f} s")


def trainers(run: DemoRun, kind: ModuleType) -> list[Trainer]:
    """Returns trainers of the spread variants: unfused over each backend, fused, compute alone."""
    cos, sin = (t[run.rows()] for t in run.positions)

    def trainer(make: Callable[[Transformer, RankGrid], ModelVariant], grid: RankGrid) -> Trainer:
        return Trainer(make(run.model, grid), (cos, sin), grid)

    return [
        *(trainer(kind.unfused, grid) for grid in run.grids.values()),
        trainer(kind.fused, run.grid),
        trainer(variants.compute_alone, run.grid),
    ]


def _unfused_backends() -> list[str]:
    return [name for name in ("symm_cp", "gloo") if name in dist.Backend.backend_list]


def _grid(options: DemoOptions, group: dist.ProcessGroup, backend: str) -> RankGrid:
    """Returns the groups: neighbours share features; ranks one tensor group apart, a sequence."""
    grid = torch.tensor(dist.get_process_group_ranks(group)).view(options.cp, -1)
    row, column = divmod(group.rank(), grid.shape[1])

    def own(parts: torch.Tensor, index: int) -> dist.ProcessGroup:
        # All ranks make all groups in the same order, since torch names groups by a counter.
        return [dist.new_group(part.tolist(), backend=backend) for part in parts][index]

    everyone, tensor, context = own(grid.view(1, -1), 0), own(grid, row), own(grid.T, column)
    return RankGrid(backend, everyone, tensor, context, HeadTail(options.seq, options.cp))


def run_rank(options: DemoOptions, group: dist.ProcessGroup) -> int:
    """Runs the demo as one rank of a group; returns the exit code."""
    result = DemoRun(options, group).result()
    if group.rank() == 0:
        show(result)
    # All ranks have the same result; torchrun uses the exit code of any rank.
    return 0 if result.agree() else 1
