"""Under autocast, ops give the same bits as for inputs that were cast by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

import symm_cp
from symm_cp.context_parallel import ContextParallel, context_parallel
from symm_cp.ops import autocast
from symm_cp.ops.op import Caller, Op, declared
from tests.ops.calls import OPS, Call, Tensors, calls, is_real, leaves
from tests.ops.functions import functions
from tests.tensor_parallel.common import mesh_of

#: How many of an op's first arguments each rule casts.
CAST = {autocast.cast: None, autocast.cast_query_key_value: 3, autocast.cast_operands: 2}


def casting(op: Op) -> int:
    """How many of the floating inputs of an op's example call autocast casts."""
    assert op.example is not None
    args, _ = op.example(Caller("", 0, 2, [1, 2]))
    cast = tree_leaves(args[: CAST[op.autocast]])
    return sum(isinstance(arg, torch.Tensor) and is_real(arg) for arg in cast)


#: That number, of the ops whose declarations have such a rule.
CASTING = {op.name: casting(op) for op in declared() if op.autocast in CAST}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def narrowed(name: str, inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """The inputs as autocast casts them."""
    count = CASTING.get(name, len(inputs))
    return [t.to(dtype) if i < count else t for i, t in enumerate(inputs)]


def gradients(
    call: Call, inputs: Tensors, dtype: torch.dtype | None, name: str = ""
) -> tuple[Tensors, Tensors]:
    """Outputs and gradients, under autocast or on inputs that are cast to `dtype` by hand."""
    given = leaves(inputs)
    outputs = call.run(*(given if dtype is None else narrowed(name, given, dtype)))
    # Outside of autocast, as torch recommends.
    with torch.autocast("cpu", enabled=False):
        loss = sum(out.float().square().sum() for out in outputs)
        return [out.detach() for out in outputs], list(torch.autograd.grad(loss, given))


@DTYPES
@pytest.mark.ranks(2)
def test_casts_inputs(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    for name, call in calls(group, torch.float32).items():
        expected, grads = gradients(call, call.inputs, dtype if name in CASTING else None, name)
        casted = narrowed(name, call.inputs, dtype)
        mixed = [call.inputs[0], *(t.float() for t in casted[1:])]
        expected_mixed, _ = gradients(call, mixed, dtype if name in CASTING else None, name)
        with torch.autocast("cpu", dtype=dtype):
            found, found_grads = gradients(call, call.inputs, None)
            if name in CASTING:  # one operand comes from another op, in 16 bits already
                given = [mixed[0], *casted[1:]]
                for got, want in zip(call.run(*given), expected_mixed, strict=True):
                    assert torch.equal(got, want), name
            with torch.autocast("cpu", enabled=False):
                assert call.run(*call.inputs)[0].dtype == torch.float32
        for got, want in zip([*found, *found_grads], [*expected, *grads], strict=True):
            assert got.dtype == want.dtype, name
            assert torch.equal(got, want), name
        assert all(grad.dtype == torch.float32 for grad in found_grads)
    for name, call in calls(group, torch.float64).items():
        with torch.autocast("cpu", dtype=dtype):
            found, _ = gradients(call, call.inputs, None)
        expected, _ = gradients(call, call.inputs, None)
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want), name  # float64 stays as it is


#: Functions that multiply by weights or keys, and so return 16 bits.
NARROWED = (
    "gather", "scatter", "all-reduce", "average", "uneven parts", "attention", "spread cache",
    "projections", "matmuls of experts",
)  # fmt: skip


@pytest.mark.ranks(2)
def test_functions_that_narrow_their_results(group: dist.ProcessGroup) -> None:
    for name, call in functions(group, torch.float32).items():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call.run(*call.inputs)[0]
        assert out.dtype == (torch.bfloat16 if name.startswith(NARROWED) else torch.float32), name


@pytest.mark.ranks(2)
def test_all_gather_kv_takes_the_wider_dtype(group: dist.ProcessGroup) -> None:
    k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = symm_cp.all_gather_kv(k, v, group=group)
        with pytest.raises(TypeError, match=r"value is torch\.float32 .*, key torch\.float64"):
            symm_cp.all_gather_kv(k.double(), v.float(), group=group)
    for got, want in zip(found, symm_cp.all_gather_kv(k, v.float(), group=group), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    with pytest.raises(TypeError, match=r"value is torch\.bfloat16"):
        symm_cp.all_gather_kv(k, v, group=group)


@pytest.mark.ranks(2)
def test_backward_under_autocast(group: dist.ProcessGroup) -> None:
    """A backward pass under autocast computes in the dtypes of the forward pass."""
    for name, call in calls(group, torch.float32).items():
        given = leaves(call.inputs)
        outputs = call.run(*given)
        seeds = [torch.randn_like(out) for out in outputs]
        expected = torch.autograd.grad(outputs, given, seeds, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(outputs, given, seeds)
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want), name


@pytest.mark.ranks(2)
def test_second_backward_under_autocast(group: dist.ProcessGroup) -> None:
    W, name = group.size(), group.group_name

    def gather(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, name)[1][0]

    def scatter(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name)

    for run in (gather, scatter):
        inputs = leaves([torch.randn(2 * W, 4), torch.randn(4, 3)])
        first = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
        probes = [torch.randn_like(grad) for grad in first]
        expected = torch.autograd.grad(first, inputs, probes, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(first, inputs, probes)
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want), run.__name__


class Attention(nn.Module):
    """A norm that autocast leaves in float32, projections, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        # Rotary embeddings are computed in float32.
        return F.scaled_dot_product_attention(q.float() * 2, k.float() + 1, v, is_causal=True)


@pytest.mark.ranks(2)
def test_context_parallel(group: dist.ProcessGroup) -> None:
    x, dense = torch.randn(2, 8, 8), Attention()
    parallel = parallelize_module(copy.deepcopy(dense), mesh_of(group), ContextParallel())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with context_parallel(mesh_of(group)):
            inside = dense(x)
        found = parallel(x)
    assert inside.dtype == found.dtype == torch.bfloat16
    assert torch.equal(inside, found)
    found.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parallel.parameters())


@pytest.mark.ranks(2)
def test_compiled(group: dist.ProcessGroup) -> None:
    name = group.group_name
    x, w, v = torch.randn(4, 8), torch.randn(8, 6), torch.randn(6, 8)
    q = torch.randn(1, 2, 16, 4)

    def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, (hidden,) = OPS.fused_all_gather_matmul(x, [w], 0, name, return_A=False)
            out = OPS.fused_matmul_reduce_scatter(hidden, v, "sum", 0, name)
            with torch.autocast("cpu", enabled=False):
                _, (wide,) = OPS.fused_all_gather_matmul(x, [w], 0, name, return_A=False)
            seen, _ = OPS.fused_all_gather_attention(q, q, q, name)
        assert (out.dtype, wide.dtype, seen.dtype) == (torch.bfloat16, x.dtype, torch.bfloat16)
        return out.float().sum() + wide.sum() + seen.float().square().sum()

    results = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        given = leaves([x, w, v, q])
        loss = run(*given)
        results.append([loss.detach(), *torch.autograd.grad(loss, given)])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)
