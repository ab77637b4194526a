"""Programs with torch's sharded tensors and models, like `programs`, and one-process references."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

STEPS = 2
Results = Any


class FeedForward(nn.Module):
    """A feed-forward layer with a residual connection, preceded by a norm."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def stack(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(FeedForward() for _ in range(layers)))


def steps(model: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


# --- fully_shard ---


def _fsdp(mesh: DeviceMesh, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Trains sharded, and in one process with the whole batch; returns both states."""
    alone, model, size = stack(), stack(), dist.get_world_size()
    model.load_state_dict(alone.state_dict())
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    inputs = [torch.randn(size, 4, 8) for _ in range(STEPS)]
    steps(model, [x[dist.get_rank()] for x in inputs])
    steps(alone, [x.flatten(0, 1) for x in inputs])
    return whole_state(model), alone.state_dict()


def fsdp() -> Results:
    size = dist.get_world_size()
    sharded, alone = _fsdp(init_device_mesh("cpu", (size,)))
    torch.testing.assert_close(sharded, dict(alone), rtol=1e-4, atol=1e-5)
    return sharded


def fsdp_mixed_precision() -> Results:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _fsdp(mesh, mp_policy=policy, reshard_after_forward=False)[0]


def hsdp() -> Results:
    """Sharded over half of the ranks, replicated over the halves."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "shard"))
    sharded, alone = _fsdp(mesh)
    torch.testing.assert_close(sharded, dict(alone), rtol=1e-4, atol=1e-5)
    return sharded


def fsdp_training() -> Results:
    """Accumulation, frozen and tied parameters, prefetching, other divisors, clipped gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    alone, model = (nn.Sequential(*(FeedForward(7) for _ in range(3))) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    for each in (alone, model):
        each[2].up.weight = each[1].up.weight
        each[0].norm.requires_grad_(False)
    fully_shard(model[0], mesh=mesh)
    fully_shard([model[1], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[0].set_modules_to_forward_prefetch([model[1]])
    for each in (model, model[0], model[1]):  # these setters do not recurse
        each.set_force_sum_reduction_for_comms(True)
        each.set_gradient_divide_factor(2.0 * size)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in (alone, model)]
    norms = []
    for _ in range(STEPS):
        micro = torch.randn(2, size, 3, 7)
        for last, x in enumerate(micro):
            model.set_requires_gradient_sync(bool(last))
            model.set_reshard_after_backward(bool(last))
            model(x[rank]).square().mean().backward()
            (alone(x.flatten(0, 1)).square().mean() / 2).backward()
        for each, optimizer in zip((alone, model), optimizers, strict=True):
            norm = nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(norms[::2], norms[1::2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole_state(model), dict(alone.state_dict()), rtol=1e-3, atol=1e-4)
    return whole_state(model)


# --- Redistribution ---


def _placements(shape: Sequence[int]) -> list[Placement]:
    shards: list[Placement] = [Shard(dim) for dim in range(len(shape))]
    return [*shards, Replicate(), Partial(), Partial("avg"), Partial("max")]


def _pairs(mesh: DeviceMesh, shape: Sequence[int]) -> Iterator[tuple[list[Placement], ...]]:
    """All pairs of layouts with at most one kind of partial, not made from other placements."""
    layouts = list(itertools.product(_placements(shape), repeat=mesh.ndim))
    for source, target in itertools.product(layouts, layouts):
        sums = {type(p).__name__ + str(p) for p in (*source, *target) if isinstance(p, Partial)}
        if len(sums) > 1 or any(
            isinstance(t, Partial) and s != t for s, t in zip(source, target, strict=True)
        ):
            continue
        yield list(source), list(target)


def _global_shape(
    mesh: DeviceMesh, source: Sequence[Placement], shape: Sequence[int]
) -> torch.Tensor:
    replicated = [p if isinstance(p, Shard) else Replicate() for p in source]
    return distribute_tensor(torch.randn(tuple(shape)), mesh, replicated).to_local()


def _redistribute(mesh: DeviceMesh, shape: Sequence[int]) -> Results:
    results = []
    for source, target in _pairs(mesh, shape):
        local = _global_shape(mesh, source, shape)
        if any(isinstance(p, Partial) for p in source):
            local = local * (dist.get_rank() + 1)
        leaf = local.clone().requires_grad_()
        stride = torch.empty(tuple(shape)).stride()
        tensor = DTensor.from_local(leaf, mesh, source, shape=torch.Size(shape), stride=stride)
        moved = tensor.redistribute(mesh, target)
        results.append(moved.to_local().detach())
        if not any(isinstance(p, Partial) for p in (*source, *target)):
            moved.to_local().square().sum().backward()
            results.append(leaf.grad)
            torch.testing.assert_close(moved.full_tensor(), tensor.full_tensor())
    return results


def redistribute_1d() -> Results:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_redistribute(mesh, shape) for shape in ((4, 8), (5, 3), (1, 2))]


def redistribute_2d() -> Results:
    """Hundreds of pairs of placements, with even parts, too, if one mesh dimension has size 1."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    shapes = ((4, 8), (5, 3)) if mesh.size(1) == 1 else ((5, 3),)
    return [_redistribute(mesh, shape) for shape in shapes]


def dtensor_ops() -> Results:
    """Operators that redistribute their operands themselves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    a, b = torch.randn(8, 8), torch.randn(8, 12)
    results = []
    for left, right in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
        x, y = distribute_tensor(a, mesh, [left]), distribute_tensor(b, mesh, [right])
        product = (x @ y).full_tensor()
        torch.testing.assert_close(product, a @ b)
        results.append(product)
        normed = nn.functional.layer_norm(x, [8]).full_tensor()
        torch.testing.assert_close(normed, nn.functional.layer_norm(a, [8]))
        results += [x.softmax(1).full_tensor(), x.max().full_tensor(), x.std().full_tensor()]
    return results


# --- Functional collectives ---


def _functional(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    size = group.size()
    outputs = [funcol.all_reduce(x, op, group) for op in ("sum", "avg", "max")]
    outputs += [
        funcol.all_gather_tensor(x * 2, 0, group),
        funcol.all_gather_tensor(x + 1, 1, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.reduce_scatter_tensor(x * 3, "avg", 1, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.broadcast(x * 1, 0, group),
        *funcol.all_reduce_coalesced([x, x[0]], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x[:1]], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
    ]
    return [output.view(output.shape) * size for output in outputs]


def functional() -> Results:
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    x = torch.randn(size, size * 2, 4)[rank]
    results = [*_functional(x, group)]
    sizes = [(rank + peer) % 3 for peer in range(size)]
    parts = torch.randn(sum(sizes), 2) + rank
    results.append(funcol.all_to_all_single(parts, sizes, sizes, group) + 0)
    leaf = x.clone().requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, group)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered, "sum", 0, group)
    exchanged = funcol.all_to_all_single_autograd(scattered, None, None, group)
    (exchanged * 1).square().sum().backward()
    return [*results, exchanged.detach(), leaf.grad]


def functional_compiled() -> Results:
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    x = torch.randn(size, size * 2, 4)[rank]
    torch._dynamo.reset()
    compiled = torch.compile(_functional, fullgraph=True)(x, group)
    torch.testing.assert_close(compiled, _functional(x, group))
    return compiled


def fsdp_compiled() -> Results:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = stack(1)
    fully_shard(model, mesh=mesh)
    steps(torch.compile(model), [torch.randn(4, 8) for _ in range(STEPS)])
    return whole_state(model)


# --- Checkpoints ---


def save(folder: str) -> Results:
    """Trains a sharded model and saves a checkpoint; four more while it trains on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = stack()
    fully_shard(model, mesh=mesh)
    # Each save needs a group of its own: its thread calls collectives while the others do.
    saves = []
    for number, group in enumerate([dist.new_group() for _ in range(4)]):
        optimizer = steps(model, [torch.randn(4, 8) for _ in range(STEPS)])
        weights, moments = get_state_dict(model, optimizer)
        where = f"{folder}/{number}"
        saves.append(dcp.async_save({"model": weights}, checkpoint_id=where, process_group=group))
        torch.save(whole_state(model), f"{where}.{dist.get_rank()}.pt")
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    for each in saves:
        each.result()
    return whole_state(model)


def load(folder: str) -> Results:
    """Loads a checkpoint into a model sharded over a different number of ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = stack()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = whole_state(model)
    for number in range(4):
        dcp.load({"model": state["model"]}, checkpoint_id=f"{folder}/{number}")
        model.load_state_dict(state["model"])
        torch.testing.assert_close(whole_state(model), torch.load(f"{folder}/{number}.0.pt"))
    return loaded


# --- Tensor parallelism ---


def tensor_parallel() -> Results:
    """torch's own styles, with sequence parallelism, against one process."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    alone, model = stack(), stack()
    model.load_state_dict(alone.state_dict())
    for layer in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(layer, mesh, plan)
    inputs = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
    )
    parallelize_module(model, mesh, inputs)
    x = torch.randn(size * 2, 8)
    model(x).square().sum().backward()
    alone(x).square().sum().backward()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-4)
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


def parallel_loss() -> Results:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head = nn.Linear(8, 4 * dist.get_world_size())
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = nn.functional.cross_entropy(head(torch.randn(5, 8)), torch.tensor([0, 1, 2, 3, 4]))
        loss.backward()
    return [loss.full_tensor().detach(), *(p.grad.full_tensor() for p in head.parameters())]


# --- Pipelines ---


def _pipeline(schedule: type[ScheduleGPipe] | type[Schedule1F1B]) -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = stack(size)
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    runner = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for _ in range(STEPS):
        layers.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(x)
        elif rank == size - 1:
            runner.step(target=target, losses=losses)
        else:
            runner.step()
    grads = [p.grad.clone() for p in layers[rank].parameters() if p.grad is not None]
    losses = [loss.detach() for loss in losses]
    layers.zero_grad()
    chunks = zip(x.chunk(4), target.chunk(4), strict=True)
    sum(nn.functional.mse_loss(layers(a), b) for a, b in chunks).backward()  # type: ignore[union-attr]
    for mine, parameter in zip(grads, layers[rank].parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad / 4, rtol=1e-4, atol=1e-5)
    return [grads, losses]


def pipeline_gpipe() -> Results:
    return _pipeline(ScheduleGPipe)


def pipeline_1f1b() -> Results:
    return _pipeline(Schedule1F1B)


# --- transformers ---


def llama(folder: str) -> Results:
    """A small Llama saved by rank 0 and loaded with tp_plan="auto", against one process."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, 64, (2, 10))
    if rank == 0:
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    ids = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    # transformers requires accelerate, but does not use it if a rank's part is on one device.
    check = mock.patch("transformers.integrations.accelerate.is_accelerate_available")
    with mock.patch.dict(os.environ, ids), check:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    alone = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(tokens).logits.detach()
    torch.testing.assert_close(logits, alone(tokens).logits.detach(), rtol=1e-4, atol=1e-4)
    return [logits, model.generate(tokens, max_new_tokens=5, do_sample=False)]


ALL: dict[str, Callable[[], Results]] = {
    function.__name__: function
    for function in (
        fsdp,
        fsdp_mixed_precision,
        fsdp_training,
        hsdp,
        redistribute_1d,
        redistribute_2d,
        dtensor_ops,
        functional,
        functional_compiled,
        fsdp_compiled,
        tensor_parallel,
        parallel_loss,
        pipeline_gpipe,
        pipeline_1f1b,
    )
}
