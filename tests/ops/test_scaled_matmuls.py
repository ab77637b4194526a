"""Fused matmuls of float8 CPU tensors: by Python, recorded, and replayed without Python."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils._pytree import tree_leaves

import symm_cp
from symm_cp import native, tuning
from symm_cp.ops.matmul.scaled_mm import torch_scales_rows_on_cpu
from symm_cp.tensors.shards import Split
from symm_cp.testing import Ranks
from tests import reference
from tests.exhaustive import pairs, some
from tests.ops.calls import python_calls
from tests.ops.refusals import check_disagreements

OPS = torch.ops.symm_mem
E4 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16, E4)
#: A's scale: one number, one for each row of this rank, or of all ranks.
SCALES = ("tensor", "sharded", "replicated")
KERNELS = {
    "_all_gather_scaled_matmul",
    "_scaled_matmul_scattered",
    "_scaled_matmul_all_reduce",
}


def lengths(group: dist.ProcessGroup, uneven: bool) -> list[int]:
    return [(2, 0, 3, 1)[r] if uneven else 3 for r in range(group.size())]


def by_plan(run: Callable[[], object]) -> bool:
    """Makes calls until they have a plan; returns whether the last one ran no kernel in Python.

    All results have the same bits. The second call is recorded; in a new group the third.
    """
    results = [run() for _ in range(3)]
    in_python = KERNELS & set(python_calls(lambda: results.append(run())))
    first, *others = map(tree_leaves, results)
    for other in others:
        for found, expected in zip(other, first, strict=True):
            assert same_bits(found, expected)
    return not in_python


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    as_bytes = (each.contiguous().view(torch.uint8) for each in (found, expected))
    layouts = ((each.shape, each.stride(), each.dtype) for each in (found, expected))
    return torch.equal(*as_bytes) and len(set(layouts)) == 1


def float8(*shape: int, dtype: torch.dtype = E4) -> torch.Tensor:
    return torch.randn(shape).clamp(-3, 3).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.5


def check_result(actual: torch.Tensor, exact: reference.Expected, divisor: float) -> None:
    """Results in float8 are divided, clamped to the range of float8, and rounded once."""
    if actual.dtype != E4:
        exact.check(actual)
        return
    info = torch.finfo(E4)
    expected = (exact.value / divisor).clamp(info.min, info.max)
    # The sums before are in float32: of numbers up to 1000, in 16 steps.
    torch.testing.assert_close(actual.double(), expected, rtol=info.eps, atol=1e-3 + info.eps / 64)


def gathers(
    group: dist.ProcessGroup, dtype: torch.dtype, dim: int, uneven: bool, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)  # every rank draws the data of all ranks
    rank, last = group.rank(), dim == 2
    split = Split(tuple(lengths(group, uneven)), dim)
    shards = [float8(*split.shape_of(r, [2, 3, 16])) for r in range(group.size())]
    inner = split.length if last else 16
    weights = [float8(n, inner).t() for n in (4, 1)]
    b_scales = [scales(1, 4), scales()]
    biases = [None, torch.randn(1)]
    result_scale = torch.tensor(2.0) if dtype == E4 else None
    full = scales() if kind == "tensor" else scales(*split.whole_shape([2, 3, 1])[:-1], 1)
    scale = split.of(rank, full) if kind == "sharded" and not last else full
    shard = shards[rank]
    whole, exact = reference.scaled_all_gather_matmul(shards, full, weights, b_scales, dim, biases)

    def run() -> Any:
        return symm_cp.scaled_all_gather_matmul(
            shard, weights, scale, b_scales, gather_dim=dim, group=group, bias=biases,
            result_scale=result_scale, out_dtype=dtype, sizes=split.sizes if uneven else None,
        )  # fmt: skip

    for algorithm in (None, "shards"):
        with tuning.forced(algorithm):
            assert by_plan(run)
            gathered, products = run()
        assert torch.equal(gathered.float(), whole.float()), algorithm
        for product, expected in zip(products, exact, strict=True):
            assert product.dtype == dtype
            check_result(product, expected, 2.0)


def scatters(
    group: dist.ProcessGroup, dtype: torch.dtype, dim: int, uneven: bool, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    rank, size, last = group.rank(), group.size(), dim == 2
    split = Split(tuple(lengths(group, uneven)), dim)
    columns = split.length if last else 4
    shape = [2, 3, 16] if last else split.whole_shape([2, 3, 16])
    bias = torch.randn(columns) if seed % 2 else None
    result_scale = torch.tensor(2.0) if dtype == E4 else None
    reduce_op = "avg" if seed % 3 == 0 else "sum"
    lefts = [float8(*shape) for _ in range(size)]
    rights = [float8(columns, 16).t() for _ in range(size)]
    rows, by_row = shape[:-1], kind != "tensor"
    left_scales = [scales(*rows, 1) if by_row else scales() for _ in range(size)]
    by_column = kind != "sharded"
    right_scales = [scales(1, columns) if by_column else scales() for _ in range(size)]
    total = reference.scaled_matmul_all_reduce(
        lefts, left_scales, rights, right_scales, reduce_op, bias
    )
    exact = total.parts(split.sizes, dim)[rank]
    own_scales = left_scales[rank], right_scales[rank]

    def run() -> Any:
        return symm_cp.scaled_matmul_reduce_scatter(
            lefts[rank], rights[rank], *own_scales, scatter_dim=dim,
            reduce_op=reduce_op, group=group, bias=bias, result_scale=result_scale,
            out_dtype=dtype, sizes=split.sizes if uneven else None,
        )  # fmt: skip

    for algorithm in (None, "shards"):
        with tuning.forced(algorithm):
            assert by_plan(run)
            scattered = run()
        assert scattered.dtype == dtype
        assert scattered.is_contiguous()
        check_result(scattered, exact, 2.0)


FEW = [
    (2, torch.float32, 0, False, "sharded"),
    (2, torch.bfloat16, 1, True, "replicated"),
    (3, E4, 2, True, "tensor"),
]
ALL = pairs((1, 2, 3, 4), DTYPES, (0, 1, 2), (False, True), SCALES, also=FEW)


@pytest.mark.parametrize(("world_size", "dtype", "dim", "uneven", "kind"), some(*FEW, of=ALL))
@pytest.mark.parametrize("op", [gathers, scatters])
def test_results(
    ranks: Ranks, op: Any, world_size: int, dtype: torch.dtype, dim: int, uneven: bool, kind: str
) -> None:
    ranks.run(world_size, op, dtype, dim, uneven, kind, random.randrange(1 << 30))


def small_calls(group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """Calls of the ops, and of the entry points."""
    size, name = group.size(), group.group_name
    x, w, one = float8(4, 16), float8(8, 16).t(), torch.ones(())
    a, rows, columns = float8(4 * size, 16), scales(4, 1), scales(1, 8)
    all_rows, dtype = scales(4 * size, 1), torch.bfloat16
    last = [None], [None], [dtype], [False]
    return {
        "gather": lambda: OPS.fused_all_gather_scaled_matmul(x, [w], one, [one], 0, name, *last),
        "gather rows": lambda: OPS.fused_all_gather_scaled_matmul(
            x, [w], rows, [columns], 0, name, *last
        ),
        "scatter": lambda: OPS.fused_scaled_matmul_reduce_scatter(
            a, w, one, one, "sum", 0, 0, name, [4 * size, 8], None, None, dtype
        ),
        "reduce": lambda: OPS.fused_scaled_matmul_all_reduce(
            a, w, all_rows, columns, "sum", name, None, None, dtype
        ),
        "scatter rows": lambda: OPS.fused_scaled_matmul_reduce_scatter(
            a, w, all_rows, columns, "sum", 0, 0, name, None, None, None, dtype
        ),
        "entry point of gather": lambda: symm_cp.scaled_all_gather_matmul(
            x, w, rows, columns, group=group, out_dtype=dtype
        ),
        "entry point of scatter": lambda: symm_cp.scaled_matmul_reduce_scatter(
            a, w, all_rows, columns, group=group, out_dtype=dtype
        ),
    }


@pytest.mark.ranks(2)
def test_nothing_of_python_runs_between_call_and_result(group: dist.ProcessGroup) -> None:
    for name, call in small_calls(group).items():
        for _ in range(3):
            call()
        seen = python_calls(call)
        # The entry points check their arguments, and name the group.
        assert len(seen) <= (12 if name.startswith("entry") else 0), (name, seen)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.ranks
def test_large_matrices(group: dist.ProcessGroup, world_size: int) -> None:
    """Matrices of any size: in pieces, through slots of half a MiB."""
    size, rank = group.size(), group.rank()
    torch.manual_seed(0)
    # torch 2.11, which has one scale for all rows, takes minutes for more on processors with AMX.
    length = 2000 if torch_scales_rows_on_cpu() else 600
    whole, all_rows = float8(length * size, 1024), scales(length * size, 1)
    w, columns = float8(64, 1024).t(), scales(1, 64)
    x, rows = whole[length * rank :][:length], all_rows[length * rank :][:length]
    results: list[Any] = []

    def run() -> Any:
        results[:] = symm_cp.scaled_all_gather_matmul(
            x, w, rows, columns, group=group, out_dtype=torch.float32
        )
        return list(results)

    assert by_plan(run)
    expected = torch._scaled_mm(whole, w, all_rows, columns, out_dtype=torch.float32)
    assert torch.equal(results[0].view(torch.uint8), whole.view(torch.uint8))
    torch.testing.assert_close(results[1], expected)

    def run_scatter() -> Any:
        results[:] = [
            symm_cp.scaled_matmul_reduce_scatter(
                whole, w, all_rows, columns, group=group, out_dtype=torch.float32
            )
        ]
        return list(results)

    assert by_plan(run_scatter)
    torch.testing.assert_close(results[0], size * expected[length * rank :][:length])


def biases(group: dist.ProcessGroup) -> None:
    """Biases of any shape and dtype that torch can add; also if only one rank has such a bias."""
    size, rank = group.size(), group.rank()
    x, w, one = float8(4, 16), float8(8, 16).t(), torch.ones(())
    a, row, f32 = float8(4 * size, 16), torch.arange(8.0), torch.float32

    def gather(bias: torch.Tensor | None) -> Any:
        return symm_cp.scaled_all_gather_matmul(
            x, w, one, one, group=group, bias=bias, out_dtype=f32
        )[1]

    def scatter(bias: torch.Tensor | None, dim: int = 0) -> Any:
        return symm_cp.scaled_matmul_reduce_scatter(
            a, w, one, one, scatter_dim=dim, group=group, bias=bias, out_dtype=f32
        )

    rows = [row, row[None], torch.arange(16.0)[::2]]
    if torch_scales_rows_on_cpu():  # torch 2.11 takes neither
        rows += [row.int(), row.double()]
    for bias in rows:
        for own in (bias, bias if rank == 0 else row):
            assert by_plan(lambda own=own: gather(own))
            torch.testing.assert_close(gather(own), gather(None) + own.float())
    for bias in (*rows, row[0], torch.randn(4, 8)):
        assert by_plan(lambda bias=bias: scatter(bias))
        torch.testing.assert_close(scatter(bias), scatter(None) + bias.float())
    for bias in (*rows, row[0]):
        part = bias.chunk(size, -1)[rank] if bias.dim() else bias
        assert by_plan(lambda bias=bias: scatter(bias, 1))
        torch.testing.assert_close(scatter(bias, 1), scatter(None, 1) + part.float())


def test_biases(ranks: Ranks) -> None:
    ranks.run(2, biases)


def empty(group: dist.ProcessGroup) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Calls with empty matrices, and the shapes of their results, which are zero."""
    size = group.size()
    x, w, one = float8(4, 16), float8(8, 16).t(), torch.ones(())
    a, f32 = float8(4 * size, 16), torch.float32

    def gather(x: torch.Tensor, w: torch.Tensor = w) -> Any:
        return symm_cp.scaled_all_gather_matmul(x, w, one, one, group=group, out_dtype=f32)[1]

    def scatter(a: torch.Tensor, w: torch.Tensor = w) -> Any:
        return symm_cp.scaled_matmul_reduce_scatter(a, w, one, one, group=group, out_dtype=f32)

    yield "no rows", lambda: gather(x[:0]), [0, 8]
    yield "no columns of A", lambda: gather(x[:, :0], w[:0]), [4 * size, 8]
    yield "no rows to scatter", lambda: scatter(a[:0]), [0, 8]
    yield "nothing to sum over", lambda: scatter(a[:, :0], w[:0]), [4, 8]


@pytest.mark.ranks(2)
def test_empty_matrices(group: dist.ProcessGroup) -> None:
    for name, call, shape in empty(group):
        by_plan(call)
        assert torch.equal(call(), torch.zeros(shape)), name


@pytest.mark.ranks(2)
def test_calls_by_either_algorithm_are_planned(group: dist.ProcessGroup) -> None:
    calls = small_calls(group)
    for context in (
        tuning.forced("shards"),
        tuning.forced("whole"),
        mock.patch.dict(os.environ, {"SYMM_CP_ALGORITHM": "shards"}),
    ):
        with context:
            native.drop_plans()
            assert all(map(by_plan, calls.values()))
    native.drop_plans()
    assert all(map(by_plan, calls.values()))


@pytest.mark.ranks(2)
def test_ranks_that_differ(group: dist.ProcessGroup) -> None:
    """Ranks are told if their scales differ in kind, or their results in dtype."""
    size, rank = group.size(), group.rank()
    x, w, one = float8(4, 16), float8(8, 16).t(), torch.ones(())
    a = float8(4 * size, 16)
    mode = scales(4, 1) if rank == 0 else one
    dtype = torch.float32 if rank == 0 else torch.bfloat16
    differing = (
        lambda: symm_cp.scaled_all_gather_matmul(x, w, mode, one, group=group),
        lambda: symm_cp.scaled_matmul_reduce_scatter(a, w, one, one, group=group, out_dtype=dtype),
    )
    for good in small_calls(group).values():
        check_disagreements(lambda good=good: tree_leaves(good())[-1], differing)


def elsewhere(group: dist.ProcessGroup, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values at other addresses, and with other strides."""
    yield x.t().contiguous().t()
    yield torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    yield torch.empty(x.shape[0], x.shape[1] + 3, dtype=x.dtype)[:, :-3].copy_(x)
    shared = symm_mem.empty(x.numel(), dtype=x.dtype, device="cpu")
    symm_mem.rendezvous(shared, group)
    yield shared.view(x.shape).copy_(x)


def spaced(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values: every other column and row of a wider tensor, and by columns."""
    values = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    for other in (
        values.repeat_interleave(2, 1)[:, ::2],
        values.repeat_interleave(2, 0)[::2],
        values.t().contiguous().t(),
        torch.cat([values, values], 1)[:, : values.shape[1]],
        torch.cat([values, values])[: values.shape[0]],
    ):
        yield other.view(tensor.dtype)


@pytest.mark.parametrize("algorithm", [None, "shards"])
@pytest.mark.ranks(2)
def test_strides(group: dist.ProcessGroup, algorithm: str | None) -> None:
    """Strides of length 1 mean nothing, and others are taken, whatever the number of rows is."""
    rest: dict[str, Any] = {"group": group, "out_dtype": torch.float32}
    ops: list[Callable[..., Any]] = [
        symm_cp.scaled_all_gather_matmul,
        symm_cp.scaled_matmul_reduce_scatter,
        symm_cp.scaled_matmul_all_reduce,
    ]
    for op, rows, inner, columns in itertools.product(ops, (1, 4), (1, 16), (1, 16)):
        rows *= group.size() if op is ops[1] else 1
        operands = [
            float8(rows, inner), float8(columns, inner).t(), scales(rows, 1), scales(1, columns)
        ]  # fmt: skip
        with tuning.forced(algorithm):
            expected = op(*operands, **rest)[-1]
            for place, given in enumerate(operands):
                for number, other in enumerate(spaced(given)):
                    assert torch.equal(other.float(), given.float())
                    found = op(*operands[:place], other, *operands[place + 1 :], **rest)[-1]
                    told = f"{op.__name__} {rows} {inner} {columns}: {place} {number}"
                    torch.testing.assert_close(found, expected, msg=lambda m, t=told: f"{t}: {m}")


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_views_and_modes(group: dist.ProcessGroup, world_size: int) -> None:
    """Results do not depend on addresses or strides of the operands, and may be modified."""
    size = group.size()
    x, a, w = float8(4, 16), float8(4 * size, 16), float8(8, 16).t()
    rows, all_rows, columns = scales(4, 1), scales(4 * size, 1), scales(1, 8)

    def gather(x: torch.Tensor, rows: torch.Tensor = rows) -> torch.Tensor:
        return symm_cp.scaled_all_gather_matmul(
            x, w, rows, columns, group=group, out_dtype=torch.float32
        )[1]

    def scatter(a: torch.Tensor, rows: torch.Tensor = all_rows) -> torch.Tensor:
        return symm_cp.scaled_matmul_reduce_scatter(
            a, w, rows, columns, group=group, out_dtype=torch.float32
        )

    for run, tensor, scale in ((gather, x, rows), (scatter, a, all_rows)):
        plain = run(tensor)
        for other in elsewhere(group, tensor):
            assert by_plan(lambda run=run, other=other: run(other))
            assert torch.equal(run(other), plain)
        for other in elsewhere(group, scale):
            assert torch.equal(run(tensor, other), plain)
        plain += 1
        with torch.inference_mode():
            assert run(tensor).is_inference()
        with torch.no_grad():
            assert torch.equal(run(tensor) + 1, plain)
