"""Composed parallelism on 4 ranks: losses, gradients, clipped norms and weights of one process.

Each program makes three steps of AdamW with each of the features of composed.py: accumulation of
gradients, tied weights, frozen parts, experts of which some get no token; the vocabulary is never
divisible. Ranks along "cp" share samples, ranks along "dp" have samples of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import symm_cp
from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.composed import (
    DIVIDED,
    LENGTH,
    PROGRAMS,
    SAMPLES,
    STEPS,
    Decoder,
    Features,
    Outcome,
    Program,
    batch_of,
    decoder,
    in_one_process,
    loss_of,
    named,
    train,
    whole,
    whole_loss,
)
from tests.exhaustive import exhaustive, some
from tests.integrations.common import Client, Result, assert_same, causal_batch
from tests.integrations.common import in_one_process as in_one_process_of

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # sums are added in another order than in one process

# --- how they train ----------------------------------------------------------------------------


@dataclass
class Run:
    """A program that runs on this rank, by `training_step` or by hand."""

    program: Program
    features: Features
    mesh: DeviceMesh
    method: Any
    layout: str
    by_hand: bool

    def __post_init__(self) -> None:
        self.replica = self.mesh["dp"].get_local_rank() if "dp" in self.program.sizes else 0
        self.replicas = self.program.sizes.get("dp", 1)
        self.model = self.program.change(decoder(self.features), self.mesh)

    def balancer(self) -> symm_cp.LoadBalancer:
        return getattr(symm_cp, self.layout)(LENGTH, self.mesh["cp"].size())  # type: ignore[no-any-return]

    def train(self) -> Outcome:
        return train(self.model, self.step_of, self.clip)

    def step_of(self, step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(self.features.micro_batches):
            batch = batch_of(self.replica, step, micro)
            evaluated = None if self.by_hand else self.evaluated(batch)
            with self.maybe_unsynced(micro):
                loss = self.backward(batch).detach()
            if evaluated is not None:
                same(evaluated, loss, "loss of evaluation")
            total += loss
        if self.by_hand and "cp" in self.program.sizes:
            self.sum_gradients()
        if "dp" in self.program.sizes:
            dist.all_reduce(total, group=self.mesh["dp"].get_group())
        return total / (self.replicas * self.features.micro_batches)

    def maybe_unsynced(self, micro: int) -> AbstractContextManager[Any]:
        """Has wrappers reduce gradients in the last backward pass only."""
        unsynced = self.features.unsynced and micro + 1 < self.features.micro_batches
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not unsynced)
        refused = not (self.by_hand or self.program.reduces)  # by training_step
        if unsynced and not refused and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One backward pass; returns the loss of this rank's samples."""
        if "cp" not in self.program.sizes:
            loss = whole_loss(self.model, batch)
            (loss / self.features.micro_batches).backward()
            return loss
        cp, options = self.mesh["cp"], {"load_balancer": self.balancer(), "method": self.method}
        if not self.by_hand:
            with self.training_step(batch) as step:
                (step.loss / self.features.micro_batches).backward()
            return step.loss
        local, reduce_loss = symm_cp.shard_batch(
            cp, batch, average_gradients=self.program.reduces == "mean", **options
        )
        with symm_cp.context_parallel(cp, **options):
            logits = self.model(local["input_ids"], position_ids=local["position_ids"])
            loss = reduce_loss(loss_of(logits, local["labels"]))
            (loss / self.features.micro_batches).backward()
        return loss

    def training_step(self, batch: dict[str, torch.Tensor]) -> Any:
        # It cannot find out that FSDP2 divides by another number.
        told = {"average_gradients": False} if self.program.reduces == "sum" else {}
        return symm_cp.training_step(
            self.model,
            batch,
            self.mesh["cp"],
            loss_function=lambda logits, local: loss_of(logits, local["labels"]),
            load_balancer=self.balancer(),
            method=self.method,
            **told,
        )

    @torch.no_grad()
    def evaluated(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss, before training: evaluation leaves the root of FSDP2 gathered."""
        with self.training_step(batch) as step:
            return step.loss

    def sum_gradients(self) -> None:
        """Sums gradients over the parts of a sequence, as the README says."""
        program, cp = self.program, self.mesh["cp"]
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if grad is None or (program.reduces and not name.endswith(program.apart or "-")):
                continue
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if program.reduces == "mean" and not program.divides:
                local /= cp.size()
            if not (program.needs == "experts" and name.endswith(DIVIDED)):
                dist.all_reduce(local, group=cp.get_group())

    def clip(self, model: nn.Module, limit: float) -> torch.Tensor:
        """Clips gradients, also of DTensors over several meshes, which torch's function refuses."""
        grads: dict[Any, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                grads.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter.grad)
        if len(grads) == 1:
            return nn.utils.clip_grad_norm_(model.parameters(), limit)
        norms = [nn.utils.get_total_norm(each) for each in grads.values()]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((limit / (norm + 1e-6)).clamp(max=1))
        return norm


def as_in_one_process(
    group: dist.ProcessGroup,
    name: str,
    features: Features,
    backend: str,
    method: Any,
    layout: str,
    by_hand: bool,
) -> None:
    program = PROGRAMS[name]
    with world(group, backend):
        sizes = program.sizes
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        run = (Run if program.schedule is None else PipelineRun)(
            program, features, mesh, method, layout, by_hand
        )
        with warnings.catch_warnings():  # a right program gets none of ours
            ours = "(context_parallel|shard_batch|training_step|reduce_loss)"
            warnings.filterwarnings("error", message=ours)
            actual = run.train()
        expected = in_one_process(features, sizes.get("dp", 1))
        compare(actual, expected, run)
        dist.barrier()


def compare(actual: Outcome, expected: Outcome, run: Run) -> None:
    """Compares what this rank has, by name; and that all ranks together have everything."""
    for step in range(STEPS):
        where = f"step {step}: "
        same(actual.losses[step], expected.losses[step], where + "loss")
        same_named(actual.grads[step], expected.grads[step], where + "gradient of ")
        same(actual.norms[step], expected.norms[step], where + "norm")
    same_named(actual.weights, expected.weights, "weight ")


def same_named(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str
) -> None:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(actual))
    assert set().union(*names) == set(expected), what
    for name, tensor in actual.items():
        same(tensor, expected[name], what + name)


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE, msg=lambda m: f"{what}: {m}")


# --- pipelines ---------------------------------------------------------------------------------


class Stages(nn.Module):
    """The stages that a rank has."""

    def __init__(self, stages: list[Decoder]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)


def stage_of(model: Any, number: int, count: int) -> Decoder:
    """Leaves out of a whole model what other stages have."""
    each = len(model.layers) // count
    for at in range(len(model.layers)):
        if at // each != number:
            model.layers[at] = nn.Identity()
    if number > 0:
        model.embed = model.positions = None
    if number + 1 < count:
        model.head = None
    return model  # type: ignore[no-any-return]


class PipelineRun(Run):
    """Stages of a pipeline along "pp", whose ranks along "cp" share the sequence."""

    def __post_init__(self) -> None:
        pp, kind = self.mesh["pp"], self.program.schedule
        rank, ranks = pp.get_local_rank(), pp.size()
        several = kind is ScheduleInterleaved1F1B
        count = 2 * ranks if several else ranks
        parts = [stage_of(decoder(self.features), n, count) for n in range(rank, count, ranks)]
        self.model, self.last = Stages(parts), rank + 1 == ranks
        self.replicas, self.losses = 1, []
        stages = [
            PipelineStage(part, n, count, torch.device("cpu"), group=pp.get_group())
            for part, n in zip(parts, range(rank, count, ranks), strict=True)
        ]
        self.schedule = kind(
            stages if several else stages[0],
            n_microbatches=SAMPLES,
            loss_fn=self.loss_of_samples,
            scale_grads=False,
        )

    def loss_of_samples(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The share that some samples have in the mean over the labels of all."""
        loss = loss_of(logits, labels, "sum") / self.reduce_loss.num_items
        return self.reduce_loss(loss / self.features.micro_batches, summed=True)

    def step_of(self, step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        cp, pp = self.mesh["cp"], self.mesh["pp"]
        options = {"load_balancer": self.balancer(), "method": self.method}
        for micro in range(self.features.micro_batches):
            batch = batch_of(0, step, micro)
            if not self.last:
                batch.pop("labels")
            local, self.reduce_loss = symm_cp.shard_batch(cp, batch, **options)
            losses: list[torch.Tensor] = []
            with symm_cp.context_parallel(cp, **options):
                self.schedule.step(
                    *([local["input_ids"]] if pp.get_local_rank() == 0 else []),
                    position_ids=local["position_ids"],
                    target=local.get("labels"),
                    losses=losses if self.last else None,
                )
            total += sum(loss.detach() for loss in losses)
        self.sum_gradients()
        if self.features.tied:  # the first and the last stage have one weight
            (weight,) = self.tied()
            dist.all_reduce(weight.grad, group=pp.get_group())
        dist.all_reduce(total, group=pp.get_group())
        return total

    def tied(self) -> list[Any]:
        """The weights of the vocabulary that this rank has."""
        ends = {"embed.weight", "head.weight"}
        return [parameter for name, parameter in named(self.model) if name in ends]

    def clip(self, model: nn.Module, limit: float) -> torch.Tensor:
        """Clips by the norm over all stages, in which a tied weight counts once."""
        skipped = {id(p) for p in self.tied()} if self.features.tied and self.last else set()
        grads = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in skipped]
        norm = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(norm, group=self.mesh["pp"].get_group())
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm.sqrt())
        return norm.sqrt()


# --- the table ---------------------------------------------------------------------------------

FEATURES = {
    "accumulating": Features(accumulating=True, unsynced=True),
    "tied, accumulating": Features(tied=True, accumulating=True),
    "frozen, recomputing": Features(frozen=True, recompute=True),
    "empty experts": Features(experts=True),
    "all": Features(True, False, True, True, True, True),
    "all, unsynced": Features(True, True, True, True, True, True),
}
METHODS, BACKENDS, LAYOUTS = (
    ("allgather", "ulysses", "auto"),
    ("symm_cp", "gloo"),
    ("HeadTail", "Sequential"),
)


def cases() -> list[tuple[Any, ...]]:
    """All programs with all features; methods, backends and the rest take turns."""
    found = []
    for number, (name, program) in enumerate(PROGRAMS.items()):
        alone = program.schedule is not None or "cp" not in program.sizes
        features = [f for f, each in FEATURES.items() if not program.needs or each.experts]
        for n, feature in enumerate(features, number):
            ways = METHODS[n % 3], BACKENDS[n % 2], LAYOUTS[n // 2 % 2]
            found.append((name, feature, *ways, "by hand" if alone or n % 2 else "training_step"))
    return found


CASES = cases()
PLAIN = [
    case
    for case in CASES
    if case[:2]
    in {
        ("fsdp x cp", "all"),
        ("tp x cp", "tied, accumulating"),
        ("ep x cp", "all, unsynced"),
        ("cp x 1f1b", "tied, accumulating"),
    }
]


@pytest.mark.parametrize(
    ("name", "feature", "method", "backend", "layout", "how"), some(*PLAIN, of=CASES)
)
def test_as_in_one_process(
    ranks: Ranks, name: str, feature: str, method: str, backend: str, layout: str, how: str
) -> None:
    by_hand = how == "by hand"
    ranks.run(4, as_in_one_process, name, FEATURES[feature], backend, method, layout, by_hand)


# --- models of transformers --------------------------------------------------------------------


def by_its_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return symm_cp.tensor_parallel.apply(model, mesh["tp"])


def by_its_plan_in_parts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return symm_cp.tensor_parallel.apply(model, mesh["tp"], sequence_parallel=True)


def casting(model: Any, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 casts the inputs of layers, masks included; here to the dtype that they have."""
    model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["cp"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["cp"], mp_policy=policy)


OF_TRANSFORMERS: dict[str, tuple[Any, Client, str, dict[str, int]]] = {
    "plan": (by_its_plan, Client("Llama"), "right", {"cp": 2, "tp": 2}),
    "plan, in parts": (by_its_plan_in_parts, Client("Llama"), "right", {"cp": 2, "tp": 2}),
    "casting": (casting, Client("Mistral", {"sliding_window": 5}), "left", {"cp": 4}),
}


@exhaustive
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.ranks(4)
def test_models_of_transformers(group: dist.ProcessGroup, name: str, method: Any) -> None:
    change, client, padding, sizes = OF_TRANSFORMERS[name]
    batch = causal_batch(LENGTH, padding=padding)
    expected = in_one_process_of(client, batch)
    with world(group, "symm_cp"):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = change(client.make("sdpa"), mesh)
        with symm_cp.training_step(model, batch, mesh["cp"], method=method) as step:
            step.loss.backward()
        (logits,) = symm_cp.context_parallel_unshard(mesh["cp"], [step.output.logits.detach()], [1])
        grads = {name: whole(p.grad) for name, p in named(model)}
        assert_same(Result(step.loss.detach(), logits, grads), expected, batch, client.tolerance)
