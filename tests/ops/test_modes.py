"""Ops in the modes of a caller, and after them: what an op keeps must not depend on the mode."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp.ops.attention import tiles as attention_tiles
from tests.ops.calls import OPS, Call, CountedFunctions, CountedOps, Tensors, calls, leaves, trained
from tests.ops.functions import functions


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "dispatch": CountedOps,
    "function": CountedFunctions,
    "device": lambda: torch.device("meta"),
    "deterministic": deterministic,
}


def fresh(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group without workspaces, plans or masks."""
    attention_tiles._band.forget()
    made = dist.new_group(list(range(group.size())))
    assert isinstance(made, dist.ProcessGroup)
    return made


def every_call(group: dist.ProcessGroup) -> dict[str, Call]:
    return calls(group) | functions(group)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(2)
def test_mode_then_training(group: dist.ProcessGroup, mode: str) -> None:
    """Twice in the mode, so that both slots have been used, then training, then the mode again."""
    seed = int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    expected = {name: trained(call) for name, call in every_call(fresh(group)).items()}
    torch.manual_seed(seed)
    ops = every_call(fresh(group))
    wide = {"window_left": 3, "window_right": 2}  # a mask that is kept
    q = torch.randn(1, 1, 20, 4)
    for name, call in ops.items():
        for _ in range(2):
            with MODES[mode]():
                for got, want in zip(call.run(*call.inputs), expected[name][0], strict=True):
                    assert torch.equal(got, want), name
    with MODES[mode]():
        OPS.fused_all_gather_attention(q, q, q, group.group_name, **wide)
    for name, call in ops.items():
        for _ in range(2):
            for ours, theirs in zip(trained(call), expected[name], strict=True):
                for got, want in zip(ours, theirs, strict=True):
                    assert torch.equal(got, want), name
                    assert not got.is_inference()
    given = leaves([q, q, q])
    OPS.fused_all_gather_attention(*given, group.group_name, **wide)[0].sum().backward()
    with MODES[mode]():
        for name, call in ops.items():
            assert torch.equal(call.run(*call.inputs)[0], expected[name][0][0]), name


@pytest.mark.ranks(2)
def test_writes_in_inference_mode(group: dist.ProcessGroup) -> None:
    """Ops that write to an argument, on inference tensors and on others."""
    W, name = group.size(), group.group_name
    for outside in (torch.inference_mode, nullcontext):
        for inside in (torch.inference_mode, nullcontext):
            with outside():
                x, out = torch.ones(2 * W), torch.empty(2 * W)
                part = torch.empty(2)
            context: AbstractContextManager[Any] = inside()
            with context:
                OPS.one_shot_all_reduce_out(x, "sum", name, out)
                OPS.reduce_scatter_out(x, name, False, part)
                OPS.two_shot_all_reduce_(x, "sum", name)
            assert (out == W).all()
            assert (part == W).all()
            assert (x == W).all()


def as_tuple(run: Callable[..., Tensors], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(run(*inputs))


@pytest.mark.ranks(2)
def test_checkpoint(group: dist.ProcessGroup) -> None:
    for reentrant in (False, True):
        for name, call in every_call(group).items():
            expected = trained(call)

            given = leaves(call.inputs)
            run = functools.partial(as_tuple, call.run)
            outputs = checkpoint(run, *given, use_reentrant=reentrant)
            sum(out.square().sum() for out in outputs).backward()
            found = [*(out.detach() for out in outputs), *(t.grad for t in given)]
            for got, want in zip(found, [*expected[0], *expected[1]], strict=True):
                assert torch.equal(got, want), name


@pytest.mark.ranks(2)
def test_other_thread(group: dist.ProcessGroup) -> None:
    """Forward passes in a thread, first in inference mode; backward passes in this thread."""
    for name, call in every_call(group).items():
        expected = trained(call)
        given, outputs = leaves(call.inputs), []

        def work(call: Any = call, given: Any = given, outputs: Any = outputs) -> None:
            with torch.inference_mode():
                call.run(*call.inputs)
            outputs.extend(call.run(*given))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        grads = torch.autograd.grad(sum(out.square().sum() for out in outputs), given)
        for got, want in zip([*outputs, *grads], [*expected[0], *expected[1]], strict=True):
            assert torch.equal(got, want), name


@pytest.mark.ranks(2)
def test_fake_tensors(group: dist.ProcessGroup) -> None:
    """Fake results have the shapes, strides and dtypes of real ones, forward and backward."""
    for dtype in (torch.float32, torch.bfloat16):
        for name, call in calls(group, dtype).items():
            outputs, grads = trained(call)
            # Tables of integers stay as they are.
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                inputs = [mode.from_tensor(t).requires_grad_() for t in call.inputs]
                found = trained(call, inputs)
            for got, want in zip([*found[0], *found[1]], [*outputs, *grads], strict=True):
                assert (got.shape, got.dtype) == (want.shape, want.dtype), name
                assert got.stride() == want.stride(), name
    symm_cp.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 2), group=group)
