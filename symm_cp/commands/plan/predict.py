"""Predicts times and memory of a training step from the schedules of the ops.

A step is a forward and a backward pass of `batch` sequences of `sequence` tokens on tp x cp GPUs.
Layers are tensor-parallel with sequence-parallel activations (each matmul pair is an
all-gather-matmul and a matmul-reduce-scatter); attention is context-parallel, causal and head-tail.
Each op is simulated on its schedule; between hosts attention passes shards around a ring.

With fully sharded data parallelism (FSDP, ZeRO-3) each rank of a shard group keeps 1/fsdp of the
weights, gradients and optimizer state that it has under tensor parallelism. Ranks gather a layer's
weights in bfloat16 before its forward and again before its backward pass, while they compute the
preceding layer; they reduce-scatter its gradients in float32 during the next one. The prediction
assumes that these transfers share one link with the ops' transfers, so a layer takes at least as
long as all of them; the first gather and the last reduce-scatter cannot be hidden.

With activation checkpointing a layer keeps only its input, and its forward pass, communication
included, runs a second time just before its backward pass (Chen et al., 2016).

Not included: the reduction of gradients over replicas that hold the same shard, and the optimizer's
step, which trainers hide or run once for several batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from symm_cp.commands.plan.models import Model
from symm_cp.schedule.machine import Machine
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    CONSUME_AND_REDUCE_SCATTER,
    PRODUCE_AND_REDUCE_SCATTER,
    Pattern,
)
from symm_cp.schedule.simulate import simulate
from symm_cp.schedule.steps import Compute, Copy, Step

_ITEM = 2  # bytes of bfloat16
_WIDE = 4  # bytes of float32, the dtype in which gradients of keys and values are sent
# Bytes of a layer's saved activations per token and hidden feature, with sequence parallelism
# and attention that saves no scores (Korthikanti et al., 2022).
_ACTIVATION_BYTES = 34
# Bytes per parameter: 2 for the weight, 4 for its gradient, 12 for Adam's state in float32.
_STATE_BYTES, _OPTIMIZER_BYTES = 6, 12


@dataclass(frozen=True)
class Times:
    """Seconds of an op: of the fused op, of its kernels alone, and of its communication alone."""

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
class ParallelLayout:
    """The degrees of parallelism of a job: data-parallel replicas of cp x tp GPUs."""

    tp: int
    cp: int
    dp: int
    cp_hosts: int
    #: The number of ranks, among the dp x cp ranks with the same weights, that share one copy.
    fsdp: int = 1
    fsdp_hosts: int = 1

    def __str__(self) -> str:
        sharded = f", fsdp {self.fsdp}" if self.fsdp > 1 else ""
        return f"tp {self.tp}, cp {self.cp}, dp {self.dp}{sharded}"


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a layout, with or without activation checkpointing."""

    layout: ParallelLayout
    step: float
    compute: float
    communication: float
    memory: float
    fits: bool
    tokens: float
    checkpointing: bool = False

    @property
    def hidden(self) -> float:
        """The share of communication that the fused ops hide; 1 without communication."""
        if self.communication == 0.0:
            return 1.0
        return 1.0 - (self.step - self.compute) / self.communication


@lru_cache(maxsize=4096)
def _op(
    pattern: Pattern,
    ranks: int,
    kernel: float,
    shard: float,
    partial: float,
    machine: Machine,
) -> Times:
    """Simulates an op: `kernel` seconds for each shard of `shard` bytes; sums have `partial`."""

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

    timeline = simulate([pattern.staged().schedules(ranks)], cost, signal=machine.signal_seconds)
    both = (shard if pattern is not PRODUCE_AND_REDUCE_SCATTER else 0.0) + partial
    return Times(timeline.total, timeline.busy(0, Compute), (ranks - 1) * machine.transfer(both))


def _gather(ranks: int, flops: float, shard: float, machine: Machine) -> Times:
    kernel = machine.matmul(flops / ranks)
    return _op(ALL_GATHER_AND_CONSUME, ranks, kernel, shard, 0.0, machine)


def _scatter(ranks: int, flops: float, partial: float, machine: Machine) -> Times:
    kernel = machine.matmul(flops / ranks)
    return _op(PRODUCE_AND_REDUCE_SCATTER, ranks, kernel, 0.0, partial, machine)


def _attention(
    layout: ParallelLayout, flops: float, shard: float, partial: float, machine: Machine
) -> Times:
    """Predicts a rank's attention to the keys of all hosts."""
    hosts = layout.cp_hosts
    local = layout.cp // hosts
    # A rank has 1/cp of the queries, and a kernel takes 1/cp of the keys.
    kernel = machine.attention(flops / layout.cp**2)
    pattern = CONSUME_AND_REDUCE_SCATTER if partial else ALL_GATHER_AND_CONSUME
    turn = _op(pattern, local, kernel, shard, partial, machine)
    if hosts == 1:
        return turn
    network = machine.network * machine.link_reached
    # The ring has hosts - 1 turns; one more message returns the sums to their owners.
    message, last = (shard + partial) / network, partial / network
    fused = (hosts - 1) * max(turn.fused, message) + turn.fused + last
    between = (hosts - 1) * message + last
    return Times(fused, hosts * turn.compute, hosts * turn.communication + between)


def _layer(
    model: Model,
    layout: ParallelLayout,
    batch: int,
    sequence: int,
    machine: Machine,
    checkpointing: bool,
) -> Times:
    """Predicts the forward and backward pass of a layer."""
    tp, tokens = layout.tp, batch * sequence // layout.cp
    shard = tokens / tp * model.hidden * _ITEM
    wide_in = (model.query + 2 * model.shared, 2 * model.feed_forward)
    wide_out = (model.query, model.feed_forward)
    forward = backward = Times()
    for features in wide_in:  # all-gather-matmuls, and their two gradients
        flops = 2 * tokens * model.hidden * features / tp
        forward += _gather(tp, flops, shard, machine)
        backward += _gather(tp, flops, shard, machine) + _scatter(tp, flops, shard, machine)
    for features in wide_out:  # matmul-reduce-scatters; both gradients share one gather
        flops = 2 * tokens * model.hidden * features / tp
        forward += _scatter(tp, flops, shard, machine)
        backward += _gather(tp, 2 * flops, shard, machine)
    # Causal: half of the query-key pairs, in two matmuls forward and five backward.
    flops = 2 * batch * sequence**2 * model.query / tp
    keys = 2 * tokens * model.shared / tp
    forward += _attention(layout, flops, keys * _ITEM, 0.0, machine)
    backward += _attention(layout, 2.5 * flops, keys * _ITEM, keys * _WIDE, machine)
    # Norms, residuals, rotations and the gate, forward and twice that backward.
    moved = 16 * shard + 3 * tokens * model.feed_forward / tp * _ITEM
    elementwise = moved / machine.memory_rate
    forward += Times(elementwise, elementwise)
    return forward * (2 if checkpointing else 1) + backward + Times(elementwise, elementwise) * 2


def _sharded(layout: ParallelLayout, nbytes: float, machine: Machine) -> float:
    """Returns the seconds of an all-gather or reduce-scatter of `nbytes` in a shard group.

    Assumes rings: each GPU of a host has its own ring through its own network adapter.
    """
    ranks, hosts = layout.fsdp, layout.fsdp_hosts
    moved = nbytes * (ranks - 1) / ranks
    seconds = machine.transfer(moved)
    if hosts > 1:
        adapters = ranks / hosts
        seconds = max(seconds, moved / (machine.network * machine.link_reached * adapters))
    return seconds + (ranks - 1) * machine.signal_seconds


def _beside(times: Times, seconds: float) -> Times:
    """Adds concurrent communication on the same link to the times of work."""
    communication = times.communication + seconds
    return Times(max(times.fused, communication), times.compute, communication)


def memory_of(
    model: Model,
    layout: ParallelLayout,
    batch: int,
    sequence: int,
    *,
    checkpointing: bool = False,
) -> float:
    """Returns the bytes that a GPU needs: states, activations, logits, gathered weights."""
    tokens = batch * sequence / layout.cp
    parameters = model.parameters / layout.tp
    # Without FSDP only the optimizer's state is sharded, over all ranks with the same weights.
    state = parameters * (_STATE_BYTES + _OPTIMIZER_BYTES / (layout.dp * layout.cp))
    if layout.fsdp > 1:
        state = parameters * (_STATE_BYTES + _OPTIMIZER_BYTES) / layout.fsdp
        # The weights in use, the weights gathered ahead, and the gradients of the weights in use.
        largest = max(model.layer_parameters, model.vocabulary * model.hidden)
        state += 3 * largest / layout.tp * _ITEM
    of_layer = tokens * model.hidden / layout.tp
    activations = model.layers * of_layer * _ACTIVATION_BYTES
    if checkpointing:  # the inputs of all layers, and all activations of the current layer
        activations = of_layer * (model.layers * _ITEM + _ACTIVATION_BYTES)
    logits = tokens * model.vocabulary * _WIDE / layout.tp
    return state + activations + logits


def fits(memory: float, machine: Machine) -> bool:
    """Tells whether a GPU has enough memory; a tenth is reserved for buffers and fragmentation."""
    return memory <= 0.9 * machine.memory


def predict(
    model: Model,
    machine: Machine,
    layout: ParallelLayout,
    batch: int,
    sequence: int,
    *,
    checkpointing: bool = False,
) -> Prediction:
    """Predicts one training step of a layout."""
    layer = _layer(model, layout, batch, sequence, machine, checkpointing)
    tokens = batch * sequence / layout.cp
    seconds = machine.matmul(6 * tokens * model.hidden * model.vocabulary / layout.tp)
    head, ends = Times(seconds, seconds), Times()
    if layout.fsdp > 1:

        def seconds_of(parameters: float) -> tuple[float, float]:
            own = parameters / layout.tp
            return (
                _sharded(layout, own * _ITEM, machine),
                _sharded(layout, own * _WIDE, machine),
            )

        gather, scatter = seconds_of(model.layer_parameters)
        layer, ends = _beside(layer, 2 * gather + scatter), Times(gather + scatter)
        # The head's transfers like a layer's, plus the embedding's, which is gathered once.
        gather, scatter = seconds_of(model.vocabulary * model.hidden)
        head = _beside(head, 3 * gather + 2 * scatter)
    total = layer * model.layers + head + ends
    memory = memory_of(model, layout, batch, sequence, checkpointing=checkpointing)
    return Prediction(
        layout,
        total.fused,
        total.compute,
        total.communication,
        memory,
        fits(memory, machine),
        layout.dp * batch * sequence / total.fused,
        checkpointing,
    )


#: The degree of FSDP over all ranks with the same weights.
ALL = 0


def layouts(
    model: Model, machine: Machine, hosts: int, gpus: int, sequence: int, fsdp: int = 1
) -> list[ParallelLayout]:
    """Returns all possible layouts: tp divides a host and the key heads, cp is a power of two.

    Weights are sharded over `fsdp` ranks, which must divide dp x cp; `ALL` means dp x cp ranks.
    """
    possible = []
    for tp in (2**n for n in range(8)):
        if tp > gpus or gpus % tp or model.kv_heads % tp:
            continue
        cp = 1
        while cp * tp <= hosts * gpus and sequence % (2 * cp * tp) == 0:
            dp, rest = divmod(hosts * gpus, cp * tp)
            local = min(cp, gpus // tp)
            degree = fsdp or dp * cp
            if rest == 0 and cp % local == 0 and dp * cp % degree == 0:
                shard_hosts = math.ceil(degree / min(degree, gpus // tp))
                possible.append(ParallelLayout(tp, cp, dp, cp // local, degree, shard_hosts))
            cp *= 2
    return possible
