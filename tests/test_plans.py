"""Plans on CPU: calls that are recorded once and then made without Python."""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import symm_cp
from symm_cp import native
from symm_cp.cuda.plans import refusals
from symm_cp.ops.call import Call
from symm_cp.ops.common import group_of
from symm_cp.ops.op import BackwardOp, NoGradient, Op, declared
from symm_cp.ops.registration import register_one
from tests.exhaustive import some
from tests.ops.calls import caller, calls, completed, leaves, python_calls

OPS = torch.ops.symm_mem

#: Ops whose examples stay in Python, and a part of the reason.
IN_PYTHON = {"_same_on_all_ranks": "other calls than ops"}


def runs() -> int:
    """The number of calls made by plans since this was last called."""
    return int(native.load().symm_cp_plans_run())


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def assert_same(results: Any, expected: Any, case: object) -> None:
    """Checks bits, strides and dtypes."""
    for one, other in zip(tensors_of(results), tensors_of(expected), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        same = one.contiguous().view(torch.uint8) if one.dim() else one.view(1).view(torch.uint8)
        as_bytes = other.contiguous() if other.dim() else other.view(1)
        assert torch.equal(same, as_bytes.view(torch.uint8)), case


def example(op: Op, group: dist.ProcessGroup, seed: int) -> Callable[[], Any]:
    """Returns a call of an op with new tensors of the same values each time."""
    assert op.example is not None

    def call() -> Any:
        torch.manual_seed(seed)
        args, kwargs = op.example(caller(group))  # type: ignore[misc]
        return completed(op, op.overload(*args, **kwargs))

    return call


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_every_backward_pass_is_planned(group: dist.ProcessGroup, world_size: int) -> None:
    """Backward passes that are ops run no Python once these are planned."""
    backward_ops = [op.name for op in declared() if isinstance(op.gradient, BackwardOp)]
    for name, call in calls(group).items():
        if name not in backward_ops:
            continue
        given = leaves(call.inputs)
        for _ in range(5):
            outputs = call.run(*given)
            grads = [torch.ones_like(out) for out in outputs]
            seen = python_calls(functools.partial(torch.autograd.backward, outputs, grads))
        assert seen == [], (name, refusals())


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_every_op_is_planned(group: dist.ProcessGroup, world_size: int) -> None:
    """The first call is Python's, the second one is recorded, the third one is the plan's."""
    seed = random.randrange(1 << 30)
    in_python: dict[str, str] = {}
    for op in declared():
        if op.cpu_only or op.native or op.one_sided:
            continue
        call = example(op, group, seed)
        native.drop_plans()
        expected = call()
        runs()
        assert_same(call(), expected, f"{op.name}, recorded")
        for _ in range(2):
            assert_same(call(), expected, f"{op.name}, planned")
        if not runs():
            in_python[op.name] = refusals()[op.full_name]
            continue
        args, kwargs = op.example(caller(group))  # type: ignore[misc]
        assert python_calls(functools.partial(op.overload, *args, **kwargs)) == [], op.name
    expected_in_python = IN_PYTHON if group.size() > 1 else {}
    assert in_python.keys() == expected_in_python.keys(), in_python
    for name, reason in expected_in_python.items():
        assert reason in in_python[name], in_python[name]


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
@pytest.mark.ranks
def test_ranks_may_differ_in_what_is_planned(group: dist.ProcessGroup, world_size: int) -> None:
    """Whether a rank's call is unplanned, recorded or planned is nothing to its peers."""
    seed = random.randrange(1 << 30)
    own = random.Random(f"{seed} {group.rank()}")
    together = random.Random(seed)
    library = native.load()
    ops = [op for op in declared() if not (op.cpu_only or op.native or op.one_sided)]
    expected: dict[str, Any] = {}
    for number in range(60):
        op = together.choice(ops)
        how = own.choice(("", "", "", "paused", "dropped"))
        if how == "dropped":
            native.drop_plans()
        if how == "paused":
            library.symm_cp_plans_pause()
        try:
            result = example(op, group, seed)()
        finally:
            if how == "paused":
                library.symm_cp_plans_resume()
        assert_same(result, expected.setdefault(op.name, result), f"{number}: {op.name} {how}")


@pytest.mark.ranks(2)
def test_what_changes_between_calls_is_seen(group: dist.ProcessGroup) -> None:
    """Everything that may differ between two calls changes, one thing after the other."""
    seed = random.randrange(1 << 30)
    generator = random.Random(f"{seed} {group.rank()}")
    torch.manual_seed(seed)
    base, wide = torch.randn(8, 16), torch.randn(16, 20)

    def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
        return memory[by:].view(tensor.shape).copy_(tensor)

    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.clone(),
        lambda x: x.t().contiguous().t(),
        lambda x: moved(x, 1),
        lambda x: moved(x, 16),
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: torch.cat([x, x], 0)[x.shape[0] :],
    ]
    for turn in range(80):
        # Strides and alignment are this rank's own.
        x, w = generator.choice(layouts)(base), generator.choice(layouts)(wide)
        out = symm_cp.all_gather_matmul(x, w, group=group)
        torch.testing.assert_close(out, torch.cat([base] * group.size()) @ wide)
        products = symm_cp.all_gather_matmul(x, [w, w], group=group)
        assert torch.equal(products[0], products[1])
        square = generator.choice(layouts)(base[:, :8])
        both = symm_cp.all_gather_matmul(square, square, group=group)  # aliases
        torch.testing.assert_close(both, torch.cat([base[:, :8]] * group.size()) @ base[:, :8])
        dtype = (torch.float32, torch.bfloat16, torch.float64)[turn % 3]
        assert symm_cp.all_gather_matmul(x.to(dtype), w.to(dtype), group=group).dtype == dtype
        if turn % 2:
            gathered, _ = symm_cp.all_gather_matmul(x, w, group=group, return_gathered=True)
            assert torch.equal(gathered, torch.cat([base] * group.size()))


MISUSES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "aten::mul uses a part of a free argument": lambda x, n: x[-1:] * 2,
    "aten::mul uses a part of a tensor whose size may vary": lambda x, n: (x + 1)[-1:] * 2,
    "an exchange of a tensor whose size may vary": lambda x, n: x.sum(0, keepdim=True),
    "no op takes a free number": lambda x, n: torch.full((1, 3), float(n)),
}


@pytest.mark.ranks(2)
def test_plans_bake_nothing_of_free_arguments(group: dist.ProcessGroup) -> None:
    """Calls whose work would depend on free arguments that the plan does not pass on."""
    for number, (reason, work) in enumerate(MISUSES.items()):

        def kernel(x: torch.Tensor, n: int, group_name: str, work: Any = work) -> torch.Tensor:
            return Call("free", group_of(group_name)).all_gather(work(x, n))

        op = Op(
            name=f"free_{number}", namespace="tests", fake=kernel, kernel=kernel,
            schema="(Tensor x, int n, str group_name) -> Tensor", gradient=NoGradient(""),
            free={"x": 0, "n": None},
        )  # fmt: skip
        if not hasattr(torch.ops.tests, op.name):
            register_one(op)
        runs()
        for n in range(2, 8):
            x = torch.randn(n, 3)
            want = torch.cat([torch.empty(1, 3)] * group.size())
            dist.all_gather_into_tensor(want, work(x, n), group=group)
            assert torch.equal(op.overload(x, n, group.group_name), want)
        assert runs() == 0
        assert refusals()[op.full_name] == reason


@pytest.mark.ranks(2)
def test_freed_memory_is_refused(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    for _ in range(3):
        expected = symm_cp.all_gather_matmul(x, w, group=group)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed or resized"):
        symm_cp.all_gather_matmul(freed, w, group=group)
    assert torch.equal(symm_cp.all_gather_matmul(x, w, group=group), expected)


@pytest.mark.ranks(2)
def test_plans_keep_no_tensor_alive(group: dist.ProcessGroup) -> None:
    storages = []
    for _ in range(4):
        x, w = torch.randn(4, 6), torch.randn(6, 5)
        symm_cp.all_gather_matmul(x, w, group=group, return_gathered=True)
        storages.append(weakref.ref(x))
        del x, w
    gc.collect()
    assert [storage() for storage in storages] == [None] * 4


@pytest.mark.ranks(2)
def test_threads_run_plans_at_once(group: dist.ProcessGroup) -> None:
    """Calls with the same arguments on two groups, in a thread each."""
    groups = [dist.new_group(list(range(group.size()))) for _ in range(2)]
    errors: list[BaseException] = []

    def work(own: dist.ProcessGroup, seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            x, w = (torch.randn(4, 4, generator=generator) for _ in "xw")
            whole = torch.cat([x] * group.size()) @ w
            for _ in range(200):
                torch.testing.assert_close(symm_cp.all_gather_matmul(x, w, group=own), whole)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own, n)) for n, own in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in groups:
        dist.destroy_process_group(own)
    assert not errors, errors
