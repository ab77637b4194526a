"""Ops under torch's modes for debugging: all ranks in one process, and counts of collectives."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import symm_cp
from symm_cp.ops.op import Caller, Op, declared
from symm_cp.tensor_parallel import FusedColwiseParallel, FusedRowwiseParallel
from symm_cp.testing import Ranks
from tests.ops.calls import alone, completed
from tests.ops.test_declarations import ON_PEERS

Results = dict[str, list[torch.Tensor]]
#: Ops on peers' memory, which a process alone does not have, and ops without a group.
REFUSED = {op.name for op in declared() if op.one_sided or re.search(ON_PEERS, op.name)}
WORLD_SIZES = (2, 3)


def example(op: Op, group: dist.ProcessGroup, rank: int) -> tuple[list[Any], Any]:
    assert op.example is not None
    torch.manual_seed(rank)
    sizes = list(range(1, group.size() + 1))
    return tree_flatten(tuple(op.example(Caller(group.group_name, rank, group.size(), sizes))))


def on_real_ranks(group: dist.ProcessGroup) -> Results:
    results = {}
    for op in declared():
        if op.name not in REFUSED:
            args, kwargs = tree_unflatten(*example(op, group, group.rank()))
            with torch.no_grad():
                results[op.name] = tensors(completed(op, op.overload(*args, **kwargs)))
    return results


def tensors(result: Any) -> list[torch.Tensor]:
    return [x.to(torch.float64) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def in_one_process(group: dist.ProcessGroup, world_size: int) -> dict[str, list[Any]]:
    group = fake_group(world_size)
    results = {}
    for op in declared():
        if op.name in REFUSED:
            continue
        of_ranks = [example(op, group, rank) for rank in range(world_size)]
        joined = [
            LocalTensor(dict(enumerate(each))) if isinstance(each[0], torch.Tensor) else each[0]
            for each in zip(*(leaves for leaves, _ in of_ranks), strict=True)
        ]
        args, kwargs = tree_unflatten(joined, of_ranks[0][1])
        with LocalTensorMode(world_size), torch.no_grad():
            found: Any = tensors(completed(op, op.overload(*args, **kwargs)))
        results[op.name] = [each._local_tensors for each in found]
    return results


def fake_group(world_size: int) -> dist.ProcessGroup:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_process_equals_ranks(ranks: Ranks, world_size: int) -> None:
    result = alone(ranks, in_one_process, world_size)
    for rank, expected in enumerate(ranks.run(world_size, on_real_ranks)):
        assert set(expected) == set(result)
        for name, wanted in expected.items():
            found = [each[rank] for each in result[name]]
            close = {"rtol": 1e-5, "atol": 1e-5}  # of float32; sums over ranks differ in order
            try:
                torch.testing.assert_close(found, wanted, **close)
            except AssertionError as error:
                raise AssertionError(f"{name} on rank {rank}: {error}") from error


def gathered_product(x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, group) @ weight


def scattered_product(x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.reduce_scatter_tensor_autograd(x @ weight, "sum", 0, group)


FUSED = (
    lambda x, weight, group: symm_cp.all_gather_matmul(x, weight, group=group),
    lambda x, weight, group: symm_cp.matmul_reduce_scatter(x, weight, group=group),
)
UNFUSED = (gathered_product, scattered_product)


def sharded_mlp(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: Any, gather: Any, scatter: Any
) -> torch.Tensor:
    y: torch.Tensor = scatter(gather(x, up, group).relu(), down, group)
    return y


def with_a_sum(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: Any
) -> list[torch.Tensor]:
    """Results and gradients of a sharded MLP and of a sum over ranks."""
    y = sharded_mlp(x, up, down, group, *FUSED)
    total = symm_cp.matmul_all_reduce(x, down.t().contiguous(), group=group)
    (y.square().sum() + total.square().sum()).backward()
    grads: Any = [each.grad for each in (x, up, down)]
    return [y.detach(), total.detach(), *grads]


def inputs(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((2, 4), (4, 6), (6, 4))]


def mlp_on_a_mesh(group: dist.ProcessGroup) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given = [each.requires_grad_() for each in inputs(group.rank())]
    return with_a_sum(*given, mesh.get_group("tp"))


def mlp_in_one_process(group: dist.ProcessGroup) -> list[dict[int, torch.Tensor]]:
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    of_ranks = zip(*map(inputs, range(4)), strict=True)
    given = [LocalTensor(dict(enumerate(each))).requires_grad_() for each in of_ranks]
    with LocalTensorMode(4):
        results: Any = with_a_sum(*given, mesh.get_group("tp"))
        return [dict(each._local_tensors) for each in results]


def test_matmuls_and_gradients_on_one_axis_of_a_mesh(ranks: Ranks) -> None:
    result = alone(ranks, mlp_in_one_process)
    for rank, wanted in enumerate(ranks.run(4, mlp_on_a_mesh)):
        torch.testing.assert_close([each[rank] for each in result], wanted)


def counted(group: dist.ProcessGroup) -> list[Any]:
    """The collectives that torch's modes count in a sharded MLP, and in its unfused form."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._debug_mode import DebugMode

    counts = []
    for forms in (FUSED, UNFUSED):
        given = [each.requires_grad_() for each in inputs(group.rank())]
        with CommDebugMode() as mode:
            y = sharded_mlp(*given, group, *forms)
            forward = dict(mode.get_comm_counts())
            y.square().sum().backward()
        for found in (forward, mode.get_comm_counts()):
            counts.append({op.__name__: count for op, count in found.items() if count})
    with DebugMode() as debug, torch.no_grad():
        symm_cp.all_gather_matmul(*inputs(0)[:2], group=group)
    return [*counts, debug.debug_string()]


def test_modes_count_collectives_in_ops(ranks: Ranks) -> None:
    for fused, both, unfused, both_unfused, text in ranks.run(2, counted):
        assert fused == unfused == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        # Its gradient gathers the shards of x again, which autograd would save.
        both_unfused["all_gather_into_tensor"] += 1
        assert both == both_unfused == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 2}
        assert re.search(r"fused_all_gather_matmul.*\n.*all_gather_into_tensor", text)


def with_two_ops_of_users(group: dist.ProcessGroup) -> list[dict[int, torch.Tensor]]:
    made = []
    for name in ("before", "after"):

        @symm_cp.op(f"modes::{name}(Tensor x, str group_name) -> Tensor")
        def doubled(call: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * call.all_gather(x)

        made.append(doubled)
    x = LocalTensor({rank: torch.full((2,), float(rank)) for rank in range(2)})
    name = str(fake_group(2).group_name)
    with LocalTensorMode(2):
        return [dict(op(x, name)._local_tensors) for op in made]


def test_ops_of_users(ranks: Ranks) -> None:
    result = alone(ranks, with_two_ops_of_users)
    for found in result:
        for tensor in found.values():
            assert tensor.tolist() == [0, 0, 2, 2]


def styles_in_one_process(group: dist.ProcessGroup) -> None:
    """Modules of tensor parallelism, with gradients, against the dense modules."""
    fake_group(2)
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(1, 8, 4)
    parts = x.chunk(2, 1)
    with LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        plan = {"0": FusedColwiseParallel(), "2": FusedRowwiseParallel()}
        model = parallelize_module(copy.deepcopy(dense), mesh, plan)
        y = model(LocalTensor(dict(enumerate(parts))))
        y.square().sum().backward()
        grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    wanted = dense(x)
    wanted.square().sum().backward()
    for rank, part in enumerate(wanted.chunk(2, 1)):
        torch.testing.assert_close(y._local_tensors[rank], part)
        of_rank = [grad._local_tensors[rank] for grad in grads]
        torch.testing.assert_close(of_rank, [p.grad for p in dense.parameters()])


def test_modules_of_tensor_parallelism(ranks: Ranks) -> None:
    alone(ranks, styles_in_one_process)
