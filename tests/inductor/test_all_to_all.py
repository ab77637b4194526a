"""Torch's all-to-alls next to projections: which are fused, and the numbers."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.inductor.options import Options
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, in_turns, some
from tests.inductor.graphs import compare, compare_code, run, through_passes, without_kernels
from tests.inductor.ulysses_graphs import OTHERS, PROGRAMS, D, E, Ordered, functional_to_heads

B, s = 2, 3


def whole_inputs(world_size: int, rows_first: bool, train: bool) -> list[torch.Tensor]:
    """Draws inputs of the whole sequence, the same on all ranks."""
    H, S = 2 * world_size, s * world_size
    x = (S, B, D) if rows_first else (B, S, D)
    shapes: list[Any] = [x, *[(H * E, D)] * 3, (D, H * E), (H * E,)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [tensor.requires_grad_(train) for tensor in tensors]


def part(x: torch.Tensor, group: dist.ProcessGroup, rows_first: bool) -> torch.Tensor:
    chunk = x.detach().chunk(group.size(), 0 if rows_first else 1)[group.rank()]
    return chunk.clone(memory_format=torch.contiguous_format)


def check_ops(compiled: Any, rotated: bool, train: bool) -> None:
    """Queries, keys and values share one op; if rotated, only the values are fused."""
    count = {
        op: sum(op in ran for ran in compiled.ops)
        for op in ("project_to_heads", "project_from_heads", "all_to_all")
    }
    left = 2 * (1 + train) if rotated else 0
    each = 1 + train
    want = {"project_to_heads": each, "project_from_heads": each, "all_to_all": left}
    assert count == want, (count, str(compiled.report))
    assert len(compiled.report.fused) == (2 if rotated else 4) * each, str(compiled.report)
    assert len(compiled.report.left) == left, str(compiled.report)


ON_TWO = [(2, name, True) for name in PROGRAMS]
# On one rank, a single chunk is concatenated, which the passes do not follow.
REST = [
    (W, name, W != 3) for name, W in in_turns(PROGRAMS, (4, 3, 1)) if (W, name) != (1, "chunks")
]


@pytest.mark.parametrize(("world_size", "name", "train"), some(*ON_TWO[:1], of=[*ON_TWO, *REST]))
@pytest.mark.ranks
def test_attention_by_heads(
    group: dist.ProcessGroup, world_size: int, name: str, train: bool
) -> None:
    program, W = PROGRAMS[name], group.size()
    whole = whole_inputs(W, program.rows_first, train)
    results, grads = run(functools.partial(program, None), whole)
    of = functools.partial(part, group=group, rows_first=program.rows_first)
    inputs = [of(whole[0]).requires_grad_(train), *whole[1:]]
    compiled = through_passes(functools.partial(program, group), inputs, Options())
    torch.testing.assert_close(compiled.results[0], of(results[0]))
    if train:
        torch.testing.assert_close(compiled.grads[0], of(grads[0]))
        for got, want in zip(compiled.grads[1:], grads[1:], strict=True):
            dist.all_reduce(got, group=group)
            torch.testing.assert_close(got, want)
    check_ops(compiled, program.rotated, train)


def in_any_order(group: dist.ProcessGroup, seed: int) -> None:
    rng = random.Random(seed)

    def order(dims: str) -> str:
        return "".join(rng.sample(dims, len(dims)))

    W, h, e = group.size(), 2, 5
    for _ in range(8):
        program = Ordered(
            {"W": W, "B": B, "s": s, "h": h, "E": e},
            (order("BshE"), order("BshE")),
            (order("WBshE"), order("WBshE")),
            rng.randrange(4),
        )
        shapes = (B, s, D), (W * h * e, D), (4, W * h * e)
        inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        compiled = compare(functools.partial(program, group), inputs)
        # In the backward pass a gradient may be a product with features as rows: not fused.
        fused = [decision.fused_into for decision in compiled.report.decisions]
        assert fused[:2] == ["project_to_heads", "project_from_heads"], (program, fused)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [3])
def test_dimensions_in_any_order(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, in_any_order, int(torch.randint(1 << 30, ())), timeout=300)


def lengths(group: dist.ProcessGroup) -> None:
    """The number of positions is dynamic."""
    program = functools.partial(PROGRAMS["scatter and gather"], group)
    weights = whole_inputs(group.size(), False, True)[1:]
    torch._dynamo.reset()
    with without_kernels():
        compiled = torch.compile(program, options=symm_cp.inductor.compile_options())
        for length in (3, 5):
            x = torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)
            results, grads = run(program, [x, *weights])
            torch._dynamo.mark_dynamic(x, 1)
            got, got_grads = run(compiled, [x, *weights])
            torch.testing.assert_close([*got, *got_grads], [*results, *grads])
    report = symm_cp.inductor.explain(program, x, *weights)
    assert len(report.fused) == 8, str(report)


@pytest.mark.exhaustive
def test_lengths_that_are_not_known(ranks: Ranks) -> None:
    ranks.run(2, lengths, timeout=300)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.ranks(2)
def test_under_autocast(group: dist.ProcessGroup, name: str) -> None:
    """Compiled results are about as far from float64 results as eager ones."""
    program = functools.partial(PROGRAMS[name], group)
    whole = whole_inputs(group.size(), PROGRAMS[name].rows_first, True)
    exact = [(0.4 * t).detach().requires_grad_() for t in whole]  # no weight is near to 1
    exact[0] = part(exact[0], group, PROGRAMS[name].rows_first).requires_grad_()
    inputs = [t.detach().float().requires_grad_() for t in exact]
    with torch.autocast("cpu", torch.bfloat16):
        results, grads = run(program, inputs)
        compiled = through_passes(program, inputs, Options())
    # Each projection has an op of its own, as autocast casts the input for each.
    left = 4 if PROGRAMS[name].rotated else 0
    assert len(compiled.report.left) == left, str(compiled.report)
    eager = [*results, *grads]
    want = [each for part in run(program, exact) for each in part]
    for got, other, right in zip([*compiled.results, *compiled.grads], eager, want, strict=True):
        assert got.dtype == other.dtype
        least = 1e-2 * float(right.norm())
        assert (got - right).norm() <= 2 * (other - right).norm() + least


def stays(group: dist.ProcessGroup) -> None:
    for fn, reason in OTHERS.items():
        shapes = [(2, 4, D), (4 * E, D), (D, 4 * E)]
        inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        last = 3 if fn.__name__ in ("positions", "ranks_inside", "summed") else 2
        for unused in inputs[last:]:
            unused.requires_grad_(False)
        compiled = compare(functools.partial(fn, group), inputs)
        first = compiled.report.decisions[0]
        assert first.fused_into is None, (fn.__name__, str(compiled.report))
        assert first.critical, fn.__name__
        assert reason in first.reason, (fn.__name__, str(compiled.report))


@pytest.mark.exhaustive
def test_other_exchanges_stay_as_they_are(ranks: Ranks) -> None:
    ranks.run(2, stays, timeout=300)


@pytest.mark.ranks(2)
def test_results_do_not_share_memory(group: dist.ProcessGroup) -> None:
    """Results keep separate memory: overwriting one does not change the others."""

    def two(x: torch.Tensor, w: torch.Tensor) -> Any:
        heads = functional_to_heads(F.linear(x, w).unflatten(2, (-1, E)), group)
        return heads.contiguous(), heads.transpose(1, 2).contiguous(), heads.exp()

    inputs = [torch.randn(2, 3, D), torch.randn(4 * E, D)]
    compiled = compare(two, inputs)
    assert [d.fused_into for d in compiled.report.decisions] == ["project_to_heads"]
    compiled.results[0].zero_()
    torch.testing.assert_close(compiled.results[1:], run(two, inputs)[0][1:])


@exhaustive
@pytest.mark.ranks(2)
def test_memory_of_the_caller(group: dist.ProcessGroup) -> None:
    """Collectives write to tensors that the caller passed in, and the program then reads these."""
    W = group.size()

    def exchanged(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        heads = (x @ w).unflatten(1, (W, -1)).transpose(0, 1).contiguous()
        dist.all_to_all_single(out, heads, group=group)
        return out.flatten(0, 1).exp()

    def multiplied(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(out, x.sin().unflatten(0, (W, -1)), group=group)
        return out.transpose(0, 1).flatten(1) @ w

    def gathered(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dist.all_gather_into_tensor(out, x, group=group)
        return out @ w

    cases = [
        (exchanged, (W, 4, 2), (D, 2 * W), "project_to_heads"),
        (multiplied, (W, 4 // W, D), (W * D, 5), "project_from_heads"),
        (gathered, (4 * W, D), (D, 5), "fused_all_gather_matmul"),
    ]
    for fn, out, weight, fused in cases:
        inputs = [torch.zeros(out), torch.randn(4, D), torch.randn(weight)]
        changed = [tensor.clone() for tensor in inputs]
        want, _ = run(fn, changed)
        # Inductor's graphs write to arguments; other compilers leave that to their caller.
        report = symm_cp.inductor.explain(fn, *(tensor.clone() for tensor in inputs))
        assert [d.fused_into for d in report.decisions] == [fused], str(report)
        torch._dynamo.reset()
        with without_kernels():
            options = symm_cp.inductor.compile_options()
            got = torch.compile(fn, options=options)(*inputs)
        torch.testing.assert_close([got, *inputs], [*want, *changed])


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_options(group: dist.ProcessGroup) -> None:
    program = functools.partial(PROGRAMS["functional"], group)
    inputs = [of.detach() for of in whole_inputs(group.size(), False, False)]
    inputs[0] = part(inputs[0], group, False)
    for options, reason in (
        (Options(context_parallel=False), "context_parallel is off"),
        (Options(min_flops=1e9), "operations is too small (min_flops=1e+09)"),
    ):
        report = through_passes(program, inputs, options).report
        assert not report.fused
        assert [reason in d.reason for d in report.left] == [True] * 4, str(report)
    # Three products together are above this minimum, a single one is below.
    flops = 2.0 * B * s * D * 2 * group.size() * E
    report = through_passes(program, inputs, Options(min_flops=2 * flops)).report
    assert [d.fused_into for d in report.fused] == ["project_to_heads"] * 3, str(report)


def compiles(group: dist.ProcessGroup) -> None:
    for name in ("functional", "positions first"):
        program = PROGRAMS[name]
        whole = whole_inputs(group.size(), program.rows_first, True)
        inputs = [part(whole[0], group, program.rows_first).requires_grad_(), *whole[1:]]
        fn = functools.partial(program, group)
        compare_code(fn, inputs)
        report = symm_cp.inductor.explain(fn, *inputs)
        assert len(report.fused) == 8, str(report)
        for op in ("project_to_heads", "project_from_heads"):
            assert f"fused into {op}: with the projections next to it" in report.text()


@pytest.mark.exhaustive
def test_inductor_and_explain(ranks: Ranks) -> None:
    ranks.run(2, compiles, timeout=300)
