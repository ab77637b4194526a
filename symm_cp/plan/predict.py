"""Predicted times and memory of a training step, from the schedules that the ops run.

A step is a forward and a backward pass of `batch` sequences of `sequence` tokens on tp x cp GPUs.
Layers are tensor-parallel with sequence-parallel activations (each matmul pair an all-gather-matmul
and a matmul-reduce-scatter) and context-parallel attention under a causal mask, head-tail. Each op
is simulated on its schedule; between hosts attention goes round a ring, turn by turn.

What is left out: the reduction of gradients over data-parallel replicas and the optimizer's step,
both of which a trainer hides or does once for several batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from symm_cp.plan.models import Model
from symm_cp.schedule import staged
from symm_cp.schedule.builders import all_ranks
from symm_cp.schedule.machine import Machine
from symm_cp.schedule.simulate import simulate
from symm_cp.schedule.steps import Compute, Copy, Schedule, Step

_ITEM = 2  # bytes of bfloat16
_WIDE = 4  # of float32, in which gradients of keys and values travel
# Bytes a token and hidden feature of a layer's saved activations, with sequence parallelism and
# attention that saves no scores (Korthikanti et al., 2022).
_ACTIVATION_BYTES = 34
# Bytes a parameter: 2 of the weight, 4 of its gradient, 12 of Adam's state in float32.
_STATE_BYTES, _OPTIMIZER_BYTES = 6, 12


@dataclass(frozen=True)
class Times:
    """Seconds of an op: as it runs, its kernels alone, and its communication alone."""

    fused: float = 0.0
    compute: float = 0.0
    communication: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(
            self.fused + other.fused,
            self.compute + other.compute,
            self.communication + other.communication,
        )

    def __mul__(self, times: float) -> Times:
        return Times(self.fused * times, self.compute * times, self.communication * times)


@dataclass(frozen=True)
class Layout:
    """How a job is spread: data-parallel replicas of cp x tp GPUs."""

    tp: int
    cp: int
    dp: int
    cp_hosts: int


@dataclass(frozen=True)
class Prediction:
    """What a step takes with a layout."""

    layout: Layout
    step: float
    compute: float
    communication: float
    memory: float
    fits: bool
    tokens: float

    @property
    def hidden(self) -> float:
        """The share of the communication that the fused ops hide; 1 when there is none."""
        if self.communication == 0.0:
            return 1.0
        return 1.0 - (self.step - self.compute) / self.communication


@lru_cache(maxsize=4096)
def _op(
    builder: Callable[..., Schedule],
    ranks: int,
    kernel: float,
    shard: float,
    partial: float,
    machine: Machine,
) -> Times:
    """One op on W ranks: `kernel` seconds for each shard, of `shard` bytes, and of partial sums."""

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Compute):
            if step.kernel in ("reduce", "add"):
                return machine.reduce(partial, ranks)
            return kernel + machine.kernel_seconds
        if isinstance(step, Copy):
            remote = step.src.rank != step.dst.rank
            sums = step.dst.buffer == "partials"
            nbytes = partial if sums else shard
            return machine.transfer(nbytes) if remote else machine.copy(nbytes)
        return 0.0

    timeline = simulate([all_ranks(builder, ranks)], cost, signal=machine.signal_seconds)
    both = (shard if builder is not staged.produce_and_scatter else 0.0) + partial
    return Times(timeline.total, timeline.busy(0, Compute), (ranks - 1) * machine.transfer(both))


def _gather(ranks: int, flops: float, shard: float, machine: Machine) -> Times:
    kernel = machine.matmul(flops / ranks)
    return _op(staged.gather_and_consume, ranks, kernel, shard, 0.0, machine)


def _scatter(ranks: int, flops: float, partial: float, machine: Machine) -> Times:
    kernel = machine.matmul(flops / ranks)
    return _op(staged.produce_and_scatter, ranks, kernel, 0.0, partial, machine)


def _attention(
    layout: Layout, flops: float, shard: float, partial: float, machine: Machine
) -> Times:
    """Attention of a rank, over all hosts that its keys are spread over."""
    hosts = layout.cp_hosts
    local = layout.cp // hosts
    # Every rank has 1/cp of the queries, and a kernel 1/cp of the keys.
    kernel = machine.attention(flops / layout.cp**2)
    builder = staged.consume_and_scatter if partial else staged.gather_and_consume
    turn = _op(builder, local, kernel, shard, partial, machine)
    if hosts == 1:
        return turn
    network = machine.network * machine.link_reached
    # Shards go round for one turn less than there are, sums come home with one message more.
    message, last = (shard + partial) / network, partial / network
    fused = (hosts - 1) * max(turn.fused, message) + turn.fused + last
    between = (hosts - 1) * message + last
    return Times(fused, hosts * turn.compute, hosts * turn.communication + between)


def _layer(model: Model, layout: Layout, batch: int, sequence: int, machine: Machine) -> Times:
    tp, tokens = layout.tp, batch * sequence // layout.cp
    shard = tokens / tp * model.hidden * _ITEM
    wide_in = (model.query + 2 * model.shared, 2 * model.feed_forward)
    wide_out = (model.query, model.feed_forward)
    total = Times()
    for features in wide_in:  # all-gather-matmuls, and their two gradients
        flops = 2 * tokens * model.hidden * features / tp
        total += _gather(tp, flops, shard, machine) * 2 + _scatter(tp, flops, shard, machine)
    for features in wide_out:  # matmul-reduce-scatters; one gather serves both gradients
        flops = 2 * tokens * model.hidden * features / tp
        total += _scatter(tp, flops, shard, machine) + _gather(tp, 2 * flops, shard, machine)
    # Causal: half of the pairs of query and key, two matmuls forward and five backward.
    flops = 2 * batch * sequence**2 * model.query / tp
    keys = 2 * tokens * model.shared / tp
    total += _attention(layout, flops, keys * _ITEM, 0.0, machine)
    total += _attention(layout, 2.5 * flops, keys * _ITEM, keys * _WIDE, machine)
    # Norms, residuals, rotations and the gate, forward and twice that backward.
    moved = 3 * (16 * shard + 3 * tokens * model.feed_forward / tp * _ITEM)
    elementwise = moved / machine.memory_rate
    return total + Times(elementwise, elementwise)


def predict(
    model: Model, machine: Machine, layout: Layout, batch: int, sequence: int
) -> Prediction:
    """Returns what one training step takes with a layout."""
    total = _layer(model, layout, batch, sequence, machine) * model.layers
    tokens = batch * sequence / layout.cp
    head = machine.matmul(6 * tokens * model.hidden * model.vocabulary / layout.tp)
    total += Times(head, head)
    parameters = model.parameters / layout.tp
    # The optimizer's state is spread over the replicas and over the context-parallel ranks.
    state = parameters * (_STATE_BYTES + _OPTIMIZER_BYTES / (layout.dp * layout.cp))
    activations = model.layers * tokens * model.hidden * _ACTIVATION_BYTES / layout.tp
    logits = tokens * model.vocabulary * _WIDE / layout.tp
    memory = state + activations + logits
    return Prediction(
        layout,
        total.fused,
        total.compute,
        total.communication,
        memory,
        memory <= 0.9 * machine.memory,
        layout.dp * batch * sequence / total.fused,
    )


def layouts(model: Model, machine: Machine, hosts: int, gpus: int, sequence: int) -> list[Layout]:
    """All that are possible: tp within a host and dividing the key heads, cp a power of two."""
    found = []
    for tp in (2**n for n in range(8)):
        if tp > gpus or gpus % tp or model.kv_heads % tp:
            continue
        cp = 1
        while cp * tp <= hosts * gpus and sequence % (2 * cp * tp) == 0:
            dp, rest = divmod(hosts * gpus, cp * tp)
            local = min(cp, gpus // tp)
            if rest == 0 and cp % local == 0:
                found.append(Layout(tp, cp, dp, cp // local))
            cp *= 2
    return found
