"""Scaled matmuls of MXFP8 and NVFP4 matrices: against products of dequantised ones in float64."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.tensors.shards import Split
from tests import reference
from tests.exhaustive import pairs, some
from tests.ops.refusals import Wrong, check_refusals
from tests.ops.test_scaled_matmuls import by_plan, float8, lengths, scales

E8 = torch.float8_e8m0fnu
E4 = torch.float8_e4m3fn
FORMATS = ("MXFP8", "NVFP4")
K = 64  # numbers in a row: 2 blocks of MXFP8, 4 of NVFP4


class Blocks(NamedTuple):
    """Rows with a scale for each block, and their dequantised values in float64."""

    rows: torch.Tensor
    scale: torch.Tensor
    exact: torch.Tensor

    def part(self, split: Split, rank: int) -> Blocks:
        return Blocks(*(split.of(rank, each) for each in self))


def float4(code: int) -> float:
    """The value of a sign bit, two exponent bits and one mantissa bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def drawn(kind: str, *lead: int) -> Blocks:
    if kind == "MXFP8":
        rows = float8(*lead, K)
        exponents = torch.randint(124, 131, (*lead, K // 32), dtype=torch.uint8)
        factors = 2.0 ** (exponents.double() - 127)
        exact = rows.double() * factors.repeat_interleave(32, -1)
        return Blocks(rows, exponents.view(E8), exact)
    codes = torch.randint(0, 16, (*lead, K))
    numbers = torch.tensor([float4(code) for code in range(16)], dtype=torch.float64)[codes]
    scale = scales(*lead, K // 16).to(E4)
    exact = numbers * scale.double().repeat_interleave(16, -1)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return Blocks(packed.view(torch.float4_e2m1fn_x2), scale, exact)


FEW = [(2, "MXFP8", 0, False, torch.float32), (3, "NVFP4", 1, True, torch.bfloat16)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = pairs((1, 2, 3, 4), FORMATS, (0, 1, 2), (False, True), DTYPES, also=FEW)


@pytest.mark.parametrize(("world_size", "kind", "dim", "uneven", "dtype"), some(*FEW, of=ALL))
@pytest.mark.ranks
def test_results(
    group: dist.ProcessGroup, world_size: int, kind: str, dim: int, uneven: bool, dtype: torch.dtype
) -> None:
    """All three ops, on the drawn parts of all ranks."""
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)  # every rank draws the data of all ranks
    rank, W = group.rank(), group.size()
    options: Any = {"group": group, "out_dtype": dtype}
    split = Split(tuple(lengths(group, uneven)), dim)
    sizes = split.sizes if uneven else None
    if dim < 2:
        whole = drawn(kind, *split.whole_shape([2, 3]))
        own = whole.part(split, rank)
        weights = [drawn(kind, columns) for columns in (5, 1)]

        def gather() -> Any:
            return symm_cp.scaled_all_gather_matmul(
                own.rows, [w.rows.t() for w in weights], own.scale, [w.scale for w in weights],
                gather_dim=dim, sizes=sizes, **options,
            )  # fmt: skip

        assert by_plan(gather)
        gathered, found = gather()
        assert torch.equal(gathered.view(torch.uint8), whole.rows.view(torch.uint8))
        for out, weight in zip(found, weights, strict=True):
            assert out.dtype == dtype
            reference.matmul(whole.exact, weight.exact.t()).check(out)
    lead = [2, 3] if dim == 2 else split.whole_shape([2, 3])
    columns = split.length if dim == 2 else 4
    bias = torch.randn(columns)
    lefts, rights = ([drawn(kind, *shape) for _ in range(W)] for shape in (lead, [columns]))
    total = reference.matmul_all_reduce(
        [x.exact for x in lefts], [x.exact.t() for x in rights], bias=bias
    )
    left, right = lefts[rank], rights[rank]
    operands = (left.rows, right.rows.t(), left.scale, right.scale)

    def scatter() -> Any:
        return symm_cp.scaled_matmul_reduce_scatter(
            *operands, scatter_dim=dim, bias=bias, sizes=sizes, **options
        )

    assert by_plan(scatter)
    out = scatter()
    total.parts(split.sizes, dim)[rank].check(out)
    total.check(symm_cp.scaled_matmul_all_reduce(*operands, bias=bias, **options))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_modes(group: dist.ProcessGroup, world_size: int, kind: str) -> None:
    x, weight = drawn(kind, 4 * group.size()), drawn(kind, 8)
    options: Any = {"group": group, "out_dtype": torch.float32}

    def run(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        matrices = (x, weight.rows.t(), scale, weight.scale)
        return (
            symm_cp.scaled_all_gather_matmul(*matrices, **options)[1],
            symm_cp.scaled_matmul_reduce_scatter(*matrices, **options),
        )

    want = run(x.rows, x.scale)
    torch._dynamo.reset()
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu")):
            with mode:
                for found, expected in zip(function(x.rows, x.scale), want, strict=True):
                    assert torch.equal(found, expected)
    apart = x.rows.view(torch.uint8).repeat_interleave(2, 0).view(x.rows.dtype)[::2]
    for found, expected in zip(run(apart, x.scale.mT.contiguous().mT), want, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
@pytest.mark.ranks
def test_wrong_arguments(group: dist.ProcessGroup, world_size: int) -> None:
    W = group.size()
    x, weight, narrow = drawn("MXFP8", 2 * W), drawn("MXFP8", 8), drawn("NVFP4", 2 * W)
    good: dict[str, Any] = {
        "a": x.rows, "b": weight.rows.t(), "of_a": x.scale, "of_b": weight.scale
    }  # fmt: skip
    odd = {"a": x.rows[:, :40], "b": weight.rows.t()[:40]}
    mixed = {"a": narrow.rows, "b": weight.rows.t()[:32], "of_b": weight.scale[:, :1]}
    one = torch.ones(())
    wrong: list[Wrong] = [
        (ValueError, r"(a|shard)_scale of shape .* a scale for each 32", {"of_a": x.scale[:, :1]}),
        (ValueError, r"(a|shard)_scale of shape .* a scale for each 32", {"of_a": x.scale[:1]}),
        (
            ValueError,
            r"weight_scale.* of shape .* does not fit weights?.mT",
            {"of_b": weight.scale.t()},
        ),
        (ValueError, r"scale.* of shape .* a scale for each 32", odd),
        (TypeError, "both or none must be scales of blocks", {"of_a": one}),
        (TypeError, "both or none must be scales of blocks", {"of_b": one}),
        (TypeError, "scale.* is torch.float8_e4m3fn", {"of_a": narrow.scale}),
        (TypeError, "(a|shard) is torch.float4_e2m1fn_x2", mixed),
    ]

    def calls(**changed: Any) -> list[Any]:
        a, b, of_a, of_b = {**good, **changed}.values()
        options: Any = {"group": group, "out_dtype": torch.float32}
        return [
            lambda: symm_cp.scaled_all_gather_matmul(a, b, of_a, of_b, **options)[1],
            lambda: symm_cp.scaled_matmul_reduce_scatter(a, b, of_a, of_b, **options),
            lambda: symm_cp.scaled_matmul_all_reduce(a, b, of_a, of_b, **options),
        ]

    for number in range(3):

        def call(number: int = number, **changed: Any) -> torch.Tensor:
            return calls(**changed)[number]()

        check_refusals(group, call, wrong)
    with pytest.raises(NotImplementedError, match="gather_dim=1 is the last dimension"):
        symm_cp.scaled_all_gather_matmul(
            x.rows, torch.cat([weight.rows] * W, 1).t(), x.scale,
            torch.cat([weight.scale] * W, 1), gather_dim=1, group=group,
        )  # fmt: skip


@pytest.mark.ranks(2)
def test_ranks_that_differ(group: dist.ProcessGroup) -> None:
    """One rank has a scale per row, the other a scale per block, with one block in each row."""
    x, weight = float8(4, 32), float8(8, 32)
    of_x, of_weight = torch.ones(4, 1), torch.ones(1, 8)
    if group.rank() == 0:
        of_x, of_weight = of_x.to(E8), of_weight.t().to(E8)
    for algorithm in (None, "shards"):
        with tuning.forced(algorithm), pytest.raises(RuntimeError, match="ranks disagree"):
            symm_cp.scaled_all_gather_matmul(x, weight.t(), of_x, of_weight, group=group)
