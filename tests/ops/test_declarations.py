"""Each op is declared with all of its parts: the registries and lists of tests follow from that."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import symm_cp
from symm_cp.ops import autocast
from symm_cp.ops.op import (
    ONE_BY_ONE,
    TORCHS,
    Elsewhere,
    GradientByHand,
    Op,
    declared,
    declared_op,
    missing_parts,
    untouched,
)
from symm_cp.testing import Ranks
from tests.faults import strange
from tests.ops.calls import Memory, alone, caller, calls, completed, is_real
from tests.ops.newer import MISSING
from tests.ops.test_fake import layout

TABLE = (Path(symm_cp.__file__).parent / "ops" / "README.md").read_text().split("\n\n")[2]
OPS = [op.name for op in declared()]


def lacks(op: Op, table: str = TABLE) -> list[str]:
    """The parts that a declaration or its documentation lacks."""
    missing = missing_parts(op)
    if not op.internal and f"`{op.name}`" not in table:
        missing.append("README's table")
    return missing


@pytest.mark.parametrize("name", OPS)
def test_every_part_is_there(name: str) -> None:
    assert lacks(declared_op(name)) == [], f"{name} lacks parts: see symm_cp/ops/op.py"


@pytest.mark.parametrize(
    "part", ["schema", "kernel", "fake", "gradient", "autocast", "vmap", "example", "functional"]
)
def test_a_part_that_is_left_out_is_named(part: str) -> None:
    op = declared_op("_low_contention_all_gather_out")
    assert lacks(op) == []
    assert lacks(dataclasses.replace(op, **{part: None})) == [part]
    assert lacks(op, TABLE.replace(f"`{op.name}`", "")) == ["README's table"]


def test_the_table_names_declared_ops() -> None:
    cells = [line.split("|")[3] for line in TABLE.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named - MISSING <= {op.name for op in declared()}


def test_no_op_of_ours_is_undeclared() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ours = {
        name.partition("::")[2]
        for name in names
        if name.startswith("symm_mem::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    }
    assert ours - MISSING == {op.name for op in declared()}


def test_every_op_of_the_namespace_runs_on_cpu() -> None:
    """Torch's own ops, too; `nccl_wait_signal` runs on the device of its handle."""
    keys = ("CPU", "CompositeExplicitAutograd", "BackendSelect")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name for schema in schemas if schema.name.startswith("symm_mem::")}
    assert {f"symm_mem::{op.name}" for op in declared()} <= names
    assert [name for name in sorted(names) if not any(has(name, key) for key in keys)] == []


@pytest.mark.parametrize("name", OPS)
def test_what_is_declared_is_registered(name: str) -> None:
    op = declared_op(name)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    qualified = f"symm_mem::{name}"
    assert has(qualified, "SparseCPU")  # it refuses tensors without dense memory
    assert has(qualified, "AutocastCPU") == (op.autocast is not untouched)
    assert has(qualified, "FuncTorchBatched") == (op.vmap is ONE_BY_ONE)
    silent = isinstance(op.gradient, Elsewhere) and not op.gradient.reason.startswith("csrc/")
    assert any(has(qualified, key) for key in ("Autograd", "AutogradCPU")) != silent
    assert (op.functional is None) or has(qualified, "Functionalize")
    if op.schema not in (None, TORCHS):
        assert str(torch._C.parse_schema(qualified + op.schema)) == str(op.overload._schema)
    # C++ calls kernels in Python where neither its own kernel nor a plan applies.
    planned = not op.cpu_only
    in_python = torch._C._dispatch_get_all_op_names()
    assert (op.native or planned) == (f"symm_cp::{name}" in in_python)
    assert planned == (f"symm_cp::{name}.recorded" in in_python)


def test_the_lists_of_tests_have_every_op() -> None:
    """Tests of strange tensors cover all ops except those in `LEFT_OUT`."""
    assert {*OPS} - {*strange.LEFT_OUT} == set(strange.RAW)


def differentiated(group: dist.ProcessGroup) -> list[str]:
    return list(calls(group))


def test_every_public_gradient_is_in_the_calls_of_tests(ranks: Ranks) -> None:
    (found,) = ranks.run(1, differentiated)
    assert {op.name for op in declared() if op.differentiable and not op.internal} <= set(found)


def prepared_calls_are_pure(op: Op) -> bool:
    """Whether a call is prepared without tensors and groups."""
    assert op.prepare is not None
    kinds = [str(each.annotation) for each in inspect.signature(op.prepare).parameters.values()]
    return not any(re.search(r"torch\.Tensor|\bGroup\b|Any\b(?!, \.\.\.)", kind) for kind in kinds)


def test_prepared_calls_are_pure() -> None:
    planned = [op for op in declared() if op.prepare is not None]
    assert len(planned) >= 2
    assert all(prepared_calls_are_pure(op) for op in planned)

    def takes_tensors(x: torch.Tensor) -> None: ...

    assert not prepared_calls_are_pure(dataclasses.replace(planned[0], prepare=takes_tensors))


# --- example calls ---------------------------------------------------------------------------


def runs(group: dist.ProcessGroup, name: str) -> None:
    """The example runs; its fake results have the shapes, strides and dtypes of real ones."""
    op = declared_op(name)
    assert op.example is not None
    torch.manual_seed(0)
    args, kwargs = op.example(caller(group))
    if hasattr(op.fake, "breaks_graph"):
        found = op.overload(*args, **kwargs)
        assert name != "get_remote_tensors" or len(found) == group.size()
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        faked: Any = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        if op.mixes_devices:
            op.overload(*faked[0], **faked[1])
        fake = layout(op.overload(*faked[0], **faked[1]))
    with torch.no_grad():
        real = layout(completed(op, op.overload(*args, **kwargs)))
    assert real == fake, (name, real, fake)
    assert not op.overload._schema.returns or [x for x in tree_leaves(real) if x is not None]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.ranks
def test_examples_run(group: dist.ProcessGroup, world_size: int) -> None:
    for op in declared():
        try:
            runs(group, op.name)
        except Exception as error:
            raise AssertionError(f"{op.name}: {type(error).__name__}: {error}") from error


# Ops on peers' memory: a process alone has no peers.
ON_PEERS = r"(one|two)_shot|^_?reduce_scatter|offset|remote|vdev|tile_reduce|multimem|nvshmem|nccl"


def run_alone(group: dist.ProcessGroup) -> dict[str, str]:
    """In a group of torch's backend "fake", which exchanges nothing: tests of shapes use it."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    refused = {}
    for op in declared():
        try:
            runs(dist.group.WORLD, op.name)
        except (RuntimeError, NotImplementedError) as error:
            refused[op.name] = str(error)
    return refused


def test_all_ops_run_in_a_fake_group(ranks: Ranks) -> None:
    result = alone(ranks, run_alone)
    assert set(result) == {name for name in OPS if re.search(ON_PEERS, name)}
    assert "exchanges nothing" in result["get_remote_tensors"]
    assert not [text for text in result.values() if "INTERNAL ASSERT" in text]


@pytest.mark.ranks(2)
def test_refusals_reach_the_peers(group: dist.ProcessGroup) -> None:
    """One rank refuses an argument; its error, which names an op, reaches its peers, too."""
    for op in declared():
        if op.name == "get_remote_tensors" or op.one_sided:  # no call of peers
            continue
        assert op.example is not None
        leaves, spec = tree_flatten(tuple(op.example(caller(group))))
        bad = group.rank() == 0
        first = next(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
        if bad and not leaves[first].untyped_storage().resizable():  # symmetric memory
            leaves[first] = leaves[first].clone()
        storage = leaves[first].untyped_storage()
        nbytes = storage.nbytes()
        if bad:
            storage.resize_(0)
        args, kwargs = tree_unflatten(leaves, spec)
        with pytest.raises((RuntimeError, ValueError)) as caught, torch.no_grad():
            completed(op, op.overload(*args, **kwargs))
        if bad:
            storage.resize_(nbytes)  # a traceback prints the tensor
        dist.barrier(group)  # peers keep the reasons of a few calls
        text = str(caught.value)
        # Native kernels of a family share one name in errors.
        assert any(each.name in text for each in declared()), text
        assert "bytes of storage" in text, text


def test_autocast_rules_are_those_of_autocast() -> None:
    rules = {op.autocast for op in declared()}
    known = {
        autocast.cast,
        autocast.cast_operands,
        autocast.cast_query_key_value,
        autocast.widen,
        autocast.as_they_are,
    }
    assert rules == {*known, untouched}


def test_gradients_by_hand_are_of_attention() -> None:
    """Only attention needs them: `register_autograd` rejects ops with tensor keyword arguments."""
    by_hand = {op.name for op in declared() if isinstance(op.gradient, GradientByHand)}
    assert all("attention" in name for name in by_hand)


def results(op: Op, leaves: list[Any], spec: Any) -> list[torch.Tensor]:
    args, kwargs = tree_unflatten(leaves, spec)
    with torch.no_grad():
        found = tree_leaves(completed(op, op.overload(*args, **kwargs)))
    return [x for x in found if isinstance(x, torch.Tensor)]


#: Collectives whose inputs are in symmetric memory on all ranks or on none.
SYMMETRIC_ON_ALL = r"low_contention|shot_all_reduce|^_(all_reduce|reduce_scatter)$|multimem"
DENSE = ("get_remote_tensors", "one_shot_all_reduce_copy", "multimem_one_shot_all_reduce")


@pytest.mark.parametrize("sizes", [[2], [3, 1], [1, 0, 2], [1, 0, 3, 2]], ids=str)
def test_inputs_of_any_strides(ranks: Ranks, sizes: list[int]) -> None:
    """Each rank lays out its inputs at random, and decides the same as its peers."""
    ranks.run(len(sizes), of_any_strides, sizes)


def of_any_strides(group: dist.ProcessGroup, sizes: list[int]) -> None:
    """Results do not depend on the layout; sums have at most 24 terms."""
    memory = Memory(group)
    random.seed(f"{torch.initial_seed()} {group.rank()}")
    for op in declared():
        # Ops that write to an argument require it to be dense; `symm_buffer` is dense as well.
        if op.overload._schema.is_mutable or op.one_sided or op.name in DENSE:
            continue
        assert op.example is not None
        for dtype in (torch.float32, torch.float64, torch.bfloat16):

            def rand(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(shape).to(dtype)

            leaves, spec = tree_flatten(tuple(op.example(caller(group, rand, sizes))))
            expected = results(op, leaves, spec)
            symmetric = not re.search(SYMMETRIC_ON_ALL, op.name)
            for _ in range(3):
                placed = [
                    memory.place(x, symmetric=symmetric)
                    if isinstance(x, torch.Tensor) and is_real(x) and x.dim() > 0
                    else x
                    for x in leaves
                ]
                found = results(op, placed, spec)
                for got, want in zip(found, expected, strict=True):
                    assert got.dtype == want.dtype, op.name
                    eps = torch.finfo(want.dtype).eps if want.is_floating_point() else 0
                    got, want = got.double(), want.double()
                    # Weights by a random log-sum-exp, and so terms that cancel, may be large.
                    tolerance = 16 * eps * max([1.0, *want.abs().flatten().tolist()])
                    torch.testing.assert_close(got, want, rtol=16 * eps, atol=tolerance)
