"""Graphs that are fused, and graphs that must stay as they are: the rewrite and the numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from symm_cp.inductor.options import Options
from tests.exhaustive import some
from tests.inductor import attention_graphs
from tests.inductor.graphs import gather, run, through_passes
from tests.pool import Ranks

AG, RS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
AG8, RS8 = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
ATTENTION = "fused_all_gather_attention"


@dataclass(frozen=True)
class Graph:
    """A function of (group, *inputs), what its collectives are fused into, and reasons if not."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    fused: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    grad: bool = False
    dtype: torch.dtype = torch.float64
    options: Options = field(default_factory=Options)


def scatter(x: torch.Tensor, dim: int, group: Any, op: str = "sum") -> torch.Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, op, dim, group)


def gather_rows(g: Any, x: Any, w: Any) -> Any:
    return gather(x, 0, g) @ w


def gather_middle(g: Any, x: Any, w: Any) -> Any:
    return gather(x, 1, g) @ w


def gather_columns(g: Any, x: Any, w: Any) -> Any:
    return gather(x, 2, g) @ w


def gather_negative(g: Any, x: Any, w: Any) -> Any:
    return gather(x, -2, g) @ w


def gather_for_many(g: Any, x: Any, w: Any, u: Any) -> Any:
    full = gather(x, 1, g)
    return full @ w, (full @ u).relu()


def gather_in_turn(g: Any, x: Any, w: Any, u: Any) -> Any:
    full = gather(x, 0, g)
    first = full @ w
    return first, full @ (u + first.sum())  # the second needs the first


def gather_with_bias(g: Any, x: Any, w: Any, b: Any) -> Any:
    return F.linear(gather(x, 1, g), w.mT, b)


def gather_used_elsewhere(g: Any, x: Any, w: Any) -> Any:
    full = gather(x, 1, g)
    return full @ w, full.exp()


def gather_then_heads(g: Any, x: Any, w: Any) -> Any:
    # (B, S, H, E) as attention has it, heads flattened for a projection.
    return gather(x, 1, g).transpose(1, 2).transpose(1, 2).flatten(2) @ w


def gather_transposed(g: Any, x: Any, w: Any) -> Any:
    return gather(x, 0, g).transpose(0, 1) @ w  # sequence first, batch first for the matmul


def gather_cast(g: Any, x: Any, w: Any) -> Any:
    return gather(x, 0, g).float() @ w.float()


def gather_cast_both(g: Any, x: Any, w: Any) -> Any:
    full = gather(x, 0, g)
    return full.float() @ w.float(), full * 2


def gather_by_slices(g: Any, x: Any, w: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, g)
    parts = full.split(x.shape[0])
    return torch.cat(list(parts), 1) @ w


def gather_swapped(g: Any, x: Any, w: Any) -> Any:
    parts = funcol.all_gather_tensor(x, 0, g).split(x.shape[0])
    return torch.cat(list(parts)[::-1], 1) @ w


def gather_twice_the_same(g: Any, x: Any, w: Any) -> Any:
    parts = funcol.all_gather_tensor(x, 0, g).split(x.shape[0])
    return torch.cat([parts[0] for _ in parts], 1) @ w


def gather_overlapping(g: Any, x: Any, w: Any) -> Any:
    full, n = funcol.all_gather_tensor(x, 0, g), x.shape[0]
    return torch.cat([full[i : i + n] for i in range(full.shape[0] // n)], 1) @ w


def gather_halves(g: Any, x: Any, w: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, g)
    return full[: full.shape[0] // 2] @ w


def gather_on_the_right(g: Any, x: Any, w: Any) -> Any:
    return w @ funcol.all_gather_tensor(x, 0, g)


def gather_summed_over(g: Any, x: Any, w: Any) -> Any:
    return funcol.all_gather_tensor(x, 0, g).mT @ w


def gather_alone(g: Any, x: Any) -> Any:
    return funcol.all_gather_tensor(x, 0, g).exp()


def gather_two(g: Any, x: Any, y: Any, w: Any) -> Any:
    return gather(x, 0, g) @ w, gather(y, 0, g) @ w


def scatter_rows(g: Any, x: Any, w: Any) -> Any:
    return scatter(x @ w, 0, g)


def scatter_middle(g: Any, x: Any, w: Any) -> Any:
    return scatter(x @ w, 1, g)


def scatter_columns(g: Any, x: Any, w: Any) -> Any:
    return scatter(x @ w, 2, g)


def scatter_mean(g: Any, x: Any, w: Any) -> Any:
    if torch.compiler.is_compiling():
        return funcol.reduce_scatter_tensor(x @ w, "avg", 1, g)
    return scatter(x @ w, 1, g) / g.size()  # torch 2.11's gloo only sums


def scatter_bias(g: Any, x: Any, w: Any, b: Any) -> Any:
    return scatter(F.linear(x, w.mT, b), 1, g)


def scatter_used_elsewhere(g: Any, x: Any, w: Any) -> Any:
    product = x @ w
    return funcol.reduce_scatter_tensor(product, "sum", 0, g), product.exp()


def scatter_narrowed(g: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor((x @ w).float(), "sum", 0, g)


def scatter_widened(g: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor((x @ w).double(), "sum", 0, g)


def scatter_of_a_sum(g: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor((x @ w).relu(), "sum", 0, g)


def scatter_largest(g: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor(x @ w, "max", 0, g)


def block(g: Any, x: Any, w: Any, u: Any) -> Any:
    return scatter(torch.relu(gather(x, 1, g) @ w) @ u, 1, g)


def block_recomputed(g: Any, x: Any, w: Any, u: Any) -> Any:
    return checkpoint(lambda *a: block(g, *a), x, w, u, use_reentrant=False)


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


def gather_eight_bits(x: torch.Tensor, g: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return funcol.all_gather_tensor(x, 0, g)
    return funcol.all_gather_tensor(x.view(torch.uint8), 0, g).view(FLOAT8)  # gloo has no float8


def gather_scaled(g: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    return scaled(gather_eight_bits(a, g), b, one, one * 0.5)


def gather_scaled_as_bytes(g: Any, x: Any, w: Any) -> Any:
    """As frameworks gather float8 where the backend has none: along the summed dimension."""
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    full = funcol.all_gather_tensor(a.view(torch.uint8), 1, g).view(FLOAT8)
    return scaled(full, b, one, one * 0.5)


def gather_scaled_as_bytes_then_cut(g: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one = torch.ones((), dtype=torch.float32)
    full = funcol.all_gather_tensor(a.view(torch.uint8), 0, g).view(FLOAT8)
    return scaled(full[:, :16], b, one, one * 0.5)


def gather_scaled_rows(g: Any, x: Any, w: Any) -> Any:
    a, scale_a = eight_bits_by_row(x)
    b, scale_b = eight_bits_by_row(w.t())
    full, scales = gather_eight_bits(a, g), funcol.all_gather_tensor(scale_a, 0, g)
    return scaled(full, b.t(), scales, scale_b.t())


def gather_scaled_rows_later(g: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8)
    full = gather_eight_bits(a, g)
    scales = torch.linspace(0.5, 1.5, full.shape[0]).view(-1, 1)
    return scaled(full, b.t(), scales, torch.ones(1, b.shape[0]))


def scatter_scaled(g: Any, x: Any, w: Any) -> Any:
    a, scale_a = eight_bits(x)
    b, scale_b = eight_bits(w.t().contiguous())
    return funcol.reduce_scatter_tensor(scaled(a, b.t(), scale_a, scale_b), "sum", 0, g)


def scatter_scaled_rows(g: Any, x: Any, w: Any) -> Any:
    a, scale_a = eight_bits_by_row(x)
    b, scale_b = eight_bits_by_row(w.t())
    product = scaled(a, b.t(), scale_a, scale_b.t()).view(2, -1, w.shape[1])
    return funcol.reduce_scatter_tensor(product, "sum", 1, g)


def scatter_scaled_bias(g: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one, bias = torch.ones(()), torch.ones(w.shape[1], dtype=torch.bfloat16)
    return funcol.reduce_scatter_tensor(scaled(a, b, one, one, bias=bias), "sum", 0, g)


def mixed_precision(g: Any, x: Any, w: Any) -> Any:
    # Parameters and what is sent in float32, products in bfloat16.
    full = gather(x, 0, g).bfloat16()
    return (full @ w.bfloat16()).float()


def keep_scattered(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    kept = op is torch.ops._c10d_functional.reduce_scatter_tensor.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def block_selectively_recomputed(g: Any, x: Any, w: Any, u: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_scattered)
    return checkpoint(lambda *a: block(g, *a), x, w, u, use_reentrant=False, context_fn=contexts)


X3, W2 = (2, 4, 6), (6, 5)
HEADS = (2, 3, 4, 8)
small = Options(min_flops=1e6)


def graphs(W: int) -> dict[str, Graph]:
    """All graphs, by name."""
    return {
        "rows": Graph(gather_rows, ((4, 6), W2), (AG, RS), grad=True),
        "middle": Graph(gather_middle, (X3, W2), (AG, RS), grad=True),
        "columns": Graph(gather_columns, (X3, (6 * W, 5)), (AG, RS), grad=True),
        "negative": Graph(gather_negative, (X3, W2), (AG,)),
        "many": Graph(gather_for_many, (X3, W2, (6, 3)), (AG, RS), grad=True),
        "in turn": Graph(gather_in_turn, ((4, 6), W2, W2), (AG,)),
        "bias": Graph(gather_with_bias, (X3, W2, (5,)), (AG, RS), grad=True),
        "used elsewhere": Graph(gather_used_elsewhere, (X3, W2), (AG,)),
        "heads": Graph(gather_then_heads, ((2, 4, 3, 2), W2), (AG,)),
        "transposed": Graph(gather_transposed, (X3, W2), (AG,)),
        "cast": Graph(gather_cast, ((4, 6), W2), (AG,)),
        "cast, both": Graph(gather_cast_both, ((4, 6), W2), reasons=("used as torch.float64",)),
        "slices": Graph(gather_by_slices, (X3, W2), (AG,)),
        "swapped": Graph(gather_swapped, (X3, W2), reasons=("which is not followed",)),
        "the same twice": Graph(
            gather_twice_the_same, (X3, W2), reasons=("which is not followed",)
        ),
        "overlapping": Graph(gather_overlapping, (X3, W2), reasons=("which is not followed",)),
        "halves": Graph(gather_halves, ((4, 6), W2), reasons=("which is not followed",)),
        "on the right": Graph(gather_on_the_right, ((4, 6), (5, 4 * W)), reasons=("sums over",)),
        "summed over": Graph(gather_summed_over, ((4, 6), (4 * W, 5)), (AG,)),
        "alone": Graph(gather_alone, ((4, 6),), reasons=("feeds no matmul",)),
        "two": Graph(gather_two, ((4, 6), (3, 6), W2), (AG, AG)),
        "small": Graph(gather_rows, ((4, 6), W2), reasons=("is too small",), options=small),
        "scatter rows": Graph(scatter_rows, ((4 * W, 6), W2), (RS, AG), grad=True),
        "scatter middle": Graph(scatter_middle, ((2, 4 * W, 6), W2), (RS, AG), grad=True),
        "scatter columns": Graph(scatter_columns, (X3, (6, 3 * W)), (RS, AG), grad=True),
        "mean": Graph(scatter_mean, ((2, 4 * W, 6), W2), (RS,)),
        "scatter bias": Graph(scatter_bias, ((2, 4 * W, 6), W2, (5,)), (RS, AG), grad=True),
        "product used elsewhere": Graph(
            scatter_used_elsewhere, ((4 * W, 6), W2), reasons=("is used elsewhere",)
        ),
        "narrowed": Graph(scatter_narrowed, ((4 * W, 6), W2), (RS,)),
        "widened": Graph(
            scatter_widened, ((4 * W, 6), W2), reasons=("wider than",), dtype=torch.float32
        ),
        "of a function": Graph(scatter_of_a_sum, ((4 * W, 6), W2), reasons=("no matmul",)),
        "largest": Graph(scatter_largest, ((4 * W, 6), W2), reasons=("reduces by max",)),
        "block": Graph(block, (X3, W2, (5, 6)), (AG, RS, AG, RS), grad=True),
        "scaled": Graph(gather_scaled, ((16, 32), (32, 16)), (AG8,), dtype=torch.float32),
        "scaled, as bytes": Graph(
            gather_scaled_as_bytes, ((16, 16), (16 * W, 16)), (AG8,), dtype=torch.float32
        ),
        "scaled, as bytes, cut": Graph(
            gather_scaled_as_bytes_then_cut, ((16, 32), (16, 16)), (AG8,), dtype=torch.float32
        ),
        "scaled rows": Graph(
            gather_scaled_rows, ((16, 32), (32, 16)), (AG8, AG8), dtype=torch.float32
        ),
        "scaled rows, later": Graph(
            gather_scaled_rows_later, ((16, 32), (32, 16)), (AG8,), dtype=torch.float32
        ),
        "scatter scaled": Graph(
            scatter_scaled, ((16 * W, 32), (32, 16)), (RS8,), dtype=torch.float32
        ),
        "scatter scaled rows": Graph(
            scatter_scaled_rows, ((32 * W, 32), (32, 16)), (RS8,), dtype=torch.float32
        ),
        "scatter scaled, bias": Graph(
            scatter_scaled_bias,
            ((16 * W, 32), (32, 16)),
            reasons=("its bias is added on every rank",),
            dtype=torch.float32,
        ),
        "mixed precision": Graph(
            mixed_precision,
            ((8, 16), (16, 8)),
            (AG,),
            reasons=("which is wider",),  # the gradient, which is reduced in float32
            grad=True,
            dtype=torch.float32,
        ),
        "block, selectively recomputed": Graph(
            block_selectively_recomputed, (X3, W2, (5, 6)), (AG, RS), grad=True
        ),
        "block, recomputed": Graph(block_recomputed, (X3, W2, (5, 6)), (AG, RS), grad=True),
        "attention": Graph(attention_graphs.attend, (HEADS,) * 3, (ATTENTION,), grad=True),
        "attention, no grad": Graph(attention_graphs.attend, (HEADS,) * 3, (ATTENTION,)),
        "attention, stacked": Graph(
            attention_graphs.attend_stacked, (HEADS,) * 3, (ATTENTION,), grad=True
        ),
        "attention, joined": Graph(
            attention_graphs.attend_joined, (HEADS,) * 3, (ATTENTION,), grad=True
        ),
        "attention, causal": Graph(
            attention_graphs.attend_causal, (HEADS,) * 3, (ATTENTION,), grad=True
        ),
        **{
            f"attention, {kernel}": Graph(
                functools.partial(attention_graphs.attend_as, kernel),
                (HEADS,) * 3,
                (ATTENTION,),
                grad=True,
            )
            for kernel in ("flash", "cudnn", "efficient")
        },
        "attention, flash, no grad": Graph(
            functools.partial(attention_graphs.attend_as, "flash"), (HEADS,) * 3, (ATTENTION,)
        ),
        "attention, efficient, causal": Graph(
            functools.partial(attention_graphs.attend_as_causal, "efficient"),
            (HEADS,) * 3,
            (ATTENTION,),
            grad=True,
        ),
        "attention, upper left": Graph(
            attention_graphs.attend_upper_left, (HEADS,) * 3, reasons=("is_causal",)
        ),
        "attention, window": Graph(
            attention_graphs.attend_window, (HEADS,) * 3, reasons=("no causal one",)
        ),
        "attention, over heads": Graph(
            attention_graphs.attend_over_heads,
            ((2, 3 * W, 4, 8), HEADS, HEADS),
            reasons=("along the sequence",),
        ),
    }


def check(group: dist.ProcessGroup, name: str, seed: int) -> None:
    graph = graphs(group.size())[name]
    generator = torch.Generator().manual_seed(seed + group.rank())
    inputs = [torch.randn(s, dtype=graph.dtype, generator=generator) for s in graph.shapes]
    for t in inputs:
        t.requires_grad_(graph.grad)

    def fn(*given: torch.Tensor) -> Any:
        return graph.fn(group, *given)

    results, grads = run(fn, inputs)
    compiled = through_passes(fn, inputs, graph.options)
    for got, want in zip([*compiled.results, *compiled.grads], [*results, *grads], strict=True):
        # Products of other shapes are rounded elsewhere; sums in 16 bits are not taken in float32.
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if name in ("cast", "narrowed") else {}
        if "scaled" in name or "mixed" in name:
            # A 16-bit term of the sum, and each sum on the way, is rounded by up to 2**-9 of
            # its size, and both may be larger than the element that they end in.
            size = float(want.abs().max()) if want.numel() else 0.0
            tolerance = {"rtol": 0.0, "atol": group.size() * 2.0**-7 * size}
        torch.testing.assert_close(got, want, **tolerance)
    fused = [d.fused_into for d in compiled.report.fused]
    assert sorted(map(str, fused)) == sorted(graph.fused) or (
        graph.grad and set(graph.fused) <= set(map(str, fused))
    ), str(compiled.report)
    for reason in graph.reasons:
        assert any(reason in d.reason for d in compiled.report.left), str(compiled.report)
    left = [op for op in compiled.ops if "_c10d_functional" in op]
    if graph.reasons:
        assert left, compiled.ops
    else:
        # Nothing is left of the collectives, and the graph has the ops that the report tells of.
        assert not left, (left, str(compiled.report))
        for op in graph.fused:
            assert any(op in ran or (op == RS and "reduce_scatter" in ran) for ran in compiled.ops)


def with_dynamic_batch(group: dist.ProcessGroup, seed: int) -> None:
    """The batch is not known when the graph is compiled, what is gathered is."""
    generator = torch.Generator().manual_seed(seed + group.rank())

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention_graphs.attend(group, q, k, v)

    def feed_forward(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        return block(group, x, w, u)

    weights = draw(6, 5), draw(5, 6)
    cases = [
        (feed_forward, [(draw(n, 4, 6), *weights) for n in (2, 3, 5)], [AG, AG, RS, RS]),
        (attention, [tuple(draw(n, 3, 4, 8) for _ in range(3)) for n in (2, 3)], [ATTENTION]),
    ]
    for fn, batches, fused in cases:
        for inputs in batches:
            results, grads = run(fn, inputs)
            for t in inputs[: 1 if fn is feed_forward else 3]:
                torch._dynamo.mark_dynamic(t, 0)
            compiled = through_passes(fn, inputs, Options())
            for got, want in zip(
                [*compiled.results, *compiled.grads], [*results, *grads], strict=True
            ):
                torch.testing.assert_close(got, want)
            found = sorted(str(d.fused_into) for d in compiled.report.fused)
            assert found == fused, str(compiled.report)
            assert not compiled.report.left, str(compiled.report)


def test_dynamic_batch(ranks: Ranks) -> None:
    ranks.run(2, with_dynamic_batch, int(torch.randint(1 << 30, ())))


def two_groups(group: dist.ProcessGroup, seed: int) -> None:
    """Rows gathered over one dimension of a mesh, products scattered over the other."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh.get_group("a"), mesh.get_group("b")
    generator = torch.Generator().manual_seed(seed + group.rank())
    shapes = ((4, 6), (6, 5), (6, 5))
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    for t in inputs:
        t.requires_grad_()

    def fn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        return scatter(gather(x, 0, a) @ w, 0, b), gather(x, 0, b) @ u

    results, grads = run(fn, inputs)
    compiled = through_passes(fn, inputs, Options())
    for got, want in zip([*compiled.results, *compiled.grads], [*results, *grads], strict=True):
        torch.testing.assert_close(got, want)
    names = {a.group_name, b.group_name}
    assert {d.group for d in compiled.report.fused} == names, str(compiled.report)


def test_groups_of_a_mesh_are_told_apart(ranks: Ranks) -> None:
    ranks.run(4, two_groups, int(torch.randint(1 << 30, ())))


ON_TWO = [(2, name) for name in graphs(2)]
ON_FOUR = [(4, name) for name in graphs(4)]


# Each on two ranks, every third one on four as well.
@pytest.mark.parametrize(("world_size", "name"), some(*ON_TWO, of=[*ON_TWO, *ON_FOUR[::3]]))
def test_graph(ranks: Ranks, world_size: int, name: str) -> None:
    ranks.run(world_size, check, name, int(torch.randint(1 << 30, ())))
