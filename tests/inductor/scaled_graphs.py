"""Functions whose graphs have scaled matmuls of float8 with gathers and scatters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from tests.inductor.graphs import AG8, RS8, GraphCase

FLOAT8 = torch.float8_e4m3fn


def eight_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax().float().clamp(min=1e-6) / 448.0
    return (x / scale).to(FLOAT8), scale


def eight_bits_by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-6) / 448.0
    return (x / scale).to(FLOAT8), scale


def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None) -> Any:
    if torch.compiler.is_compiling():
        return torch._scaled_mm(
            a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, bias=bias
        )
    product = (a.float() * scale_a) @ (b.float() * scale_b)  # torch 2.11's CPU has no rows' scales
    return (product if bias is None else product + bias).bfloat16()


def gather_eight_bits(x: torch.Tensor, group: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return funcol.all_gather_tensor(x, 0, group)
    return funcol.all_gather_tensor(x.view(torch.uint8), 0, group).view(
        FLOAT8
    )  # gloo has no float8


def gather_scaled(group: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    return scaled(gather_eight_bits(a, group), b, one, one * 0.5)


def gather_scaled_as_bytes(group: Any, x: Any, w: Any) -> Any:
    """Gathers along the summed dimension, as bytes: for backends without float8."""
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    full = funcol.all_gather_tensor(a.view(torch.uint8), 1, group).view(FLOAT8)
    return scaled(full, b, one, one * 0.5)


def gather_scaled_as_bytes_then_cut(group: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    full = funcol.all_gather_tensor(a.view(torch.uint8), 0, group).view(FLOAT8)
    return scaled(full[:, :16], b, one, one * 0.5)


def gather_scaled_as_bytes_in_the_middle(group: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    full = funcol.all_gather_tensor(a.view(torch.uint8), 1, group).view(FLOAT8)
    return scaled(full.flatten(0, 1), b, one, one * 0.5)


def gather_scaled_in_the_middle(group: Any, x: Any, w: Any) -> Any:
    """As float8, without a view of bytes; flattened for the matmul, and unflattened behind it."""
    a, scale_a = eight_bits(x)
    b, scale_b = eight_bits(w.t().contiguous())
    if torch.compiler.is_compiling():
        full = funcol.all_gather_tensor(a, 1, group)
    else:
        full = funcol.all_gather_tensor(a.view(torch.uint8), 1, group).view(FLOAT8)
    return scaled(full.flatten(0, 1), b.t(), scale_a, scale_b).unflatten(0, full.shape[:2])


def gather_scaled_rows_in_the_middle(group: Any, x: Any, w: Any) -> Any:
    """With the rows' scales, gathered along the same dimension."""
    a, scale_a = eight_bits_by_row(x)
    b, scale_b = eight_bits_by_row(w.t())
    full = funcol.all_gather_tensor(a.view(torch.uint8), 1, group).view(FLOAT8)
    scales = funcol.all_gather_tensor(scale_a, 1, group)
    return scaled(full.view(-1, x.shape[2]), b.t(), scales.view(-1, 1), scale_b.t())


def gather_scaled_permuted(group: Any, x: Any, w: Any) -> Any:
    """Along dimension 0 of the permuted tensor, as asynchronous tensor parallelism writes it."""
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    front = a.view(torch.uint8).movedim(1, 0).contiguous()
    full = funcol.all_gather_tensor(front, 0, group).view(FLOAT8).movedim(0, 1)
    return scaled(full.reshape(-1, x.shape[2]), b, one, one * 0.5)


def gather_scaled_rows(group: Any, x: Any, w: Any) -> Any:
    a, scale_a = eight_bits_by_row(x)
    b, scale_b = eight_bits_by_row(w.t())
    full, scales = gather_eight_bits(a, group), funcol.all_gather_tensor(scale_a, 0, group)
    return scaled(full, b.t(), scales, scale_b.t())


def gather_scaled_rows_later(group: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8)
    full = gather_eight_bits(a, group)
    scales = torch.linspace(0.5, 1.5, full.shape[0]).view(-1, 1)
    return scaled(full, b.t(), scales, torch.ones(1, b.shape[0]))


def scatter_scaled(group: Any, x: Any, w: Any) -> Any:
    a, scale_a = eight_bits(x)
    b, scale_b = eight_bits(w.t().contiguous())
    return funcol.reduce_scatter_tensor(scaled(a, b.t(), scale_a, scale_b), "sum", 0, group)


def scatter_scaled_rows(group: Any, x: Any, w: Any) -> Any:
    a, scale_a = eight_bits_by_row(x)
    b, scale_b = eight_bits_by_row(w.t())
    product = scaled(a, b.t(), scale_a, scale_b.t()).view(2, -1, w.shape[1])
    return funcol.reduce_scatter_tensor(product, "sum", 1, group)


def scatter_scaled_bias(group: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one, bias = torch.ones(()), torch.ones(w.shape[1], dtype=torch.bfloat16)
    return funcol.reduce_scatter_tensor(scaled(a, b, one, one, bias=bias), "sum", 0, group)


def graphs(W: int) -> dict[str, GraphCase]:
    return {
        "scaled": GraphCase(gather_scaled, ((16, 32), (32, 16)), (AG8,), dtype=torch.float32),
        "scaled, as bytes": GraphCase(
            gather_scaled_as_bytes, ((16, 16), (16 * W, 16)), (AG8,), dtype=torch.float32
        ),
        "scaled, as bytes, cut": GraphCase(
            gather_scaled_as_bytes_then_cut, ((16, 32), (16, 16)), (AG8,), dtype=torch.float32
        ),
        "scaled, as bytes, middle": GraphCase(
            gather_scaled_as_bytes_in_the_middle,
            ((2, 8, 32), (32, 16)),
            (AG8,),
            dtype=torch.float32,
        ),
        **{
            f"scaled, middle, {name}": GraphCase(
                fn, ((2, 8, 32), (32, 16)), fused, dtype=torch.float32
            )
            for name, fn, fused in (
                ("one scale", gather_scaled_in_the_middle, (AG8,)),
                ("rows", gather_scaled_rows_in_the_middle, (AG8, AG8)),
                ("permuted", gather_scaled_permuted, (AG8,)),
            )
        },
        "scaled rows": GraphCase(
            gather_scaled_rows, ((16, 32), (32, 16)), (AG8, AG8), dtype=torch.float32
        ),
        "scaled rows, later": GraphCase(
            gather_scaled_rows_later, ((16, 32), (32, 16)), (AG8,), dtype=torch.float32
        ),
        "scatter scaled": GraphCase(
            scatter_scaled, ((16 * W, 32), (32, 16)), (RS8,), dtype=torch.float32
        ),
        "scatter scaled rows": GraphCase(
            scatter_scaled_rows, ((32 * W, 32), (32, 16)), (RS8,), dtype=torch.float32
        ),
        "scatter scaled, bias": GraphCase(
            scatter_scaled_bias,
            ((16 * W, 32), (32, 16)),
            reasons=("its bias is added on every rank",),
            dtype=torch.float32,
        ),
    }
