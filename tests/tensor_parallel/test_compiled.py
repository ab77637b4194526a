"""The styles under `torch.compile`: no graph breaks, one gather for a group of linears."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from symm_cp.tensor_parallel import FusedColwiseGroup
from tests.exhaustive import some
from tests.tensor_parallel.common import (
    Block,
    K,
    S,
    fused_plan,
    leaf,
    mesh_of,
    part,
    same,
    same_grads,
)


class Gathers:
    """A backend that counts the all-gather-matmuls of the graphs it gets."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        ops = torch.ops.symm_mem.fused_all_gather_matmul
        self.count += sum(n.target in (ops, ops.default) for n in graph.graph.nodes)
        return aot_eager(graph, inputs)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("sequence_norm", "backend"),
    some(
        (False, "counted"),
        of=[(False, "counted"), (True, "counted"), (True, "inductor")],
    ),
)
@pytest.mark.ranks(2)
def test_trains(group: dist.ProcessGroup, sequence_norm: bool, backend: str) -> None:
    plan = fused_plan()
    if sequence_norm:
        plan["norm"] = SequenceParallel()
    block = parallelize_module(Block().double(), mesh_of(group), plan)
    counted = Gathers()
    chosen: Any = counted if backend == "counted" else backend
    x = part(torch.randn(2, S, 36, dtype=torch.float64), group, 1).contiguous()
    results = []
    for run in (block, torch.compile(block, backend=chosen, fullgraph=True)):
        for _ in range(2):  # the second step checks guards, without tracing
            block.zero_grad()
            x_shard = leaf(x)
            out = local(run(x_shard))
            out.square().sum().backward()
        grads = [p.grad for p in block.parameters()]
        results.append([out.detach(), x_shard.grad, *map(local, grads)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    if backend == "counted":
        assert counted.count == 1


class Communicating:
    """A backend that lists the communicating ops of the graphs it gets, forward and backward."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def compiler(traced: torch.fx.GraphModule, inputs: Any) -> Any:
            names = [str(node.target) for node in traced.graph.nodes]
            self.ops += [n for n in names if n.startswith("symm_mem.") or "c10d" in n]
            return make_boxed_func(traced.forward)

        return aot_autograd(fw_compiler=compiler)(graph, inputs)


def replicate(module: nn.Module, inputs: Any, output: DTensor) -> DTensor:
    """Replicates a norm's output, as `PrepareModuleInput` does."""
    return output.redistribute(placements=[Replicate()])


@pytest.mark.parametrize(
    ("around", "backend"),
    some(
        ("", "counted"),
        of=[(a, "counted") for a in ("", "norm", "colwise", "rowwise")] + [("", "inductor")],
    ),
)
@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_trains_replicated(group: dist.ProcessGroup, around: str, backend: str) -> None:
    """`around`: the part that torch parallelizes, next to our linears."""
    torch._dynamo.reset()  # shapes of earlier tests would make dimensions dynamic
    plan = fused_plan(None)
    if around == "colwise":
        plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": plan["w2"]}
    elif around == "rowwise":
        plan["w2"] = RowwiseParallel()
    elif around == "norm":
        plan["norm"] = SequenceParallel()
    dense = Block().double()
    block = parallelize_module(copy.deepcopy(dense), mesh_of(group), plan)
    if around == "norm":
        block.norm.register_forward_hook(replicate)
    counted = Communicating()
    chosen: Any = counted if backend == "counted" else backend
    # torch's own styles fail with dynamic shapes (a RecursionError, 2.13).
    dynamic = around in ("", "norm")
    compiled = torch.compile(block, backend=chosen, fullgraph=True, dynamic=dynamic)
    x = torch.randn(2, S, K, dtype=torch.float64)
    for _ in range(2):
        results = []
        for module in (dense, compiled):
            module.zero_grad()
            # A norm split by sequence takes a shard, and the rest of the block all of it.
            own = part(x, group, 1) if around == "norm" and module is compiled else x
            y = leaf(own.contiguous())
            out = module(y)
            out.square().sum().backward()
            results.append((out, y.grad))
        same(results[1][0], results[0][0])
        expected = results[0][1]
        assert expected is not None
        same(results[1][1], part(expected, group, 1) if around == "norm" else expected)
        same_grads(block, dense)
    if backend == "counted" and around == "":
        ours = ["fused_matmul_all_reduce", "_fused_matmuls_all_reduce"]
        assert counted.ops == [f"symm_mem.{name}.default" for name in ours]


class Changing(nn.Module):
    """Modifies the input, or a weight, between two linears that could share its gather."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        first = self.a(x)
        if self.change == "input":
            x.add_(1)
        elif self.change == "copy":
            x = x + 1
        else:
            with torch.no_grad():
                self.b.weight.mul_(2)
        return first + self.b(x)


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_modified_between(group: dist.ProcessGroup) -> None:
    x = torch.randn(2, 3, 4) + group.rank()
    for change in ("input", "copy", "weight"):
        eager = Changing(change)
        parallelize_module(eager, mesh_of(group), {"": FusedColwiseGroup(("a", "b"))})
        compiled = torch.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True)
        if change == "copy":
            with pytest.warns(UserWarning, match="should share one gather"):
                expected = eager(x)
            torch.testing.assert_close(compiled(x), expected)
        else:
            with pytest.raises(Exception, match="modified in place between two of them"):
                compiled(x)
