"""The jobs of `symm-cp bench`: each fused op, its unfused form and its limit.

The variants of a job are `limit` (the compute alone, on input that is already local; for
collectives a copy of the result's bytes), `communication` (the collective alone), `unfused` (one
after the other, over the process group's backend), `fused` and, for ops that take symmetric input
in place, `fused, in place`; on CUDA also `torch` (torch's own op).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

from symm_cp.commands.demo import arguments as demo_arguments
from symm_cp.commands.demo import variants
from symm_cp.commands.harness.measure import (
    COMMUNICATION,
    FUSED,
    LIMIT,
    UNFUSED,
    Case,
    backward_alone,
)
from symm_cp.context_parallel import all_gather_attention
from symm_cp.cuda import read_in_place
from symm_cp.ops.common import device_kernels, unfused_all_gather, unfused_reduce_scatter
from symm_cp.ops.matmul.all_reduce import unfused_all_reduce
from symm_cp.parsing import size_text
from symm_cp.tensors.dtypes import dtype_name

IN_PLACE, TORCH = "fused, in place", "torch"

Variants: TypeAlias = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Setting:
    """The group, dtype and device of jobs."""

    group: dist.ProcessGroup
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    #: The groups of unfused ops, with the names of their variants; by default only `group`.
    rivals: tuple[tuple[str, dist.ProcessGroup], ...] = ()

    def unfused(self, make: Callable[[str], Callable[[], object]]) -> Variants:
        """Returns the unfused variants; `make` makes a variant over the group of a name."""
        rivals = self.rivals or ((UNFUSED, self.group),)
        return {name: make(str(group.group_name)) for name, group in rivals}

    def communication(self, make: Callable[[str], Callable[[], object]]) -> Variants:
        """Returns the variant of communication alone, over the first of the unfused groups."""
        return {COMMUNICATION: next(iter(self.unfused(make).values()))}

    @property
    def ranks(self) -> int:
        """The size of the group."""
        return self.group.size()

    @property
    def name(self) -> str:
        """The name of the group."""
        return str(self.group.group_name)

    @property
    def cuda(self) -> bool:
        """Whether jobs run on GPUs."""
        return self.device == "cuda"

    def normal(self, *shape: int) -> torch.Tensor:
        """Returns normally distributed random numbers."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in symmetric memory. Collective."""
        copy = symm_mem.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        read_in_place(copy, self.name)
        return copy.copy_(tensor)

    def case(self, name: str, variants: Variants, **options: Any) -> Case:
        """Returns a case that waits for the device before and after timings."""
        if self.cuda:
            options["synchronize"] = torch.cuda.synchronize
        return Case(f"{name}, {dtype_name(self.dtype)}", variants, **options)

    def op(self, name: str) -> Callable[..., Any]:
        """Returns our kernel for one of torch's ops."""
        if self.cuda:
            return device_kernels[name]
        return getattr(torch.ops.symm_mem, name).default


@dataclass(frozen=True)
class Job:
    """A case of the command."""

    case: Case


def _close(setting: Setting, got: torch.Tensor, want: torch.Tensor) -> None:
    limit = {torch.float64: 1e-10, torch.float32: 1e-4}.get(setting.dtype, 2.0**-5)
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)
    if not error <= limit:
        raise AssertionError(
            f"wrong by {float(error):.1e} of the largest value, at most {limit:.1e} is allowed"
        )


def gather_matmul(setting: Setting, rows: int, inner: int, columns: int) -> Job:
    """Returns the all-gather-matmul of each rank's `rows` x `inner` with `inner` x `columns`."""
    x, weight = setting.normal(rows, inner), setting.normal(inner, columns)
    shared, full = setting.symmetric(x), unfused_all_gather(x, 0, setting.name)
    fused = setting.op("fused_all_gather_matmul")

    def run(shard: torch.Tensor) -> torch.Tensor:
        return fused(shard, [weight], 0, setting.name, return_A=False)[1][0]

    variants: Variants = {
        LIMIT: lambda: full @ weight,
        **setting.communication(lambda name: lambda: unfused_all_gather(x, 0, name)),
        **setting.unfused(lambda name: lambda: unfused_all_gather(x, 0, name) @ weight),
        FUSED: lambda: run(x),
        IN_PLACE: lambda: run(shared),
    }
    if setting.cuda:
        op = torch.ops.symm_mem.fused_all_gather_matmul
        variants[TORCH] = lambda: op(x, [weight], 0, setting.name, return_A=False)

    def check() -> None:
        for shard in (x, shared):
            _close(setting, run(shard), full @ weight)

    name = f"all-gather-matmul, {rows} x {inner} a rank, {columns} columns"
    case = setting.case(name, variants, check=check)
    return Job(case)


def matmul_scatter(setting: Setting, rows: int, inner: int, columns: int) -> Job:
    """Returns the matmul-reduce-scatter of W * `rows` x `inner` with `inner` x `columns`."""
    x, weight = setting.normal(setting.ranks * rows, inner), setting.normal(inner, columns)
    fused = setting.op("fused_matmul_reduce_scatter")
    full = x @ weight

    def run() -> torch.Tensor:
        return fused(x, weight, "sum", 0, setting.name)

    def scatter(product: torch.Tensor, name: str) -> torch.Tensor:
        return unfused_reduce_scatter(product, "sum", 0, name)

    variants: Variants = {
        LIMIT: lambda: x @ weight,
        **setting.communication(lambda name: lambda: scatter(full, name)),
        **setting.unfused(lambda name: lambda: scatter(x @ weight, name)),
        FUSED: run,
    }
    if setting.cuda:
        op = torch.ops.symm_mem.fused_matmul_reduce_scatter
        variants[TORCH] = lambda: op(x, weight, "sum", 0, setting.name)
    name = f"matmul-reduce-scatter, {rows} x {inner} for a rank, {columns} columns"
    case = setting.case(
        name,
        variants,
        check=lambda: _close(setting, run(), unfused_reduce_scatter(full, "sum", 0, setting.name)),
    )
    return Job(case)


def matmul_all_reduce(setting: Setting, rows: int, inner: int, columns: int) -> Job:
    """Returns the matmul-all-reduce of W * `rows` x `inner` with `inner` x `columns`."""
    x, weight = setting.normal(setting.ranks * rows, inner), setting.normal(inner, columns)
    fused, full = torch.ops.symm_mem.fused_matmul_all_reduce.default, x @ weight

    def run() -> torch.Tensor:
        return fused(x, weight, None, "sum", setting.name)

    def unfused(product: torch.Tensor, name: str) -> torch.Tensor:
        return unfused_all_reduce(product, "sum", name)

    variants: Variants = {
        LIMIT: lambda: x @ weight,
        **setting.communication(lambda name: lambda: unfused(full, name)),
        **setting.unfused(lambda name: lambda: unfused(x @ weight, name)),
        FUSED: run,
    }
    name = f"matmul-all-reduce, {rows} x {inner} for a rank, {columns} columns"

    def check() -> None:
        _close(setting, run(), unfused(full, setting.name))

    return Job(setting.case(name, variants, check=check))


def attention(setting: Setting, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Job:
    """Returns attention without a mask, with `tokens` of the sequence on each rank."""
    q = setting.normal(1, heads, tokens, head_dim)
    k, v = (setting.normal(1, kv_heads, tokens, head_dim) for _ in range(2))
    grouped = heads != kv_heads
    keys, values = (unfused_all_gather(t, 2, setting.name) for t in (k, v))

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    def gather(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return unfused_all_gather(k, 2, name), unfused_all_gather(v, 2, name)

    def run() -> torch.Tensor:
        return all_gather_attention(q, k, v, group=setting.group, enable_gqa=grouped)

    case = setting.case(
        f"attention, {tokens} tokens a rank, {heads} heads ({kv_heads} for keys) of {head_dim}",
        {
            LIMIT: lambda: attend(keys, values),
            **setting.communication(lambda name: lambda: gather(name)),
            **setting.unfused(lambda name: lambda: attend(*gather(name))),
            FUSED: run,
        },
        check=lambda: _close(setting, run(), attend(keys, values)),
    )
    return Job(case)


def attention_backward(
    setting: Setting, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> Job:
    """Returns the backward pass of `attention` alone."""
    q = setting.normal(1, heads, tokens, head_dim)
    k, v = (setting.normal(1, kv_heads, tokens, head_dim) for _ in range(2))
    grouped = heads != kv_heads
    keys, values = (unfused_all_gather(t, 2, setting.name) for t in (k, v))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_gather_attention(q, k, v, group=setting.group, enable_gqa=grouped)

    whole, ours = backward_alone(attend, q, keys, values), backward_alone(fused, q, k, v)

    def exchange(grads: tuple[torch.Tensor, ...], name: str) -> list[torch.Tensor]:
        return [unfused_reduce_scatter(g, "sum", 2, name) for g in grads[1:]]

    def unfused(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # Keys and values are gathered again, as in the fused op.
        for t in (k, v):
            unfused_all_gather(t, 2, name)
        grads = whole()
        return grads[0], exchange(grads, name)

    def check() -> None:
        q_grad, others = unfused(setting.name)
        for got, want in zip(ours(), [q_grad, *others], strict=True):
            _close(setting, got, want)

    name = f"attention backward, {tokens} tokens a rank, {heads} heads"
    rivals = setting.unfused(lambda name: lambda: unfused(name))
    variants: Variants = {LIMIT: whole, **rivals, FUSED: ours}
    return Job(setting.case(f"{name} ({kv_heads} for keys) of {head_dim}", variants, check=check))


def all_gather(setting: Setting, nbytes: int) -> Job:
    """Returns the low-contention all-gather of `nbytes` from each rank."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    gather = setting.op("_low_contention_all_gather")
    x = setting.normal(max(1, nbytes // setting.dtype.itemsize))
    shared, full = setting.symmetric(x), unfused_all_gather(x, 0, setting.name)

    def run(shard: torch.Tensor) -> torch.Tensor:
        return wait(gather(shard, setting.name))

    def check() -> None:
        for shard in (x, shared):
            if not torch.equal(run(shard), full):
                raise AssertionError("the gathered tensor differs from the shards")

    case = setting.case(
        f"all-gather, {size_text(nbytes)} a rank",
        {
            LIMIT: lambda: torch.empty_like(full).copy_(full),
            **setting.unfused(lambda name: lambda: unfused_all_gather(x, 0, name)),
            FUSED: lambda: run(x),
            IN_PLACE: lambda: run(shared),
        },
        check=check,
        inner=_inner(nbytes),
    )
    return Job(case)


def reduce_scatter(setting: Setting, nbytes: int) -> Job:
    """Returns the low-contention reduce-scatter whose result on each rank has `nbytes`."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    scatter = setting.op("_low_contention_reduce_scatter")
    x = setting.normal(setting.ranks * max(1, nbytes // setting.dtype.itemsize))
    shared = setting.symmetric(x)

    def run(full: torch.Tensor) -> torch.Tensor:
        return wait(scatter(full, "sum", setting.name))

    def check() -> None:
        want = unfused_reduce_scatter(x, "sum", 0, setting.name)
        for full in (x, shared):
            _close(setting, run(full), want)

    case = setting.case(
        f"reduce-scatter, {size_text(nbytes)} a rank",
        {
            # A sum must read at least this.
            LIMIT: lambda: x.clone(),
            **setting.unfused(lambda name: lambda: unfused_reduce_scatter(x, "sum", 0, name)),
            FUSED: lambda: run(x),
            IN_PLACE: lambda: run(shared),
        },
        check=check,
        inner=_inner(nbytes),
    )
    return Job(case)


def _inner(nbytes: int) -> int:
    """Returns a number of calls that takes long compared with clock and barrier."""
    return max(1, min(100, (1 << 20) // max(1, nbytes)))


def train_options(
    ranks: int, dim: int, layers: int, tokens: int, dtype: str = "float32"
) -> demo_arguments.DemoOptions:
    """Returns the demo's options for `train`; `ValueError` for sizes not divisible by `ranks`."""
    arguments = argparse.Namespace(
        ranks=ranks, cp=1, compile=False, steps=1, most_steps=1, text=None, dim=dim, layers=layers,
        seq=tokens, batch=4, dtype=dtype, seed=0, json=None, rendezvous=None,
    )  # fmt: skip
    return demo_arguments.check(arguments, {})


def train(setting: Setting, dim: int, layers: int, tokens: int) -> Job:
    """Returns a training step of the demo's model, spread over features; on CPU."""
    from symm_cp.commands.demo.train import DemoRun, Trainer, trainers

    options = train_options(setting.ranks, dim, layers, tokens, dtype_name(setting.dtype))
    run = DemoRun(options, setting.group, quiet=True)
    *over_backends, fused, alone = trainers(run, variants)
    unfused = over_backends[-1]  # over gloo
    batch = run.batches[0]
    inputs, targets = run.own_part(batch[:-1]), run.own_part(batch[1:])

    def check() -> None:
        losses = []
        for trainer in (unfused, fused):
            trainer.step(inputs, targets)
            losses.append(trainer.losses[-1])
        if not abs(losses[0] - losses[1]) <= 1e-2 * abs(losses[0]):
            raise AssertionError(f"the losses differ: unfused {losses[0]}, fused {losses[1]}")

    def step(trainer: Trainer) -> Callable[[], None]:
        return lambda: trainer.step(inputs, targets)

    name = f"training step, {layers} layers of {dim} features, 4 x {tokens} tokens"
    steps: Variants = {LIMIT: step(alone), UNFUSED: step(unfused), FUSED: step(fused)}
    steps |= {trainer.variant.name: step(trainer) for trainer in over_backends}
    return Job(setting.case(name, steps, check=check))
