"""Direct calls do what torch's callables do, for usual arguments and for all others."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import symm_cp
from symm_cp.native import building
from symm_cp.native import library as libraries
from symm_cp.ops import direct as module
from symm_cp.ops.direct import direct
from symm_cp.testing import Ranks
from tests.faults.strange import ENTRY_POINTS, Op
from tests.ops.calls import CountedFunctions, CountedOps

SCHEMA = (
    "direct_echo(Tensor a, Tensor[] more, Tensor? b=None, int number=7, int? maybe=None, "
    "int[]? numbers=None, ScalarType? dtype=None, float factor=0.5, bool flag=True, "
    "str text='none', Tensor?[]? some=None, ScalarType?[]? dtypes=None, bool[]? flags=None, "
    "str[]? texts=None, *, int last=3) -> (Tensor, Tensor?, Tensor[])"
)
A = torch.ones(2)


class Torchs:
    """Stands in for torch's callable and counts its calls."""

    def __init__(self, op: Any) -> None:
        self.op, self.calls = op, 0
        self._schema = op._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.op(*args, **kwargs)


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    lib = torch.library.Library("symm_mem", "FRAGMENT")
    lib.define(SCHEMA)
    lib.impl("direct_echo", echo, "CompositeExplicitAutograd")
    yield lib
    lib._destroy()


seen: list[tuple[Any, ...]] = []


def echo(a: Any, more: Any, b: Any = None, *rest: Any, **last: Any) -> Any:
    seen.append((rest, last, len(more)))
    if "refused" in rest[6:7]:
        raise ValueError("direct_echo: text is refused")
    return a + 1, None if b is None else b * 2, [tensor - 1 for tensor in more]


@pytest.fixture
def torchs(library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> Torchs:
    stand_in = Torchs(torch.ops.symm_mem.direct_echo.default)
    monkeypatch.setattr(module, "op_of", lambda name: stand_in)
    monkeypatch.setattr(module, "_calls", {})
    return stand_in


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(equal, one, other))
    return bool(one == other)


USUAL: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((A, []), {}),
    "all": ((A, [A, A], A, 1, 2, [3, 4], torch.half, 0.25, False, "text"), {"last": 9}),
    "none": ((A, [], None, 1, None, None, None), {}),
    "tuples": ((A, (A,), None, 1, 2, (3,)), {}),
    "a size": ((A, [], None, 1, 2, A.shape), {}),
    "keywords": ((A, []), {"text": "b", "b": A, "last": -(2**63), "dtype": torch.int8}),
    # Keys composed at run time, as in some dicts, are not the objects of literals in the source.
    "composed keywords": ((A, []), {"".join(("te", "xt")): "b", "".join(("la", "st")): 5}),
    "a parameter": ((torch.nn.Parameter(A), []), {}),
    "lists with none": (
        (A, []),
        {"some": [None, A, None], "dtypes": (torch.half, None, 6), "flags": [True, False]},
    ),
    "lists of texts": ((A, []), {"texts": ["a", ""]}),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_arguments_are_passed_on(torchs: Torchs, name: str) -> None:
    args, kwargs = USUAL[name]
    call = direct("echo")
    seen.clear()
    results = call(*args, **kwargs), torchs.op(*args, **kwargs)
    assert torchs.calls == 0
    assert equal(*results)
    assert equal(*seen)


UNUSUAL: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none is missing": ((), {}),
    "an unknown name": ((A, []), {"other": 1}),
    "given twice": ((A, []), {"a": A}),
    "too many": ((A, [A], A, 1, 2, [3], None, 0.5, True, "text", 3, 4), {}),
    "no tensor": ((1.5, []), {}),
    "none for a tensor": ((None, []), {}),
    "a text for a number": ((A, [A], A, "1"), {}),
    "a bool for a number": ((A, [A], A, True), {}),
    "a number for a bool": ((A, []), {"flag": 1}),
    "a number for a float": ((A, []), {"factor": 2}),
    "a number too large": ((A, []), {"number": 2**63}),
    "a number too large in a list": ((A, []), {"numbers": [1, 2**70]}),
    "a surrogate": ((A, []), {"text": "\udc80"}),
    "a float in a list": ((A, []), {"numbers": [1, 2.5]}),
    "none in a list": ((A, [A, None]), {}),
    "a tensor as a list": ((A, A), {}),
    "a number for an optional tensor": ((A, []), {"some": [None, 1]}),
    "a bool for a dtype": ((A, []), {"dtypes": [torch.half, True]}),
    "a number too large for a dtype": ((A, []), {"dtypes": [2**63]}),
    "a number in a list of bools": ((A, []), {"flags": [True, 1]}),
    "a tensor for a number": ((A, [A], A, torch.tensor(4)), {}),
    "a number in a list of texts": ((A, []), {"texts": ["a", 1]}),
    "a surrogate in a list": ((A, []), {"texts": ["\udc80"]}),
}


def outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str]:
    seen.clear()
    try:
        return function(*args, **kwargs), str(seen)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_arguments_are_torchs(torchs: Torchs, name: str) -> None:
    args, kwargs = UNUSUAL[name]
    ours, theirs = outcome(direct("echo"), args, kwargs), outcome(torchs.op, args, kwargs)
    assert equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]


def _attention(**options: Any) -> Op:
    return Op(
        lambda W: [torch.randn(1, 2, 4, 8) for _ in range(3)],
        lambda t, g: symm_cp.all_gather_attention(*t, group=g, **options),
    )


def slow_calls(group: dist.ProcessGroup) -> dict[str, str]:
    """The ops that public functions leave to torch's callable, by function."""
    balancer = symm_cp.HeadTail(4 * group.size(), group.size())
    calls = ENTRY_POINTS | {
        "balanced": _attention(is_causal=True, load_balancer=balancer),
        "queries apart": _attention(load_balancer=balancer, query_load_balancer=balancer),
        "window": _attention(window_left=2, window_right=1, scale=0.5, softcap=3.0),
        "documents": _attention(cu_seqlens=[0, 3, 4 * group.size()]),
        "prefix": _attention(is_causal=True, prefix_lengths=2),
        "sinks": _attention(sinks=torch.ones(2)),
    }
    slow: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        stand_ins = {}

        def op_of(name: str) -> Torchs:
            stand_ins[name] = Torchs(getattr(torch.ops.symm_mem, name).default)
            return stand_ins[name]

        patch.setattr(module, "op_of", op_of)
        patch.setattr(module, "_calls", {})
        for function, op in calls.items():
            op.call(op.tensors(group.size()), group)
            if left := [name for name, op in stand_ins.items() if op.calls]:
                slow[function] = ", ".join(left)
            stand_ins.clear()
            module._calls.clear()
    return slow


def test_public_functions_make_no_slow_calls(ranks: Ranks) -> None:
    assert ranks.run(2, slow_calls) == [{}, {}]


class Subclass(torch.Tensor):
    pass


def test_subclasses_and_modes_are_torchs(torchs: Torchs) -> None:
    call = direct("echo")
    call(A.as_subclass(Subclass), [])
    call(A, [A.as_subclass(Subclass)])
    assert torchs.calls == 2
    for mode in (CountedFunctions(), CountedOps()):
        with mode:
            call(A, [])
        assert mode.counts
    with FakeTensorMode() as fakes:
        fake = fakes.from_tensor(A)
        assert call(fake, [])[0].shape == fake.shape
    assert torchs.calls == 5


def test_errors_of_the_op(torchs: Torchs) -> None:
    call = direct("echo")
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^direct_echo: text is refused$"):
            call(A, [], text="refused")
    assert equal(call(A, [])[0], A + 1)


@pytest.mark.exhaustive
def test_nothing_is_kept(torchs: Torchs) -> None:
    call, tensors = direct("echo"), [torch.ones(2) for _ in range(3)]
    seen.clear()

    def references() -> list[int]:
        gc.collect()
        return [sys.getrefcount(thing) for thing in (*tensors, "last", None, call)]

    before = references()
    for _ in range(200):
        call(tensors[0], [tensors[1]], tensors[2], last=2)
        outcome(call, (tensors[0], [tensors[1], None], tensors[2]), {"last": 2})
    after = references()
    assert all(abs(now - then) < 100 for then, now in zip(before, after, strict=True))


def test_torch_compiles_the_op_itself() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        assert (
            direct("fused_matmul_all_reduce") is torch.ops.symm_mem.fused_matmul_all_reduce.default
        )


def test_a_call_never_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other ranks would wait for a build, so torch's callables are used, as without headers."""
    monkeypatch.setattr(libraries, "_loaded", [tmp_path / "libsymm_cp.so"])
    monkeypatch.setattr(libraries, "load_glue", building.build_glue)
    monkeypatch.setattr(building, "_build", None)
    monkeypatch.setattr(module, "_calls", {})
    module._glue.cache_clear()
    try:
        assert direct("fused_matmul_all_reduce").__module__ == "symm_cp.ops.spmd"  # in Python
    finally:
        module._glue.cache_clear()
