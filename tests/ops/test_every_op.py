"""What holds for every declared op and public function, on all ranks together.

Its gradients are those of finite differences, for each input and output alone as well; compiled
calls equal eager ones; torch's checks pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from symm_cp.ops.op import COMPOSITE, declared, declared_op
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.ops.calls import Call, Tensors, call_of, caller, calls, is_real, leaves
from tests.ops.functions import functions

#: Ops on memory that their caller must have allocated: the checks of torch call them with copies.
ON_GIVEN_MEMORY = r"remote|vdev|tile_reduce|nccl|multimem|nvshmem|word|memset32_|value32_"


def public(group: dist.ProcessGroup, dtype: torch.dtype = torch.float64) -> dict[str, Call]:
    """Calls of all ops and functions of users that have gradients."""
    return calls(group, dtype) | functions(group, dtype)


def internal(group: dist.ProcessGroup, dtype: torch.dtype = torch.float64) -> dict[str, Call]:
    """Calls of the ops that gradients and graphs call, and that have gradients."""

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * (1 + group.rank())).to(dtype)

    # `project_normed` has an output without a gradient; "projections" is a call of it.
    return {
        op.name: call_of(op, caller(group, rand))
        for op in declared()
        if op.differentiable and op.internal and "normed" not in op.name
    }


def each(
    group: dist.ProcessGroup, check: Callable[[dist.ProcessGroup, str, Call], None], *sets: Any
) -> None:
    for name, call in [item for make in sets for item in make(group).items()]:
        try:
            check(group, name, call)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


# --- finite differences ----------------------------------------------------------------------


def directions(group: dist.ProcessGroup, inputs: Tensors) -> Tensors:
    """Random ones, but the same on all ranks for inputs that are."""
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, inputs, group=group)
    found = []
    for number, x in enumerate(inputs):
        equal = all(torch.equal(x, given[number]) for given in of_ranks)
        seed = 10 * number + (0 if equal else group.rank())
        generator = torch.Generator().manual_seed(seed)
        found.append(torch.randn(x.shape, dtype=x.dtype, generator=generator))
    return found


def total(group: dist.ProcessGroup, number: Any) -> float:
    """The sum of the ranks' numbers."""
    summed = torch.as_tensor(number, dtype=torch.float64).detach().clone()
    dist.all_reduce(summed, group=group)
    return float(summed)


def loss_of(outputs: Tensors) -> torch.Tensor:
    """Has cubes, so that second derivatives depend on everything."""
    real = [out for out in outputs if out.is_floating_point()]
    return sum((out + 0.3 * out**3).sum() for out in real)  # type: ignore[return-value]


def assert_slope(
    group: dist.ProcessGroup,
    function: Callable[[Tensors], Any],
    inputs: Tensors,
    grads: Sequence[torch.Tensor],
) -> None:
    """Checks gradients against differences of the sum of the ranks' values of a function."""
    along, step = directions(group, inputs), 1e-3
    products = [(grad * d).sum() for grad, d in zip(grads, along, strict=True)]

    def at(times: int) -> float:
        moved = [x.detach() + times * step * d for x, d in zip(inputs, along, strict=True)]
        return total(group, function(moved))

    values = [at(times) for times in (1, -1, 2, -2)]
    slope = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)
    found = total(group, sum(products))
    # Rounding of the values, and the fifth derivative of functions that are nearly cubic.
    size = total(group, sum(abs(product) for product in products)) + 1e-11 / step * max(
        map(abs, values)
    )
    assert abs(found - slope) <= 1e-6 * size, (found, slope, size)


def differentiates(group: dist.ProcessGroup, name: str, call: Call) -> None:
    def gradients(inputs: Tensors, create_graph: bool = False) -> tuple[Tensors, Tensors]:
        given = leaves(inputs)
        loss = loss_of(call.run(*given))
        return given, list(torch.autograd.grad(loss, given, create_graph=create_graph))

    def probed(grads: Tensors) -> torch.Tensor:
        probes = [torch.linspace(-1, 2, grad.numel()).view_as(grad) for grad in grads]
        return sum((grad * probe).sum() for grad, probe in zip(grads, probes, strict=True))  # type: ignore[return-value]

    inputs = call.inputs
    assert_slope(group, lambda x: loss_of(call.run(*x)), inputs, gradients(inputs)[1])
    given, grads = gradients(inputs, create_graph=True)
    try:
        second = torch.autograd.grad(
            probed(grads), given, allow_unused=True, materialize_grads=True
        )
    except NotImplementedError as error:
        if "second derivatives" in str(error):
            return
        raise
    assert_slope(group, lambda x: probed(gradients(x)[1]), inputs, second)


# With 2 ranks some gradients of chains are 0.
@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
def test_gradients_and_second_derivatives(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, each, differentiates, public, internal)


def in_parts(group: dist.ProcessGroup, name: str, call: Call) -> None:
    """Gradients of one input only, and through one output only, another one on each rank."""
    given = leaves(call.inputs)
    outputs = call.run(*given)
    seeds = [torch.randn_like(out) for out in outputs]
    whole = torch.autograd.grad(outputs, given, seeds)
    with torch.no_grad():
        assert not any(out.requires_grad for out in call.run(*given))
    for number in range(len(given)):
        inputs = [x.clone().requires_grad_(i == number) for i, x in enumerate(call.inputs)]
        used = [(o, s) for o, s in zip(call.run(*inputs), seeds, strict=True) if o.requires_grad]
        alone, sent = zip(*used, strict=True)
        (grad,) = torch.autograd.grad(alone, inputs[number], sent)
        torch.testing.assert_close(grad, whole[number])
    if len(outputs) == 1:
        return
    for turn in range(len(outputs)):
        kept = (turn + group.rank()) % len(outputs)
        zeros = [s if i == kept else torch.zeros_like(s) for i, s in enumerate(seeds)]
        want = torch.autograd.grad(call.run(*given), given, zeros)
        found = torch.autograd.grad(
            call.run(*given)[kept], given, seeds[kept], allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(found, want)


def of_one_node(group: dist.ProcessGroup) -> dict[str, Call]:
    """Calls of `internal` ops, without those that call several ops which need their own grads."""
    return {
        name: call
        for name, call in internal(group).items()
        if declared_op(name).gradient is not COMPOSITE
    }


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_gradients_of_parts(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, each, in_parts, public, of_one_node)


# --- compiled --------------------------------------------------------------------------------


def compiles(group: dist.ProcessGroup, backend: str, turn: int, turns: int) -> None:
    """One graph, forward and backward."""
    cases = list((public(group, torch.float64) | internal(group, torch.float64)).items())
    # Compiled programs reach it by torch's flex_attention: tests/context_parallel.
    cases = [case for case in cases if not case[0].startswith("flex")]
    for name, call in cases[turn::turns]:
        torch._dynamo.reset()

        def run(*inputs: torch.Tensor, call: Call = call) -> tuple[torch.Tensor, ...]:
            return tuple(call.run(*(x * 2 for x in inputs)))

        results = []
        # A graph from Inductor's cache would say nothing of how the ops are lowered now.
        anew = inductor_config.patch(force_disable_caches=True)
        with torch._dynamo.config.patch(capture_scalar_outputs=True), anew:
            for function in (run, torch.compile(run, backend=backend, fullgraph=True)):
                given = leaves(call.inputs)
                outputs = function(*given)
                results.append([*outputs, *torch.autograd.grad(loss_of(list(outputs)), given)])
        torch.testing.assert_close(*results, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("turn", some(0, of=range(4)))
def test_compiled(ranks: Ranks, turn: int) -> None:
    ranks.run(2, compiles, "aot_eager", turn, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("turn", range(12))
@pytest.mark.parametrize("world_size", [2, 3])
def test_compiled_by_inductor(ranks: Ranks, world_size: int, turn: int) -> None:
    ranks.run(world_size, compiles, "inductor", turn, 12)


# --- torch.library.opcheck -------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.ranks
def test_opcheck(group: dist.ProcessGroup, world_size: int) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op in declared():
        # opcheck refuses torch's wait_tensor, whose result is its argument, and which these call.
        if re.search(f"{ON_GIVEN_MEMORY}|_low_contention_.*_backward", op.name):
            continue
        assert op.example is not None
        for grad in (False, True)[: 1 + (op.differentiable and not op.overload._schema.is_mutable)]:
            args, kwargs = op.example(caller(group))
            args = tree_map_only(
                torch.Tensor, lambda x, grad=grad: x.requires_grad_(grad and is_real(x)), args
            )
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            # The check of schemas multiplies its inputs, which torch cannot do in float8.
            narrow = any(x.is_floating_point() and x.dtype.itemsize == 1 for x in inputs)
            try:
                torch.library.opcheck(op.overload, args, kwargs, test_utils=checks[narrow:])
            except Exception as error:
                raise AssertionError(f"{op.name}: {error}") from error
