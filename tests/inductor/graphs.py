"""Runs a function through AOT autograd and the passes, without Inductor's code generation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import DTensor

from symm_cp import inductor
from symm_cp.inductor.decisions import Report, recording
from symm_cp.inductor.options import Options
from symm_cp.inductor.passes import Pass, fuse_joint, fuse_post_grad

AG, RS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
AR, SUM, AR8 = (
    "fused_matmul_all_reduce",
    "_fused_matmuls_all_reduce",
    "fused_scaled_matmul_all_reduce",
)
AG8, RS8 = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
ATTENTION = "fused_all_gather_attention"
_DEFAULT = Options()


@dataclass(frozen=True)
class Case:
    """A function of (group, *inputs), the ops that it is fused into, and reasons for the rest."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    fused: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    grad: bool = False
    dtype: torch.dtype = torch.float64
    options: Options = _DEFAULT


def gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(x, dim, group)


def scatter(x: torch.Tensor, dim: int, group: Any, op: str = "sum") -> torch.Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, op, dim, group)


def draw(group: Any, seed: int, *shapes: Sequence[int], **kwargs: Any) -> list[torch.Tensor]:
    """Returns random float64 tensors of this rank, or as `kwargs` say, that need gradients."""
    generator = torch.Generator().manual_seed(seed + group.rank())
    kwargs = {"dtype": torch.float64, "requires_grad": True, **kwargs}
    return [torch.randn(shape, generator=generator, **kwargs) for shape in shapes]


def draw_seed() -> int:
    return int(torch.randint(1 << 30, ()))


@dataclass
class Compiled:
    """Results, gradients, decisions and the names of all ops that ran."""

    results: list[torch.Tensor]
    grads: list[torch.Tensor]
    report: Report
    ops: list[str]


def through_passes(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    options: Options,
    module: torch.nn.Module | None = None,
) -> Compiled:
    """Compiles and runs forward and, where an input needs a gradient, backward.

    Computes gradients of the inputs and of the parameters of `module`.
    """
    ops: list[str] = []

    def compile_one(gm: torch.fx.GraphModule, _: Any) -> Any:
        Pass("post", fuse_post_grad, options, None)(gm.graph)
        ops.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        # Like Inductor, which lets a forward graph choose the strides of the tensors that it saves.
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        gm.recompile()
        return make_boxed_func(gm.forward)

    def partition(gm: torch.fx.GraphModule, joint: Any, **kwargs: Any) -> Any:
        Pass("joint", fuse_joint, options, None)(gm.graph)
        gm.recompile()
        return min_cut_rematerialization_partition(gm, joint, **kwargs)

    def infer(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        Pass("joint", fuse_joint, options, None)(gm.graph)
        return compile_one(gm, inputs)

    backend = aot_autograd(
        fw_compiler=compile_one,
        bw_compiler=compile_one,
        inference_compiler=infer,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with recording() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results, grads = run(torch.compile(fn, backend=backend), inputs, module)
    return Compiled(results, grads, report, ops)


def loss(result: torch.Tensor) -> torch.Tensor:
    """A loss with slope 1 or -1 at large elements; a sine's slope would depend on the last bits."""
    return (result.square() + 1).sqrt().sum()


def run(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    module: torch.nn.Module | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns results and gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = fn(*inputs)
        results = [output] if isinstance(output, torch.Tensor) else list(output)
        leaves = [t for t in inputs if t.requires_grad]
        leaves += module.parameters() if module is not None else ()
        outputs = [loss(t) for t in results if t.requires_grad]
        grads = list(torch.autograd.grad(outputs, leaves)) if outputs else []
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    return [t.detach() for t in results], grads


def close(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], within: float | None = None
) -> None:
    """Compares tensors; `within` is relative to the largest element, or to 1 if that is larger."""
    tolerance: dict[str, float] = {}
    for a, b in zip(got, want, strict=True):
        if within is not None:
            size = float(b.abs().max()) if b.numel() else 0.0
            tolerance = {"rtol": 0.0, "atol": within * max(1.0, size)}
        torch.testing.assert_close(a, b, **tolerance)


def compare(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    options: Options = _DEFAULT,
    module: torch.nn.Module | None = None,
    within: float | None = None,
) -> Compiled:
    """Compares results and gradients of `fn` through the passes with those of eager mode."""
    results, grads = run(fn, inputs, module)
    compiled = through_passes(fn, inputs, options, module)
    close([*compiled.results, *compiled.grads], [*results, *grads], within)
    return compiled


def without_kernels(**options: Any) -> Any:
    """Inductor calls torch's kernels: compiling its own takes a minute for two ranks."""
    return inductor_config.patch(fallback_by_default=True, force_disable_caches=True, **options)


def compare_code(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    module: torch.nn.Module | None = None,
    within: float | None = None,
    reference: Callable[..., Any] | None = None,
) -> str:
    """Compares as `compare` does, through Inductor; returns the code that it generates."""
    with without_kernels():
        results, grads = run(reference or fn, inputs, module)
        torch._dynamo.reset()
        compiled = torch.compile(fn, options=inductor.compile_options())
        (found, found_grads), code = run_and_get_code(run, compiled, inputs, module)
    close([*found, *found_grads], [*results, *grads], within)
    assert [t.stride() for t in found] == [t.stride() for t in results]
    return "\n".join(code)
