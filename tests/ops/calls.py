"""Each public op as a function of its floating inputs, for tests that run all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.schedule.layout import SequenceLayout

OPS = torch.ops.symm_mem
Tensors = list[torch.Tensor]


def causal(b: Any, h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return q_idx >= kv_idx


def distance(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
    return score - 0.1 * (q_idx - kv_idx)


@dataclass
class Call:
    """An op: `run(inputs)` returns its floating outputs."""

    run: Callable[..., Tensors]
    inputs: Tensors


def waited(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def calls(group: dist.ProcessGroup, dtype: torch.dtype = torch.float64) -> dict[str, Call]:
    """Ops that have a gradient, on inputs which are the same on all ranks but for a factor."""
    W, name = group.size(), group.group_name
    rank = group.rank()

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * (1 + rank)).to(dtype)

    q, k, v = (rand(1, 2, 20, 4) for _ in range(3))
    layout = SequenceLayout(W, tuple(range(W)), (20,) * W)

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return list(
            flex_all_gather_attention(
                q, k, v, group=resolve(name), layout=layout, mask_mod=causal, score_mod=distance
            )
        )

    def gather(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        full, outs = OPS.fused_all_gather_matmul(x, [a, b], 0, name)
        return [full, *outs]

    def in_place(x: torch.Tensor) -> Tensors:
        return [OPS.two_shot_all_reduce_(x * 1, "avg", name)]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return list(OPS.fused_all_gather_attention(q, k, v, name, is_causal=True))

    x = rand(2 * W, 4)
    sizes = [*range(1, W + 1)]
    uneven = (sizes, rank)
    return {
        "fused_all_gather_matmul": Call(gather, [rand(3, 4), rand(4, 5), rand(4, 2)]),
        "fused_matmul_reduce_scatter": Call(
            lambda x, w: [OPS.fused_matmul_reduce_scatter(x, w, "avg", 0, name)], [x, rand(4, 3)]
        ),
        "fused_matmul_all_reduce": Call(
            lambda x, w, b: [OPS.fused_matmul_all_reduce(x, w, b, "avg", name)],
            [rand(5, rank), rand(rank, 3), rand(3)],
        ),
        "all_gather_kv": Call(lambda k, v: list(OPS.all_gather_kv(k, v, 2, name)), [k, v]),
        "exchange_heads": Call(
            lambda x, y: OPS.exchange_heads([x, y], True, name),
            [rand(1, W, 3, 4), rand(1, W, 3, 2)],
        ),
        "project_to_heads": Call(
            lambda x, w, b: OPS.project_to_heads(x, [w, w], [b, b], 2, name),
            [rand(1, 3, 4), rand(4, 2 * W), rand(2 * W)],
        ),
        "project_from_heads": Call(
            lambda x, w: OPS.project_from_heads([x], [w], name)[:1],
            [rand(1, 2, 3 * W, 4), rand(8 * W, 3)],
        ),
        "exchange_halo": Call(lambda x: [OPS.exchange_halo(x, 1, 2, 0, name)], [x]),
        "scan_states": Call(
            lambda x, t: [OPS.scan_states(x, t, True, False, name)], [rand(2, 3, 4), rand(2, 3, 3)]
        ),
        "_low_contention_all_gather": Call(
            lambda x: [waited(OPS._low_contention_all_gather(x, name))], [x]
        ),
        "_low_contention_reduce_scatter": Call(
            lambda x: [waited(OPS._low_contention_reduce_scatter(x, "avg", name))], [x]
        ),
        "_all_gather_matmul_split": Call(
            lambda x, w: OPS._all_gather_matmul_split(x, [w], 0, name, *uneven, return_A=False)[1],
            [rand(sizes[rank], 4), rand(4, 3)],
        ),
        "_matmul_reduce_scatter_split": Call(
            lambda x, w: [OPS._matmul_reduce_scatter_split(x, w, "sum", 0, name, *uneven)],
            [rand(sum(sizes), 4), rand(4, 3)],
        ),
        "_low_contention_all_gather_split": Call(
            lambda x: [waited(OPS._low_contention_all_gather_split(x, name, *uneven))],
            [rand(sizes[rank], 4)],
        ),
        "_low_contention_reduce_scatter_split": Call(
            lambda x: [waited(OPS._low_contention_reduce_scatter_split(x, "avg", name, *uneven))],
            [rand(sum(sizes), 4)],
        ),
        "one_shot_all_reduce": Call(lambda x: [OPS.one_shot_all_reduce(x, "sum", name)], [x]),
        "one_shot_all_reduce_copy": Call(
            lambda x: [OPS.one_shot_all_reduce_copy(x.new_empty(2 * W * 4), x, "sum", name)], [x]
        ),
        "two_shot_all_reduce_": Call(in_place, [x]),
        "fused_all_gather_attention": Call(attention, [q, k, v]),
        "flex_all_gather_attention": Call(flex, [q, k, v]),
    }


ATTENTION = ("fused_all_gather_attention", "flex_all_gather_attention")
NAMES = (
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fused_matmul_all_reduce",
    "all_gather_kv",
    "exchange_heads",
    "project_to_heads",
    "project_from_heads",
    "exchange_halo",
    "scan_states",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
    "_all_gather_matmul_split",
    "_matmul_reduce_scatter_split",
    "_low_contention_all_gather_split",
    "_low_contention_reduce_scatter_split",
    "one_shot_all_reduce",
    "one_shot_all_reduce_copy",
    "two_shot_all_reduce_",
    *ATTENTION,
)


def leaves(tensors: Tensors) -> Tensors:
    return [t.detach().clone().requires_grad_() for t in tensors]


def trained(call: Call, inputs: Tensors | None = None) -> tuple[Tensors, Tensors]:
    """Outputs of a forward pass and gradients of a backward pass of a call."""
    given = leaves(call.inputs) if inputs is None else inputs
    outputs = call.run(*given)
    loss: Any = sum(out.square().sum() for out in outputs)
    return [out.detach() for out in outputs], list(torch.autograd.grad(loss, given))
