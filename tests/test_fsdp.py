"""FSDP2 with `symm_cp.fsdp.use` gives the results of FSDP2 and of one process; and faults."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import symm_cp.fsdp
from symm_cp.schedule import Copy
from symm_cp.tensors.results import result_memory
from tests.backend.world import world
from tests.device import chosen, devices
from tests.exhaustive import exhaustive, pairs, some

FEATURES = 65  # over 2 to 4 ranks the rows of no weight divide evenly
LAYERS = 3
STEPS = 3
Model = nn.Module
Results = list[torch.Tensor]


class FeedForward(nn.Module):
    """A layer with a residual connection and a norm; the backward pass may recompute it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)
        self.reentrant: bool | None = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.body(x)
        return x + checkpoint(self.body, x, use_reentrant=self.reentrant)


class Network(nn.Module):
    """A model that has parameters of its own before and after its layers."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.layers = nn.ModuleList(FeedForward(features) for _ in range(LAYERS))
        self.last = nn.Linear(features, features + 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def network(dtype: torch.dtype = torch.float32, features: int = FEATURES) -> Network:
    torch.manual_seed(1)
    return Network(features).to(dtype)


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(size: int, dtype: torch.dtype = torch.float32, features: int = FEATURES) -> Results:
    torch.manual_seed(2)
    return list(torch.randn(STEPS, size, 4, features, dtype=dtype))


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    assert type(tensor._local_tensor) is torch.Tensor
    return tensor.full_tensor().detach().clone()


Step = Callable[[Model, torch.Tensor], torch.Tensor]


def one_backward(model: Model, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def train(model: Model, inputs: Results, step: Step = one_backward) -> Results:
    """Losses, gradients and parameters of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    for x in inputs:
        results.append(step(model, x))
        results += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return results + [whole(p) for p in model.parameters()]


def groups_of(model: Model) -> list[Any]:
    return [group for _, _, group in symm_cp.fsdp._sharded("test", model).values()]


def buffer_bytes(model: Model) -> tuple[int, int]:
    """The bytes of the buffers of all-gathers, and of reduce-scatters."""
    group = groups_of(model)[0]
    comms = group._all_gather_comm, group._reduce_scatter_comm
    return comms[0].buffers.nbytes, comms[1].buffers.nbytes


# --- against one process ---


def assert_in_place(model: Model, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Each layer's parameters are gathered twice, from where their owner has put them."""
    with symm_cp.trace() as recording:
        one_backward(model, x)
    steps = [event.step for event in recording.timeline.events]
    sources = [
        step.src for step in steps if isinstance(step, Copy) and step.src.buffer == "symmetric"
    ]
    from_peers = [source.rank for source in sources if source.rank != group.rank()]
    assert len(from_peers) == 2 * LAYERS * (group.size() - 1)


@devices("cpu", "simulated")
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some((2, torch.float64), of=product((1, 2, 3, 4), (torch.float64, torch.float32))),
)
@pytest.mark.ranks
def test_as_one_process(group: dist.ProcessGroup, world_size: int, dtype: torch.dtype) -> None:
    size, rank = group.size(), group.rank()
    alone, model = network(dtype), shard(network(dtype), DeviceMesh.from_group(group, "cpu"))
    symm_cp.fsdp.use(model)
    inputs = batches(size, dtype)

    def step(model: Model, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def mean_step(model: Model, x: torch.Tensor) -> torch.Tensor:
        loss = step(model, x)
        dist.all_reduce(loss, group=group)
        return loss / size

    expected = train(alone, [x.flatten(0, 1) for x in inputs], step)
    actual = train(model, [x[rank] for x in inputs], mean_step)
    torch.testing.assert_close(actual, expected)
    if size > 1 and dtype is torch.float64:  # else they are small
        assert min(buffer_bytes(model)) > 0
    if size > 1 and dtype is torch.float64 and chosen() == "cpu":
        assert_in_place(model, inputs[0][rank], group)


# --- against FSDP2 without `use` ---

Variant = Callable[[Any, int], Any]  # of a model and the number of ranks


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "parts")[-len(sizes) :])


def precision(param: torch.dtype, reduce: torch.dtype | None, **more: Any) -> Variant:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, **more)
    return lambda model, size: shard(model, mesh_of(size), mp_policy=policy)


def output_in_float64(model: Any, size: int) -> Any:
    inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of(size), mp_policy=inner)
    outer = dataclasses.replace(inner, output_dtype=torch.float64)
    return fully_shard(model, mesh=mesh_of(size), mp_policy=outer)


def with_options(**options: Any) -> Variant:
    return lambda model, size: shard(model, mesh_of(size), **options)


def sharded_and(change: Callable[[Any], object]) -> Variant:
    def make(model: Any, size: int) -> Any:
        shard(model, mesh_of(size))
        change(model)
        return model

    return make


def prefetching(model: Any) -> None:
    for before, layer, after in zip(
        [model, *model.layers], model.layers, [*model.layers[1:], None], strict=False
    ):
        before.set_modules_to_forward_prefetch([layer] if after is None else [layer, after])


def recomputing(reentrant: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.layers:
            layer.reentrant = reentrant

    return change


def frozen(model: Any) -> None:
    model.layers[1].up.requires_grad_(False)
    model.layers[2].requires_grad_(False)


def hsdp(model: Any, size: int) -> Any:
    return shard(model, mesh_of(2, size // 2))


def tensor_parallel(model: Any, size: int) -> Any:
    mesh = mesh_of(size // 2, 2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["parts"], plan)
    return shard(model, mesh["replicas"])


def other_dim(model: Any, size: int) -> Any:
    def place(param: nn.Parameter) -> Shard:
        return Shard(1 if param.dim() == 2 and param.shape[1] % size == 0 else 0)

    return shard(model, mesh_of(size), shard_placement_fn=place)


def grouped(model: Any, size: int) -> Any:
    mesh = mesh_of(size)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.first, model.last], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_in_backward(model: Any) -> None:
    """The hook reads the gradient as soon as it is there."""

    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


VARIANTS: dict[str, Variant] = {
    "as it is": with_options(),
    "kept after forward": with_options(reshard_after_forward=False),
    "kept in part after forward": with_options(reshard_after_forward=2),
    "offloaded": with_options(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "bfloat16, sums in float32": precision(torch.bfloat16, torch.float32),
    "bfloat16": precision(torch.bfloat16, None),
    "output in float64": output_in_float64,
    "sums in bfloat16": precision(torch.float32, torch.bfloat16),
    "float16": precision(torch.float16, None, cast_forward_inputs=True),
    "sums in float64": precision(torch.float32, torch.float64),
    "prefetching": sharded_and(prefetching),
    "recomputing": sharded_and(recomputing(False)),
    "recomputing, reentrant": sharded_and(recomputing(True)),
    "frozen": sharded_and(frozen),
    "sums only": sharded_and(lambda model: model.set_force_sum_reduction_for_comms(True)),
    "three reductions at a time": sharded_and(
        lambda model: model.set_reduce_scatter_max_input_buffers(3)
    ),
    "a group for reductions": sharded_and(lambda model: model.set_separate_reduce_scatter_group()),
    "asynchronous": sharded_and(lambda model: model._set_unshard_async_op(True)),
    "kept after backward": sharded_and(lambda model: model.set_reshard_after_backward(False)),
    "step in backward": sharded_and(step_in_backward),
    "another dimension": other_dim,
    "grouped": grouped,
    "hsdp": hsdp,
    "tensor parallel": tensor_parallel,
}
FOUR_RANKS = ("kept in part after forward", "hsdp", "tensor parallel")


def accumulating(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Three backward passes: without sums, with sums, with sums on top of them."""
    model.set_requires_gradient_sync(False)
    one_backward(model, x)
    model.set_requires_gradient_sync(True)
    one_backward(model, x + 1)
    return one_backward(model, x - 1)


def without_all_reduce(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.set_requires_all_reduce(False)
    one_backward(model, x)
    model.set_requires_all_reduce(True)
    return one_backward(model, x + 1)


def clipped(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = one_backward(model, x)
    return loss + whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))  # type: ignore[arg-type]


def evaluating(model: Any, x: torch.Tensor) -> torch.Tensor:
    """FSDP2 cannot train after a first forward pass in inference mode, but between steps it can."""
    with torch.no_grad():
        model(x + 1)
    loss = one_backward(model, x)
    with torch.inference_mode():
        return loss + model(x).mean()


STEP_KINDS: dict[str, Step] = {
    "one backward": one_backward,
    "accumulating": accumulating,
    "clipped": clipped,
    "evaluating": evaluating,
}


ON_ANY = [name for name in VARIANTS if name not in FOUR_RANKS]
PLAIN = (("bfloat16, sums in float32", "accumulating", 2), ("prefetching", "evaluating", 2))


@pytest.mark.parametrize(
    ("variant", "step", "world_size"),
    some(
        *PLAIN,
        of=[
            *pairs(ON_ANY, STEP_KINDS, (2, 3), also=PLAIN),
            *product(FOUR_RANKS, ["accumulating", "evaluating"], (4,)),
            ("hsdp", "clipped", 4),
            ("hsdp", "hsdp", 4),
        ],
    ),
)
@pytest.mark.ranks
def test_as_without(group: dist.ProcessGroup, world_size: int, variant: str, step: str) -> None:
    """Equal bits: both add in the order of the ranks."""
    with world(group, "symm_cp"):
        size, results = group.size(), []
        features = 68 if variant in ("tensor parallel", "another dimension") else FEATURES
        inputs = [x[group.rank()] for x in batches(size, features=features)]
        for used in (False, True):
            model = VARIANTS[variant](network(features=features), size)
            if used:
                symm_cp.fsdp.use(model)
            results.append(train(model, inputs, {**STEP_KINDS, "hsdp": without_all_reduce}[step]))
        assert min(buffer_bytes(model)) > 0
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("factor", some(3.0, of=(1.0, 2.0, 3.0)))
@pytest.mark.ranks(2)
def test_other_divisors(group: dist.ProcessGroup, factor: float) -> None:
    """FSDP2 asks for a reduction that gloo does not have."""
    size, rank = group.size(), group.rank()
    inputs = batches(size)
    model = shard(network(), DeviceMesh.from_group(group, "cpu"))
    for module in model.modules():
        if isinstance(module, symm_cp.fsdp.FSDPModule):
            module.set_gradient_divide_factor(factor)
    symm_cp.fsdp.use(model)
    one_backward(model, inputs[0][rank])
    alone = network()
    one_backward(alone, inputs[0].flatten(0, 1))
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad) / size * factor, theirs.grad)


@exhaustive
@pytest.mark.parametrize("whole_model", [False, True])
@pytest.mark.ranks(2)
def test_compiled(group: dist.ProcessGroup, *, whole_model: bool) -> None:
    torch._dynamo.reset()
    inputs = [x[group.rank()] for x in batches(group.size())]
    results = []
    for compiles in (False, True):
        model = shard(network(), DeviceMesh.from_group(group, "cpu"))
        symm_cp.fsdp.use(model)
        if compiles and whole_model:
            model.compile()
        elif compiles:
            for layer in model.layers:
                layer.compile()
        results.append(train(model, inputs))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


# --- state ---


@exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_state_dicts(group: dist.ProcessGroup, tmp_path: Path, world_size: int) -> None:
    """A checkpoint written with `use` is an ordinary one of FSDP2, and loads without `use`."""
    folder = str(tmp_path)
    mesh, inputs = DeviceMesh.from_group(group, "cpu"), batches(group.size())
    model, other = shard(network(), mesh), shard(network(), mesh)
    symm_cp.fsdp.use(model)
    train(model, [x[group.rank()] for x in inputs])
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    loaded = {"model": get_model_state_dict(other)}
    dcp.load(loaded, checkpoint_id=folder, process_group=group)
    other.load_state_dict(loaded["model"])
    names = list(network().state_dict())
    assert list(state["model"]) == list(loaded["model"]) == names
    for name in names:
        assert torch.equal(whole(other.state_dict()[name]), whole(model.state_dict()[name]))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world_size", "steps"), some((2, 20), of=[(2, 20), (3, 60)]))
@pytest.mark.ranks
def test_memory_does_not_grow(group: dist.ProcessGroup, world_size: int, steps: int) -> None:
    mesh, x = DeviceMesh.from_group(group, "cpu"), batches(group.size())[0][group.rank()]
    model = shard(network(), mesh)
    prefetching(model)
    symm_cp.fsdp.use(model)
    for _ in range(5):
        one_backward(model, x)
    gc.collect()
    # Two gathers are prefetched at a time, one reduction runs; each buffer fits the largest layer.
    largest = sum(p.numel() for p in network().layers[0].parameters()) * 4
    padded = largest + 8 * FEATURES * 4 * group.size()
    assert 2 * largest <= buffer_bytes(model)[0] <= 2 * padded
    assert largest <= buffer_bytes(model)[1] <= padded
    before = buffer_bytes(model), result_memory().in_use, resident_bytes()
    for _ in range(steps):
        one_backward(model, x)
        gc.collect()  # Python itself collects seldom here: see symm_cp/testing/process.py
    after = buffer_bytes(model), result_memory().in_use, resident_bytes()
    assert after[:2] == before[:2]
    # Less than a gather, a reduction or a gradient in each step.
    assert after[2] - before[2] < steps * largest // 8


@pytest.mark.ranks(2)
def test_use_is_idempotent_and_can_be_undone(group: dist.ProcessGroup) -> None:
    """`stop` frees buffers without the other ranks, and brings torch's collectives back."""
    mesh, x = DeviceMesh.from_group(group, "cpu"), batches(group.size())[0][group.rank()]
    model = shard(network(), mesh)
    symm_cp.fsdp.use(model.layers[0])
    symm_cp.fsdp.use(model)
    comms = [group._all_gather_comm for group in groups_of(model)]
    assert len(comms) == 1 + LAYERS
    assert len({id(comm.buffers) for comm in comms}) == 1
    symm_cp.fsdp.use(model)
    assert comms == [group._all_gather_comm for group in groups_of(model)]
    before = one_backward(model, x)
    if group.rank() == 0:
        time.sleep(0.3)
    symm_cp.fsdp.stop(model)
    for each in groups_of(model):
        assert type(each._all_gather_comm) is symm_cp.fsdp.DefaultAllGather
        assert type(each._reduce_scatter_comm) is symm_cp.fsdp.DefaultReduceScatter
    torch.testing.assert_close(one_backward(model, x), before)
    symm_cp.fsdp.use(model)
    assert torch.equal(one_backward(model, x), before)


# --- errors ---


@pytest.mark.ranks(2)
def test_wrong_models(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(TypeError, match=r"fsdp\.use: model is a list, must be a torch\.nn\.Module"):
        symm_cp.fsdp.use([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fsdp\.use: Network has no FSDP module: call .*fully_sh"):
        symm_cp.fsdp.use(network())
    with pytest.raises(ValueError, match=r"fsdp\.stop: Network has no FSDP module"):
        symm_cp.fsdp.stop(network())
    model = shard(network(), mesh)
    model.layers[1].set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match=r"'layers\.1' communicates through a ProcessGroupAl"):
        symm_cp.fsdp.use(model)
    assert all(type(each._all_gather_comm) is not symm_cp.fsdp._Gather for each in groups_of(model))


@pytest.mark.ranks(2)
def test_a_rank_that_takes_another_buffer_is_noticed(group: dist.ProcessGroup) -> None:
    """A rank that still holds a buffer takes a new one: all raise, and can go on."""
    mesh, x = DeviceMesh.from_group(group, "cpu"), batches(group.size())[0][group.rank()]
    model = shard(network(torch.float64), mesh)
    symm_cp.fsdp.use(model)
    x = x.double()
    one_backward(model, x)
    buffers = groups_of(model)[1]._all_gather_comm.buffers
    held = buffers.take([buffers.nbytes], torch.uint8, torch.device("cpu"))
    if group.rank() == 1:
        del held
    with pytest.raises(RuntimeError, match=r"ranks disagree: rank . calls _low_contention_all_ga"):
        one_backward(model, x)
    again = shard(network(torch.float64), mesh)
    symm_cp.fsdp.use(again)
    one_backward(again, x)


@contextmanager
def captured_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    with mock.patch.object(symm_cp.fsdp.native, "say", lines.append):
        yield lines


@exhaustive
@pytest.mark.ranks(4)
def test_groups_that_share_no_memory_keep_torchs_collectives(group: dist.ProcessGroup) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another."""
    place = mock.patch.dict(os.environ, SYMM_CP_HOST=f"host {group.rank() // 2}")
    with place, world(group, "gloo"), captured_lines() as lines:
        mesh, model = mesh_of(2, 2), network()
        fully_shard(model.layers[0], mesh=mesh["parts"])
        fully_shard(model.layers[1], mesh=mesh["replicas"])
        symm_cp.fsdp.use(model)
        name = mesh["replicas"].get_group().group_name
        reason = f"group {name!r}: its ranks are on 2 hosts, which share no memory"
        assert lines == [f"fsdp.use: layers.1 keep torch's collectives ({reason})"]
        first, second = groups_of(model)
        assert isinstance(first._all_gather_comm, symm_cp.fsdp._Gather)
        assert isinstance(second._all_gather_comm, symm_cp.fsdp.DefaultAllGather)
        inputs, rank, alone = batches(4)[0], group.rank(), network()
        one_backward(model, inputs[rank])
        one_backward(alone, inputs.unflatten(0, (2, 2))[rank // 2].flatten(0, 1))
        mine, theirs = (list(each.layers[0].parameters()) for each in (model, alone))
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad)
