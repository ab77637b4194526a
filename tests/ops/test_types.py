"""What ops do to the axis of their group: checked by Meta's `spmd_types` against the kernels."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten, tree_unflatten

import symm_cp
from symm_cp import moe
from symm_cp.ops.op import declared, declared_op
from symm_cp.ops.spmd import checked, function_of
from symm_cp.testing import Ranks
from tests.ops.calls import alone

AXIS = "tp"


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


#: Whole tensors of calls, which `rulecheck` shards; each dimension has a size of its own.
CALLS: dict[str, tuple[Any, ...]] = {
    "fused_all_gather_matmul": (_r(4, 6), [_r(6, 10), _r(6, 14)], 0, AXIS),
    "_all_gather_matmul_split": (_r(3, 4, 6), [_r(6, 10)], 1, AXIS),
    "fused_matmul_reduce_scatter": (_r(4, 6), _r(6, 10), "sum", 0, AXIS),
    "_fused_matmuls_reduce_scatter": ([_r(4, 6)], [_r(6, 10)], None, "sum", 1, AXIS),
    "fused_matmul_all_reduce": (_r(4, 6), _r(6, 10), _r(10), "sum", AXIS),
    "_fused_matmuls_all_reduce": ([_r(4, 6)], [_r(6, 10)], None, _r(10), "sum", AXIS),
    "_low_contention_all_gather": (_r(4, 6), AXIS),
    "_low_contention_reduce_scatter": (_r(4, 6), "sum", AXIS),
    "all_gather_kv": (_r(2, 4, 8, 6), _r(2, 4, 8, 10), 2, AXIS),
    "fused_all_gather_attention": (_r(2, 4, 8, 6), _r(2, 4, 8, 6), _r(2, 4, 8, 10), AXIS),
    "spread_cache_attention": (_r(2, 4, 1, 6), _r(2, 4, 8, 6), _r(2, 4, 8, 10), AXIS),
    "spread_cache_attention_scattered": (_r(2, 4, 1, 6), _r(2, 4, 8, 6), _r(2, 4, 8, 10), AXIS),
    "exchange_heads": ([_r(2, 4, 8, 6), _r(2, 4, 8, 10)], True, AXIS),
    "project_to_heads": (_r(2, 8, 6), [_r(6, 12)], [_r(12)], 3, AXIS),
    "project_from_heads": ([_r(2, 4, 8, 3)], [_r(12, 10)], AXIS),
}


_ONE = torch.tensor(1.0)
_LEFT, _RIGHT = torch.randn(4, 32), torch.randn(16, 32)
_SCALED = _LEFT.to(torch.float8_e4m3fn), _RIGHT.to(torch.float8_e4m3fn).t()
_OUT = torch.float32
#: Calls with one placement: `rulecheck` adds no float8 numbers. Shards by the number of a tensor.
PLACED: dict[str, tuple[tuple[Any, ...], dict[int, int]]] = {
    "fused_scaled_matmul_all_reduce": (
        (*_SCALED, _ONE, _ONE, "sum", AXIS, None, None, _OUT), {0: 1, 1: 0},
    ),
    "fused_scaled_matmul_reduce_scatter": (
        (*_SCALED, _ONE, _ONE, "sum", 0, 0, AXIS, [4, 16], None, None, _OUT), {0: 1, 1: 0},
    ),
    "fused_all_gather_scaled_matmul": (
        (_SCALED[0], [_SCALED[1]], _ONE, [_ONE], 0, AXIS, [None], [None], [_OUT], [False]), {0: 0},
    ),
    "_project_normed_to_heads": (
        (_r(2, 8, 6), [_r(6, 12)], [], 3, [_r(3)], [True], 1e-6, None, None, [False], AXIS), {0: 1},
    ),
}  # fmt: skip
#: Outputs that are compared: no float8, no memory for the gradient.
COMPARED = {"fused_all_gather_scaled_matmul": slice(1, None), "_project_normed_to_heads": slice(1)}
#: Ops whose tensors vary, without being shards of one; torch's for memory of GPUs have no types.
LOCAL: dict[str, tuple[Any, ...]] = {
    "exchange_halo": (_r(4, 6, 8), 1, 1, 1, AXIS),
    "scan_states": (_r(2, 4, 6), _r(2, 4), False, False, AXIS),
    "dispatch_to_experts": (_r(4, 6), torch.arange(8), 4, 1, 2, AXIS),
    "combine_from_experts": (_r(4, 6), None, torch.arange(8), 1, 2, AXIS),
    "fused_dispatch_grouped_matmul": (_r(4, 6), [_r(2, 6, 8)], torch.arange(8), 4, 1, 2, AXIS),
    "fused_grouped_matmul_combine": ([_r(4, 6)], [_r(2, 6, 8)], None, torch.arange(8), 1, 2, AXIS),
}


def noise(like: torch.Tensor, *key: object) -> torch.Tensor:
    """Random terms of a sum; `spmd_types` draws them with an op that this torch lacks on CPU."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(hash(repr(key))))
    return drawn.to(like.dtype)


def listed(result: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in tree_flatten(result)[0] if leaf is not None)


def function_for(name: str, call: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """An autograd function that takes each tensor of a call, and the axis; and its arguments."""
    arguments = declared_op(name).overload._schema.arguments
    leaves, spec = tree_flatten(call)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def arguments_of(tensors: Any, group: Any) -> list[Any]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return [
            group if isinstance(x, str) and x == AXIS else x for x in tree_unflatten(filled, spec)
        ]

    class Each(torch.autograd.Function):
        @classmethod
        def apply(cls, *tensors: Any) -> Any:
            *tensors, group = tensors
            args = arguments_of(tensors, str(group.group_name))
            args += [each.default_value for each in arguments[len(args) :]]
            return listed(function_of(name).apply(*args))[COMPARED.get(name, slice(None))]

    names = [f"x{place}" for place in places]
    header = ", ".join([*names, "group"])
    scope: dict[str, Any] = {"arguments_of": arguments_of, "checked": checked, "listed": listed}
    scope["names"], scope["op"] = [each.name for each in arguments], name
    scope["compared"] = COMPARED.get(name, slice(None))
    text = (
        f"def forward(ctx, {header}): ...\n"
        f"def spmd_typecheck(*, {header}):\n"
        f"    given = arguments_of([{', '.join(names)}], group)\n"
        "    return listed(checked(op, dict(zip(names, given))))[compared]\n"
    )
    exec(text, scope)
    Each.forward = staticmethod(scope["forward"])
    Each.spmd_typecheck = staticmethod(scope["spmd_typecheck"])  # type: ignore[attr-defined]
    return Each, [*(leaves[place] for place in places), AXIS]


def checks(group: dist.ProcessGroup, name: str) -> tuple[int, int]:
    """How many placements the rule of an op accepts, all of which its kernel confirms."""
    from spmd_types import rulecheck

    dist.destroy_process_group()
    rulecheck._seeded_noise = noise
    report = rulecheck.rulecheck(*function_for(name, CALLS[name]), local_tensor_mode=True)
    return len(report.checked), len(report.rejected)


@pytest.fixture
def checker() -> Any:
    return pytest.importorskip("spmd_types")


@pytest.mark.parametrize("name", CALLS)
def test_types_describe_the_kernel(ranks: Ranks, checker: Any, name: str) -> None:
    accepted, refused = alone(ranks, checks, name)
    assert accepted == (3 if "matmul" in name and "gather" not in name else 1)
    assert refused


def checks_of_one_placement(group: dist.ProcessGroup) -> None:
    from spmd_types import R, S, rulecheck

    dist.destroy_process_group()
    options: dict[str, Any] = {"mesh": {AXIS: 2}, "local_tensor_mode": True}
    for name, (call, shards) in PLACED.items():
        function, arguments = function_for(name, call)
        tensors = list(inspect.signature(function.forward).parameters)[1:-1]
        placed = {x: {AXIS: R} for x in tensors}
        placed |= {tensors[number]: {AXIS: S(dim)} for number, dim in shards.items()}
        rulecheck.rulecheck(function, arguments, placed, **options)
    for name, call in LOCAL.items():
        function, arguments = function_for(name, call)
        first = inspect.signature(function.forward).parameters
        placed = {x: {AXIS: S(0) if number == 0 else R} for number, x in enumerate([*first][1:-1])}
        mesh = rulecheck._Mesh({AXIS: 2})
        reason = rulecheck._hook_rejects(function, tuple(arguments), placed, mesh)
        assert reason is not None
        assert re.search("so it needs local types|must not be sharded", reason), (name, reason)


def test_types_of_one_placement(ranks: Ranks, checker: Any) -> None:
    alone(ranks, checks_of_one_placement)


def test_every_op_of_users_is_checked() -> None:
    """`spmd_types` confirms each rule, but for ops that have no types and those of their names."""
    without = {op.name for op in declared() if op.internal or op.cpu_only}
    kinds = {"_low_contention_all_gather_out", "_low_contention_reduce_scatter_out"}
    kinds |= {"flex_all_gather_attention"}  # the same rule, with options of its own
    assert {op.name for op in declared()} - without - kinds <= {*CALLS, *PLACED, *LOCAL}


def checks_on_a_mesh(group: dist.ProcessGroup) -> None:
    from spmd_types import R, S
    from spmd_types.rulecheck import RuleCheckError, rulecheck

    dist.destroy_process_group()
    gather = function_for("fused_all_gather_matmul", CALLS["fused_all_gather_matmul"])
    sharded = {"x1": {"dp": R, AXIS: S(1)}, "x2": {"dp": R, AXIS: S(1)}}
    options: dict[str, Any] = {"mesh": {"dp": 2, AXIS: 2}, "local_tensor_mode": True}
    rulecheck(*gather, {"x0": {"dp": R, AXIS: S(0)}, **sharded}, **options)
    op = declared_op("fused_matmul_all_reduce")
    placed = {"x0": {"dp": S(0), AXIS: S(1)}, "x1": {"dp": R, AXIS: S(0)}, "x2": {"dp": R, AXIS: R}}
    rulecheck(*function_for(op.name, CALLS[op.name]), placed, **options)
    op = declared_op("_low_contention_all_gather")
    wrong = dataclasses.replace(op, types=lambda t, tensor, **_: t.all_gather(tensor, 1))
    with (
        mock.patch.dict("symm_cp.ops.op._declared", {op.name: wrong}),
        pytest.raises(RuleCheckError, match="the output reassembles to shape"),
    ):
        rulecheck(
            *function_for(op.name, CALLS[op.name]),
            {"x0": {AXIS: S(1)}},
            mesh={AXIS: 2},
            local_tensor_mode=True,
        )


def test_types_on_a_mesh(ranks: Ranks, checker: Any) -> None:
    alone(ranks, checks_on_a_mesh)


def local_types(group: dist.ProcessGroup) -> dict[str, str]:
    """The types of results of calls with varying tensors, without shards."""
    import spmd_types
    from spmd_types import P, R, V
    from spmd_types.checker import typecheck

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(AXIS,))
    axis, found = mesh.get_group(AXIS), {}

    def given(kind: Any, *shape: int) -> torch.Tensor:
        return spmd_types.assert_type(torch.randn(shape), {axis: kind})

    with spmd_types.set_current_mesh(mesh), typecheck():
        a, weight = given(V, 4, 6).requires_grad_(), given(V, 6, 10)
        results = {
            "all_reduce": symm_cp.matmul_all_reduce(a, weight, given(R, 10), group=axis),
            "gather": symm_cp.all_gather_matmul(a, weight, group=axis),
            "scatter": symm_cp.matmul_reduce_scatter(a, weight, group=axis),
            "scattered": symm_cp.low_contention_reduce_scatter(given(P, 4, 6), group=axis),
            "halo": symm_cp.exchange_halo(a, 1, dim=0, group=axis),
        }
        experts = spmd_types.assert_type(torch.randint(4, (4, 2)), {axis: V})
        results["dispatch"], routing = moe.dispatch(a, experts, 4, group=axis)
        results["combine"] = moe.combine(results["dispatch"], None, routing)
        for name, result in results.items():
            found[name] = spmd_types.get_axis_local_type(result, axis).value
        results["all_reduce"].backward(torch.ones(4, 10))  # by the op's own gradient
        assert a.grad is not None
        with pytest.raises(spmd_types.SpmdTypeError, match="to be P on axis"):
            symm_cp.matmul_all_reduce(given(R, 4, 6), given(R, 6, 10), group=axis)
        with pytest.raises(spmd_types.SpmdTypeError, match="has no types: it is for programs"):
            checked("nvshmem_broadcast", {"group_name": axis.group_name})
    return found


def test_varying_factors(ranks: Ranks, checker: Any) -> None:
    """matmul_all_reduce(V, V) is R; without rules of ours the checker says V."""
    for found in ranks.run(2, local_types):
        assert found == {
            "all_reduce": "R", "gather": "V", "scatter": "V", "scattered": "V", "halo": "V",
            "dispatch": "V", "combine": "V",
        }  # fmt: skip


def test_docstrings_tell_types() -> None:
    """One line for each entry point, in its own words, from the op's declaration."""
    lines = {
        symm_cp.matmul_all_reduce: "all_reduce(a @ weight: P -> R)",
        symm_cp.all_gather_matmul: "all_gather(shard: S(gather_dim) -> R) @ weights",
        symm_cp.heads_to_sequence: "all_to_all(x: S(1) -> S(2))",
        symm_cp.spread_cache_attention: "attend(query: R, key: S(2), value: S(2)) -> R",
        moe.dispatch: "rows of tokens: V -> V",
    }
    for function, line in lines.items():
        assert function.__doc__ is not None
        assert f"Types for `spmd_types` on the group's axis: `{line}`." in function.__doc__
