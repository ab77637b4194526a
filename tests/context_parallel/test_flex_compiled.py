"""`torch.compile` of `flex_attention` within `context_parallel`: one op, against one process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

import symm_cp
from tests.context_parallel.common import (
    CLOSE,
    Tensors,
    assert_all_close,
    attention,
    mesh_of,
    whole,
)
from tests.exhaustive import some

WORLD_SIZES = pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
HEADS, DOCUMENT = 4, 20


def slopes() -> torch.Tensor:
    return torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64, requires_grad=True)


def alibi(slopes: torch.Tensor) -> Callable[..., torch.Tensor]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def documents(length: int, *, size: int = DOCUMENT) -> BlockMask:
    ids = torch.arange(length) // size

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return create_block_mask(mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=16)


def dense(
    given: Tensors, mask: BlockMask | None, bias: torch.Tensor | None, upstream: torch.Tensor
) -> Tensors:
    """Output, log-sum-exp, and the gradients of queries, keys, values and slopes."""
    q, k, v = (t.detach().double().requires_grad_() for t in given[:3])
    learnt = slopes() if bias is None else bias.detach().clone().requires_grad_()
    at = torch.arange(q.shape[2])
    added = None if bias is None else learnt[:, None, None] * (at - at[:, None])
    seen = None if mask is None else mask.mask_mod(at[0], at[0], at[:, None], at)
    out, lse = attention(q, k, v, seen, bias=added)
    grads = torch.autograd.grad(out, (q, k, v, learnt), upstream, allow_unused=True)
    return [out.detach(), lse.detach(), *(g for g in grads if g is not None)]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # torch warns once if CUDA's compiler is there without a GPU, whatever is compiled.
        if record.name != "torch.utils.cpp_extension":
            self.found.append(record.getMessage())


@contextmanager
def one_graph(*, breaks: int = 0) -> Iterator[None]:
    """Checks that there are `breaks` graph breaks, no warning and no message."""
    records = _Records()
    logging.getLogger("torch").addHandler(records)
    before = sum(counters["graph_break"].values())
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # A region ignores this warning (guards.py); the line above has undone that.
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
            yield
    finally:
        logging.getLogger("torch").removeHandler(records)
    # Importing torch's modules gives deprecation warnings.
    found = [str(w.message) for w in caught if w.category is not DeprecationWarning]
    assert not found, found
    assert not records.found, records.found
    assert sum(counters["graph_break"].values()) - before == breaks, dict(counters["graph_break"])


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


class Problem:
    """One rank's part of an attention, and the results of one process."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        length: int,
        *,
        balancer: symm_cp.LoadBalancer | None = None,
        kv_heads: int = HEADS,
        scored: bool = True,
        masked: bool = True,
        dtype: torch.dtype = torch.float64,
        reset: bool = True,
        document: int = DOCUMENT,
    ) -> None:
        if reset:
            torch._dynamo.reset()
        self.group, self.length, self.balancer = group, length, balancer
        self.rows = (balancer or symm_cp.HeadTail(length, group.size())).positions(group.rank())
        given = [t.to(dtype) for t in whole(length, length, kv_heads=kv_heads)]
        self.mask = documents(length, size=document) if masked else None
        self.slopes = slopes() if scored else None
        self.score_mod = alibi(self.slopes) if self.slopes is not None else None
        self.expected = dense(given, self.mask, self.slopes, given[3].double())
        self.q, self.k, self.v = (t[:, :, self.rows].requires_grad_() for t in given[:3])
        self.upstream = given[3][:, :, self.rows]

    def region(self) -> Any:
        return symm_cp.context_parallel(mesh_of(self.group), load_balancer=self.balancer)

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.score_mod, self.mask

    def check(
        self, out: torch.Tensor, lse: torch.Tensor | None = None, *, tolerance: float = 1e-9
    ) -> None:
        """Checks the output, the log-sum-exp and all gradients."""
        inputs = [t for t in (self.q, self.k, self.v, self.slopes) if t is not None]
        grads = list(torch.autograd.grad(out, inputs, self.upstream))
        close = {"rtol": tolerance, "atol": tolerance}
        expected = [t[:, :, self.rows] for t in self.expected[:5]]
        if self.slopes is not None:
            dist.all_reduce(grads[3], group=self.group)
            torch.testing.assert_close(grads[3], self.expected[5], **close)
        found = [out.detach(), *grads[:3]]
        for got, want in zip(found, [expected[0], *expected[2:]], strict=True):
            torch.testing.assert_close(got.double(), want, **close)
        if lse is not None:
            torch.testing.assert_close(lse.detach().double(), expected[1], **close)


# --- the function itself ---------------------------------------------------------------------


@WORLD_SIZES
@pytest.mark.ranks
def test_compiled_function(group: dist.ProcessGroup, world_size: int) -> None:
    W = group.size()
    balancer = symm_cp.Sequential(48 * W, W)
    for scored, masked in ((True, True), (False, True), (True, False), (False, False)):
        problem = Problem(
            group, 48 * W, balancer=None if masked else balancer, scored=scored, masked=masked
        )
        fn = torch.compile(flex_attention, backend="aot_eager")
        with one_graph(), problem.region():
            out, lse = fn(*problem.arguments(), return_lse=True)
        problem.check(out, lse)


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_heads_that_share_keys_and_bfloat16(group: dist.ProcessGroup) -> None:
    length = 32 * group.size()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.bfloat16, 0.05)):
        problem = Problem(group, length, kv_heads=2, dtype=dtype)
        fn = torch.compile(flex_attention, backend="aot_eager")
        with one_graph(), problem.region():
            out, aux = fn(*problem.arguments(), enable_gqa=True, return_aux=AuxRequest(lse=True))
            assert out.dtype == dtype
            problem.check(out, aux.lse, tolerance=tolerance)


# --- in a compiled module --------------------------------------------------------------------


class Attention(nn.Module):
    """Slopes and masks that are computed in the compiled code, and around it."""

    def __init__(self, mask: BlockMask | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.log_slopes = nn.Parameter(slopes().detach().clamp(min=0.01).log())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flex_attention(q * 1.0, k, v, alibi(self.log_slopes.exp()), self.mask)
        return out * 2.0


@pytest.mark.exhaustive
@WORLD_SIZES
@pytest.mark.ranks
def test_compiled_module(group: dist.ProcessGroup, world_size: int) -> None:
    backend = "inductor" if world_size == 2 else "aot_eager"
    problem = Problem(group, 40 * group.size())
    module = Attention(problem.mask)
    bias = module.log_slopes.detach().exp()
    given = whole(problem.length, problem.length)
    want = dense(given, problem.mask, bias, 2 * given[3])
    fn = torch.compile(module, fullgraph=True, backend=backend)
    with one_graph(), problem.region():
        out = fn(problem.q, problem.k, problem.v)
    inputs = (problem.q, problem.k, problem.v, module.log_slopes)
    *grads, of_slopes = torch.autograd.grad(out, inputs, problem.upstream)
    dist.all_reduce(of_slopes, group=group)
    expected = [2 * want[0], *want[2:5]]
    assert_all_close([out.detach(), *grads], [t[:, :, problem.rows] for t in expected])
    torch.testing.assert_close(of_slopes, want[5] * bias, **CLOSE)


# --- one function in several places ----------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_one_function_in_and_out_of_contexts(group: dist.ProcessGroup) -> None:
    W = group.size()
    length = 32 * W
    sequential = symm_cp.Sequential(length, W)
    problems = [Problem(group, length), Problem(group, length, balancer=sequential)]
    single = dist.new_subgroups(1, group=group)[0]

    def doubled(*arguments: Any) -> torch.Tensor:
        return 2 * flex_attention(*arguments)

    alone = [t.detach() for t in whole(1, 32)[:3]]
    local = documents(32)
    by_itself = 2 * dense([*alone, alone[0]], local, None, alone[0])[0]
    fn = torch.compile(doubled, fullgraph=True, backend="aot_eager")

    def check(problem: Problem) -> None:
        out = fn(*problem.arguments()).detach()
        torch.testing.assert_close(out, 2 * problem.expected[0][:, :, problem.rows], **CLOSE)

    def check_alone() -> None:
        torch.testing.assert_close(fn(*alone, None, local), by_itself, **CLOSE)

    for _ in range(2):
        check_alone()
        for problem in problems:
            with problem.region():
                check(problem)
                with ThreadPoolExecutor(1) as other:  # another thread has no region
                    other.submit(check_alone).result()
        with problems[0].region():
            with problems[1].region():
                check(problems[1])
            check(problems[0])
            with symm_cp.context_parallel(single):
                check_alone()
    before = graphs()
    with problems[0].region():
        fn(*problems[0].arguments())
    assert graphs() == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", some(None, of=[True, None]))
@pytest.mark.ranks(2)
def test_other_lengths(group: dist.ProcessGroup, dynamic: bool | None) -> None:
    W = group.size()
    fn = None
    for step, local in enumerate((16, 24, 40, 32)):
        problem = Problem(group, local * W, reset=fn is None)
        fn = fn or torch.compile(
            flex_attention, backend="aot_eager", dynamic=dynamic, fullgraph=True
        )
        with one_graph(), problem.region():
            problem.check(fn(*problem.arguments()))
        if step == 1:
            before = graphs()
    assert graphs() == before


@WORLD_SIZES
@pytest.mark.ranks
def test_style(group: dist.ProcessGroup, world_size: int) -> None:
    problem = Problem(group, 32 * group.size())

    class Plain(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flex_attention(q, k, v, problem.score_mod, problem.mask)

    style = symm_cp.ContextParallel(2, symm_cp.ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Plain(), mesh_of(group), style)
    fn = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with one_graph():
        problem.check(fn(problem.q, problem.k, problem.v))
    problem.check(attention(problem.q, problem.k, problem.v))


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_context_entered_in_compiled_code(group: dist.ProcessGroup) -> None:
    problem = Problem(group, 32 * group.size())
    mesh = mesh_of(group)

    def attend(*arguments: Any) -> torch.Tensor:
        with symm_cp.context_parallel(mesh):
            return flex_attention(*arguments)

    problem.check(torch.compile(attend, backend="aot_eager")(*problem.arguments()))


@pytest.mark.ranks(2)
def test_checkpoints_in_compiled_code(group: dist.ProcessGroup) -> None:
    length = 32 * group.size()
    problem = Problem(group, length, scored=False, document=length)  # a causal mask

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=problem.mask)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for attend in (flex, sdpa):
        torch._dynamo.reset()  # else Dynamo skips code that it once failed to compile

        @torch.compile(backend="aot_eager")
        def step(*inputs: torch.Tensor, attend: Any = attend) -> torch.Tensor:
            return checkpoint(attend, *inputs, use_reentrant=False)

        with problem.region():
            problem.check(step(problem.q, problem.k, problem.v))


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_refuses_as_in_eager_mode(group: dist.ProcessGroup) -> None:
    problem = Problem(group, 32 * group.size())
    q, k, v = problem.q, problem.k, problem.v
    fn = torch.compile(flex_attention, backend="aot_eager")
    with problem.region():
        with pytest.raises(ValueError, match="must be that of the whole sequence"):
            fn(q, k, v, block_mask=documents(32))
        with pytest.raises(NotImplementedError, match="max_scores"):
            fn(q, k, v, return_aux=AuxRequest(max_scores=True))
        with pytest.raises(ValueError, match="pass a load_balancer, which knows the length"):
            fn(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])
        # The refused calls leave no trace.
        problem.check(fn(*problem.arguments()))
    style = symm_cp.ContextParallel(2, symm_cp.ContextParallel.AttentionType.SDPA)
    attention = parallelize_module(Attention(problem.mask), mesh_of(group), style)
    with pytest.raises(RuntimeError, match="the module called flex_attention"), problem.region():
        torch.compile(attention, backend="aot_eager")(q, k, v)
