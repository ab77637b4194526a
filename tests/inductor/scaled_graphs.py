"""Functions whose graphs have scaled matmuls of float8 with gathers and scatters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.inductor.graphs import AG8, RS8, Case, gather, scatter

FLOAT8 = torch.float8_e4m3fn


def eight_bits(x: torch.Tensor, by_row: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x in float8 and its scale, or its rows' scales."""
    largest = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    scale = largest.float().clamp(min=1e-6) / 448.0
    return (x / scale).to(FLOAT8), scale


def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None) -> Any:
    if torch.compiler.is_compiling():
        return torch._scaled_mm(
            a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, bias=bias
        )
    product = (a.float() * scale_a) @ (b.float() * scale_b)  # torch 2.11's CPU has no rows' scales
    return (product if bias is None else product + bias).bfloat16()


def unscaled(a: Any, w: Any, bias: Any = None) -> Any:
    """The product of float8 `a` and of w, by constant scales."""
    one = torch.ones((), dtype=torch.float32)
    return scaled(a, w.t().contiguous().to(FLOAT8).t(), one, one * 0.5, bias)


def with_bias(x: Any, w: Any) -> Any:
    return unscaled(x.to(FLOAT8), w, torch.ones(w.shape[1], dtype=torch.bfloat16))


def product(x: Any, w: Any, by_row: bool = False) -> Any:
    (a, scale_a), (b, scale_b) = eight_bits(x, by_row), eight_bits(w.t().contiguous(), by_row)
    return scaled(a, b.t(), scale_a, scale_b.t())


def as_bytes(a: Any, dim: int, group: Any) -> Any:
    """Gathers float8 as bytes: for backends without float8."""
    return gather(a.view(torch.uint8), dim, group).view(FLOAT8)


def as_float8(a: Any, dim: int, group: Any) -> Any:
    return (gather if torch.compiler.is_compiling() else as_bytes)(a, dim, group)  # gloo has none


def in_the_middle(group: Any, x: Any, w: Any) -> Any:
    """As float8, without a view of bytes; flattened for the matmul, and unflattened behind it."""
    (a, scale_a), (b, scale_b) = eight_bits(x), eight_bits(w.t().contiguous())
    full = as_float8(a, 1, group)
    return scaled(full.flatten(0, 1), b.t(), scale_a, scale_b).unflatten(0, full.shape[:2])


def rows(dim: int, group: Any, x: Any, w: Any) -> Any:
    """With the rows' scales, gathered along the same dimension."""
    (a, scale_a), (b, scale_b) = eight_bits(x, True), eight_bits(w.t(), True)
    full = (as_bytes if dim else as_float8)(a, dim, group)
    return scaled(full.view(-1, x.shape[-1]), b.t(), gather(scale_a, dim, group).view(-1, 1),
                  scale_b.t())  # fmt: skip


def permuted(group: Any, x: Any, w: Any) -> Any:
    """Along dimension 0 of the permuted tensor, as asynchronous tensor parallelism writes it."""
    front = x.to(FLOAT8).view(torch.uint8).movedim(1, 0).contiguous()
    full = gather(front, 0, group).view(FLOAT8).movedim(0, 1)
    return unscaled(full.reshape(-1, x.shape[2]), w)


def rows_later(group: Any, x: Any, w: Any) -> Any:
    full, b = as_float8(x.to(FLOAT8), 0, group), w.t().contiguous().to(FLOAT8)
    scales = torch.linspace(0.5, 1.5, full.shape[0]).view(-1, 1)
    return scaled(full, b.t(), scales, torch.ones(1, b.shape[0]))


def graphs(W: int) -> dict[str, Case]:
    case = partial(Case, dtype=torch.float32)
    w, flat, middle = (32, 16), ((16, 32), (32, 16)), ((2, 8, 32), (32, 16))
    return {
        "scaled": case(lambda g, x, w: unscaled(as_float8(x.to(FLOAT8), 0, g), w), flat, (AG8,)),
        "scaled, as bytes": case(  # along the summed dimension
            lambda g, x, w: unscaled(as_bytes(x.to(FLOAT8), 1, g), w), ((16, 16), (16 * W, 16)),
            (AG8,),
        ),
        "scaled, as bytes, cut": case(
            lambda g, x, w: unscaled(as_bytes(x.to(FLOAT8), 0, g)[:, :16], w), ((16, 32), (16, 16)),
            (AG8,),
        ),
        "scaled, as bytes, middle": case(
            lambda g, x, w: unscaled(as_bytes(x.to(FLOAT8), 1, g).flatten(0, 1), w), middle, (AG8,)
        ),
        "scaled, middle, one scale": case(in_the_middle, middle, (AG8,)),
        "scaled, middle, rows": case(partial(rows, 1), middle, (AG8, AG8)),
        "scaled, middle, permuted": case(permuted, middle, (AG8,)),
        "scaled rows": case(partial(rows, 0), flat, (AG8, AG8)),
        "scaled rows, later": case(rows_later, flat, (AG8,)),
        "scatter scaled": case(
            lambda g, x, w: scatter(product(x, w), 0, g), ((16 * W, 32), w), (RS8,)
        ),
        "scatter scaled rows": case(
            lambda g, x, w: scatter(product(x, w, by_row=True).view(2, -1, w.shape[1]), 1, g),
            ((32 * W, 32), w), (RS8,),
        ),
        "scatter scaled, bias": case(
            lambda g, x, w: scatter(with_bias(x, w), 0, g), ((16 * W, 32), w),
            reasons=("its bias is added on every rank",),
        ),
    }  # fmt: skip
