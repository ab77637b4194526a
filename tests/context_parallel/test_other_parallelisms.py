"""Context parallelism with DDP, FSDP2, HSDP and tensor parallelism: gradients of one process.

Ranks of a context-parallel group share samples; the others have samples of their own. The README of
`symm_cp/context_parallel` says who adds up which gradients; each test does what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.context_parallel.common import CLOSE
from tests.exhaustive import exhaustive, some
from tests.integrations.common import Client, Result, assert_same, causal_batch, target_loss
from tests.integrations.common import in_one_process as in_one_process_of

VOCABULARY, WIDTH, HEADS, KEY_HEADS, LENGTH, SAMPLES = 29, 32, 4, 2, 16, 2
IGNORED = -100


class Layer(nn.Module):
    """Attention with grouped heads, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        of_head = WIDTH // HEADS
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * of_head) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A language model with learned positions, whose layers may be recomputed."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions(position_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def decoder(recompute: bool = False) -> Decoder:
    torch.manual_seed(1)
    return Decoder(recompute).double()


Batch = dict[str, torch.Tensor]


def batch_of(replica: int) -> Batch:
    """One replica's samples; the number of labels that count differs between parts."""
    generator = torch.Generator().manual_seed(100 + replica)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, : LENGTH // 3] = IGNORED
    return {"input_ids": ids, "labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def in_one_process(replicas: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss of the samples of all replicas, and its gradients."""
    model, losses = decoder(), []
    for replica in range(replicas):
        batch = batch_of(replica)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        positions = torch.arange(LENGTH).expand(SAMPLES, -1)
        losses.append(loss_of(model(batch["input_ids"], positions), labels))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


def run_step(
    model: nn.Module, cp: DeviceMesh, replica: int, method: Any, averaged: bool, layout: str
) -> torch.Tensor:
    """One step on this rank's part; returns the loss of its replica."""
    balancer = getattr(symm_cp, layout)(LENGTH, cp.size())
    batch = batch_of(replica)
    local, reduce_loss = symm_cp.shard_batch(
        cp, batch, load_balancer=balancer, average_gradients=averaged
    )
    with symm_cp.context_parallel(cp, load_balancer=balancer, method=method):
        logits = model(local["input_ids"], local["position_ids"])
        loss = reduce_loss(loss_of(logits, local["labels"]))
        loss.backward()
    return loss.detach()


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sums gradients over the parts of a sequence, as programs do if no wrapper does so."""
    for parameter in model.parameters():
        grad = parameter.grad
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


# Each changes the model for a mesh, and returns the module to call, whether gradients are averaged
# over the ranks that share samples, and a function to call after the backward pass.
Parallelism = Callable[[nn.Module, DeviceMesh], tuple[nn.Module, bool, Callable[[], None]]]


def nothing() -> None:
    pass


def ddp_over_all(model: nn.Module, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(model), True, nothing


def ddp_over_replicas(model: nn.Module, mesh: DeviceMesh) -> Any:
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    return wrapped, False, partial(sum_gradients, model, mesh["cp"].get_group())


def sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_over_all(model: nn.Module, mesh: DeviceMesh) -> Any:
    return sharded(model, mesh["dp", "cp"]._flatten("dp_cp")), True, nothing


def fsdp_in_background(model: nn.Module, mesh: DeviceMesh) -> Any:
    wrapped, *rest = fsdp_over_all(model, mesh)
    symm_cp.fsdp.use(wrapped)
    return wrapped, *rest


def hsdp(model: nn.Module, mesh: DeviceMesh) -> Any:
    return sharded(model, mesh["dp", "cp"]), True, nothing


def fsdp_summing(model: nn.Module, mesh: DeviceMesh) -> Any:
    """FSDP2 told to divide by the number of replicas only."""
    wrapped = sharded(model, mesh["dp", "cp"]._flatten("dp_cp"))
    for module in (wrapped, *wrapped.layers):  # type: ignore[misc]
        module.set_gradient_divide_factor(float(mesh["dp"].size()))
    return wrapped, False, nothing


PLAN = {"layers.*." + name: "colwise" for name in ("q", "k", "v", "up")}
PLAN |= {"layers.*.o": "rowwise", "layers.*.down": "rowwise"}


def torch_tp(model: Any, mesh: DeviceMesh) -> Any:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    for layer in model.layers:
        plan = {name.rpartition(".")[2]: styles[kind]() for name, kind in PLAN.items()}
        parallelize_module(layer, mesh["tp"], plan)
    return model, False, partial(sum_gradients, model, mesh["cp"].get_group())


def our_tp(model: nn.Module, mesh: DeviceMesh) -> Any:
    symm_cp.tensor_parallel.apply(model, mesh["tp"], plan=PLAN)
    return model, False, partial(sum_gradients, model, mesh["cp"].get_group())


def torch_tp_and_fsdp(model: nn.Module, mesh: DeviceMesh) -> Any:
    torch_tp(model, mesh)
    return sharded(model, mesh["cp"]), True, nothing


def our_tp_and_fsdp(model: nn.Module, mesh: DeviceMesh) -> Any:
    our_tp(model, mesh)
    return sharded(model, mesh["cp"]), True, nothing


OVER_DATA: dict[str, Parallelism] = {
    each.__name__: each
    for each in (
        ddp_over_all,
        ddp_over_replicas,
        fsdp_over_all,
        fsdp_in_background,
        fsdp_summing,
        hsdp,
    )
}
OVER_WEIGHTS: dict[str, Parallelism] = {
    each.__name__: each for each in (torch_tp, our_tp, torch_tp_and_fsdp, our_tp_and_fsdp)
}


def gradients(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        yield name.removeprefix("module."), whole


def as_in_one_process(
    group: dist.ProcessGroup,
    kind: str,
    sizes: dict[str, int],
    backend: str,
    method: Any,
    layout: str,
    recompute: bool,
) -> None:
    with world(group, backend):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        replica = mesh["dp"].get_local_rank() if "dp" in sizes else 0
        replicas = sizes.get("dp", 1)
        expected_loss, expected = in_one_process(replicas)
        change = {**OVER_DATA, **OVER_WEIGHTS}[kind]
        model, averaged, finish = change(decoder(recompute), mesh)
        for _ in range(2):
            loss = run_step(model, mesh["cp"], replica, method, averaged, layout)
            finish()
            if "dp" in sizes:
                dist.all_reduce(loss, group=mesh["dp"].get_group())
            torch.testing.assert_close(loss / replicas, expected_loss, **CLOSE)
            actual = dict(gradients(model))
            assert actual.keys() == expected.keys()
            for name, want in expected.items():
                torch.testing.assert_close(actual[name], want, **CLOSE, msg=name)
            model.zero_grad()


METHODS = ("allgather", "ulysses", "auto")
BACKENDS = ("gloo", "symm_cp")


def cases() -> Iterator[tuple[Any, ...]]:
    """Every parallelism on 2 and on 4 ranks, where methods and backends take turns."""
    for number, kind in enumerate(OVER_DATA):
        backend, two, four = BACKENDS[number % 2], METHODS[(number + 1) % 3], METHODS[number % 3]
        yield 2, kind, {"dp": 1, "cp": 2}, backend, two, "HeadTail", False
        yield 4, kind, {"dp": 2, "cp": 2}, backend, four, "Sequential", True
    for method in METHODS:
        yield 4, "fsdp_over_all", {"dp": 1, "cp": 4}, "symm_cp", method, "HeadTail", True
    for number, kind in enumerate(OVER_WEIGHTS):
        backend, two, four = BACKENDS[number % 2], METHODS[number % 3], METHODS[(number + 1) % 3]
        yield 2, kind, {"cp": 2, "tp": 1}, backend, two, "Sequential", True
        yield 4, kind, {"cp": 2, "tp": 2}, backend, four, "HeadTail", False


PLAIN = (2, "fsdp_over_all", {"dp": 1, "cp": 2}, "gloo", "allgather", "HeadTail", False)


@pytest.mark.parametrize(
    ("world_size", "kind", "sizes", "backend", "method", "layout", "recompute"),
    some(PLAIN, of=cases()),
)
def test_gradients_are_those_of_one_process(
    ranks: Ranks,
    world_size: int,
    kind: str,
    sizes: dict[str, int],
    backend: str,
    method: str,
    layout: str,
    recompute: bool,
) -> None:
    ranks.run(world_size, as_in_one_process, kind, sizes, backend, method, layout, recompute)


def llama_as_in_one_process(group: dist.ProcessGroup, method: Any, sequence_parallel: bool) -> None:
    """A model of transformers by its own plan, with a padded batch."""
    client, batch = Client("Llama"), causal_batch(LENGTH, padding="right")
    expected = in_one_process_of(client, batch)
    with world(group, "symm_cp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        cp, model = mesh["cp"], client.make("sdpa")
        symm_cp.tensor_parallel.apply(model, mesh["tp"], sequence_parallel=sequence_parallel)
        local, reduce_loss = symm_cp.shard_batch(cp, batch, model=model)
        balancer = reduce_loss.load_balancer
        labels = local.pop("shift_labels")
        local.pop("labels")
        with symm_cp.context_parallel(cp, model=model, load_balancer=balancer, method=method):
            logits = model(**local, **client.call).logits
            loss = reduce_loss(target_loss(logits, labels))
            loss.backward()
        sum_gradients(model, cp.get_group())
        (whole,) = symm_cp.context_parallel_unshard(cp, [logits.detach()], [1], balancer)
        actual = Result(loss.detach(), whole, dict(gradients(model)))
        assert_same(actual, expected, batch, client.tolerance)


@exhaustive
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_of_transformers_by_its_plan(
    ranks: Ranks, method: str, sequence_parallel: bool
) -> None:
    ranks.run(4, llama_as_in_one_process, method, sequence_parallel)


def mixed_precision_as_in_one_process(group: dist.ProcessGroup) -> None:
    """FSDP2 casts the inputs of layers, masks included; here to the dtype that they have."""
    client, batch = Client("Mistral", {"sliding_window": 5}), causal_batch(LENGTH, padding="left")
    expected = in_one_process_of(client, batch)
    with world(group, "symm_cp"):
        cp = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("cp",))
        model: Any = client.make("sdpa")
        model.gradient_checkpointing_enable()
        policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
        for layer in model.model.layers:
            fully_shard(layer, mesh=cp, mp_policy=policy)
        fully_shard(model, mesh=cp, mp_policy=policy)
        local, reduce_loss = symm_cp.shard_batch(cp, batch, model=model, average_gradients=True)
        balancer = reduce_loss.load_balancer
        labels = local.pop("shift_labels")
        local.pop("labels")
        with symm_cp.context_parallel(cp, model=model, load_balancer=balancer):
            logits = model(**local, **client.call).logits
            loss = reduce_loss(target_loss(logits, labels))
            loss.backward()
        (whole,) = symm_cp.context_parallel_unshard(cp, [logits.detach()], [1], balancer)
        actual = Result(loss.detach(), whole, dict(gradients(model)))
        assert_same(actual, expected, batch, client.tolerance)


@exhaustive
def test_mixed_precision_of_fsdp2(ranks: Ranks) -> None:
    ranks.run(2, mixed_precision_as_in_one_process)
