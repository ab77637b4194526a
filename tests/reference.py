"""Dense single-process references in float64, with error bounds that are derived.

Letters: W ranks; a shard list holds the tensor of each rank, in rank order. A reference returns
`Expected`: the exact value, and the sums that bound the error of a correct implementation.

The bound, for each element of ``sum over k of a[k] * b[k]`` with K terms (u: unit round-off):

- Rounding the result to its dtype errs by at most ``u(dtype) * |value|``.
- Accumulating in a dtype errs by at most ``K * u(accumulator) * sum |a[k] * b[k]|``; rounding
  errors being independent and centred, by more than ``LAMBDA * sqrt(K)`` instead of ``K`` with
  probability below ``2 * exp(-LAMBDA**2 / 2)`` only (Higham and Mary, 2019). 16-bit and float32
  operands are accumulated in float32, float64 in float64.
- A reduce-scatter may round each rank's partial sum to the dtype before it adds them:
  ``u(dtype) * sum over ranks of |partial|``. An implementation that keeps more is inside the bound.
- The reference errs like the implementation would in float64, which matters for float64 alone.

So a 16-bit result is held to about one rounding, whatever K is, and no tolerance is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

# 2 * exp(-18) is 3e-8 for an element, if its errors were as bad as independent ones can be.
LAMBDA = 6.0
_SLACK = 1.001  # second-order terms


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns half the distance of 1.0 to the next number of the dtype."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that sums of products of `dtype` are accumulated in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def widened(x: torch.Tensor) -> torch.Tensor:
    """Returns the numbers in float64, complex ones in complex128."""
    return x.to(torch.complex128) if x.is_complex() else x.double()


@dataclass(frozen=True)
class Expected:
    """An exact result, and per element the sums of magnitudes that errors are proportional to."""

    value: torch.Tensor
    magnitude: torch.Tensor  # sum over all terms of |term|
    terms: int  # how many terms are added
    partials: torch.Tensor | None = None  # sum over ranks of |partial sum|

    def bound(self, dtype: torch.dtype, accumulate: torch.dtype | None = None) -> torch.Tensor:
        """Returns the largest error of each element for a result of `dtype`."""
        wide = accumulate or accumulator(dtype)
        limit = unit_roundoff(dtype) * self.value.abs()
        if self.partials is not None:
            limit = limit + unit_roundoff(dtype) * self.partials
        growth = LAMBDA * math.sqrt(self.terms)
        limit = limit + growth * unit_roundoff(wide) * self.magnitude
        limit = limit + growth * unit_roundoff(torch.float64) * self.magnitude
        return _SLACK * limit + torch.finfo(dtype).tiny

    def parts(self, sizes: Sequence[int], dim: int) -> list[Expected]:
        """Returns each rank's part along a dimension."""
        each = [t.split(list(sizes), dim) for t in (self.value, self.magnitude)]
        more = [] if self.partials is None else [self.partials.split(list(sizes), dim)]
        return [Expected(v, m, self.terms, *p) for v, m, *p in zip(*each, *more, strict=True)]

    def equal_parts(self, ranks: int, dim: int) -> list[Expected]:
        """Returns each rank's part, all of them of one size."""
        assert self.value.shape[dim] % ranks == 0, f"{self.value.shape=} {dim=} {ranks=}"
        return self.parts([self.value.shape[dim] // ranks] * ranks, dim)

    def check(self, actual: torch.Tensor, accumulate: torch.dtype | None = None) -> None:
        """Raises `AssertionError` unless shape and every element are right for actual's dtype."""
        assert actual.shape == self.value.shape, f"{actual.shape=}, expected {self.value.shape}"
        if actual.numel() == 0:
            return
        error = (widened(actual) - self.value).abs()
        excess = error / self.bound(actual.dtype, accumulate)
        worst = int(torch.nan_to_num(excess, nan=math.inf).argmax())
        ratio = excess.flatten()[worst].item()
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
        assert ratio <= 1, (
            f"element {index} of {tuple(actual.shape)} {actual.dtype}: got "
            f"{actual[index].item()}, expected {self.value[index].item()}, error "
            f"{error[index].item():.3g} is {ratio:.3g} times the bound; "
            f"{int((~(excess <= 1)).sum())} elements are out of bounds"
        )


def gather(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """All-gather: the shards side by side along `dim`. Exact."""
    return torch.cat(list(shards), dim)


def reduce(inputs: Sequence[torch.Tensor], op: str = "sum") -> Expected:
    """All-reduce ("sum" or "avg") of one tensor a rank."""
    stack = torch.stack([x.double() for x in inputs])
    factor = {"sum": 1.0, "avg": 1.0 / len(inputs)}[op]
    # One more term for the division.
    return Expected(stack.sum(0) * factor, stack.abs().sum(0) * factor, len(inputs) + 1)


def reduce_scatter(inputs: Sequence[torch.Tensor], dim: int, op: str = "sum") -> list[Expected]:
    """Reduce-scatter: rank r keeps part r along `dim` of the reduced tensor."""
    return reduce(inputs, op).equal_parts(len(inputs), dim)


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Expected:
    """``a @ b + bias``, from operands as they are (already rounded to their dtype)."""
    wide_a, wide_b = widened(a), widened(b)
    value, magnitude = wide_a @ wide_b, wide_a.abs() @ wide_b.abs()
    if bias is not None:
        value, magnitude = value + bias.double(), magnitude + bias.double().abs()
    return Expected(value, magnitude, a.shape[-1] + 1)


def all_gather_matmul(
    a_shards: Sequence[torch.Tensor],
    bs: Sequence[torch.Tensor],
    gather_dim: int,
    *,
    partials_in_dtype: bool = False,
) -> tuple[torch.Tensor, list[Expected]]:
    """Returns the gathered A and ``A @ B`` for each B.

    A gather along the last dimension splits the sum over k. With `partials_in_dtype` each rank's
    part of it may be rounded to the dtype before the parts are added.
    """
    a = gather(a_shards, gather_dim)
    outputs = [matmul(a, b) for b in bs]
    if partials_in_dtype and gather_dim % a.dim() == a.dim() - 1:
        world_size = len(a_shards)
        for i, b in enumerate(bs):
            parts = zip(a_shards, b.tensor_split(world_size), strict=True)
            partials = torch.stack([matmul(x, y).value.abs() for x, y in parts]).sum(0)
            outputs[i] = replace(outputs[i], partials=partials)
    return a, outputs


def matmul_all_reduce(
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    op: str = "sum",
    bias: torch.Tensor | None = None,
) -> Expected:
    """The reduced ``A_rank @ B_rank`` (+ bias once)."""
    products = [matmul(a, b) for a, b in zip(a_parts, b_parts, strict=True)]
    world_size = len(products)
    factor = {"sum": 1.0, "avg": 1.0 / world_size}[op]
    values = torch.stack([p.value for p in products])
    magnitude = torch.stack([p.magnitude for p in products]).sum(0) * factor
    value, partials = values.sum(0) * factor, values.abs().sum(0) * factor
    if bias is not None:
        # The sum may be rounded before the bias is added, or a partial sum with the bias in it.
        partials = partials + torch.maximum(value.abs(), bias.double().abs())
        value, magnitude = value + bias.double(), magnitude + bias.double().abs()
    terms = sum(p.terms for p in products) + 2
    return Expected(value, magnitude, terms, partials)


def matmul_reduce_scatter(
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    scatter_dim: int,
    op: str = "sum",
    bias: torch.Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Expected]:
    """As `matmul_all_reduce`; rank r keeps part r along `scatter_dim`: equal ones without sizes."""
    total = matmul_all_reduce(a_parts, b_parts, op, bias)
    return (
        total.equal_parts(len(a_parts), scatter_dim)
        if sizes is None
        else total.parts(sizes, scatter_dim)
    )


def dequantise(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Returns ``x * scale`` in float64: exact for 8-bit x and a float32 scale that broadcasts."""
    return x.double() * torch.as_tensor(scale).double()


def scaled_all_gather_matmul(
    a_shards: Sequence[torch.Tensor],
    a_scales: Sequence[torch.Tensor] | torch.Tensor,
    bs: Sequence[torch.Tensor],
    b_scales: Sequence[torch.Tensor],
    gather_dim: int,
    biases: Sequence[torch.Tensor | None] | None = None,
    result_scales: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, list[Expected]]:
    """Gathered A (not dequantised) and ``(A * sa) @ (B * sb) + bias``, times the result scale.

    `a_scales`: one scale for all of A (tensor-wise, or row-wise replicated: shaped like the
    gathered A with a last dimension of 1), or a list with one tensor a rank (row-wise sharded).
    """
    a = gather(a_shards, gather_dim)
    if isinstance(a_scales, torch.Tensor):
        wide_a = dequantise(a, a_scales)
    else:
        shards = [dequantise(x, s) for x, s in zip(a_shards, a_scales, strict=True)]
        wide_a = gather(shards, gather_dim)
    outputs = []
    for i, (b, b_scale) in enumerate(zip(bs, b_scales, strict=True)):
        product = matmul(wide_a, dequantise(b, b_scale), biases[i] if biases else None)
        outputs.append(_rescale(product, result_scales[i] if result_scales else None))
    return a, outputs


def scaled_matmul_reduce_scatter(
    a_parts: Sequence[torch.Tensor],
    a_scales: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    b_scales: Sequence[torch.Tensor],
    scatter_dim: int,
    op: str = "sum",
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
) -> list[Expected]:
    """As `matmul_reduce_scatter`, from 8-bit parts and their scales (tensor-wise or row-wise)."""
    total = scaled_matmul_all_reduce(a_parts, a_scales, b_parts, b_scales, op, bias, result_scale)
    return total.equal_parts(len(a_parts), scatter_dim)


def scaled_matmul_all_reduce(
    a_parts: Sequence[torch.Tensor],
    a_scales: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    b_scales: Sequence[torch.Tensor],
    op: str = "sum",
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
) -> Expected:
    """As `matmul_all_reduce`, from 8-bit parts and their scales (tensor-wise or row-wise)."""
    wide_a = [dequantise(a, s) for a, s in zip(a_parts, a_scales, strict=True)]
    wide_b = [dequantise(b, s) for b, s in zip(b_parts, b_scales, strict=True)]
    return _rescale(matmul_all_reduce(wide_a, wide_b, op, bias), result_scale)


def _rescale(expected: Expected, scale: torch.Tensor | None) -> Expected:
    # Three more roundings: the scales of A and B, and the result's.
    factor = 1.0 if scale is None else scale.double()
    partials = None if expected.partials is None else expected.partials * factor
    magnitude = expected.magnitude * factor
    return Expected(expected.value * factor, magnitude, expected.terms + 3, partials)
