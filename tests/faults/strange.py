"""Small calls of every op, entry point and collective, to give strange tensors to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import wait_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import symm_cp
from symm_cp.ops import op as declaration
from symm_cp.ops.collectives import gpu_only
from tests.ops.calls import caller, completed

OPS = torch.ops.symm_mem
FLOAT8 = torch.float8_e4m3fn
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Op:
    """A small call."""

    tensors: Callable[[int], Tensors]  # of a rank of W; random
    call: Callable[[Tensors, dist.ProcessGroup], Any]
    writes: int | None = None  # the argument that takes the result


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _f8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(FLOAT8)


def _scaled(W: int) -> Tensors:
    return [_f8(4 * W, 16), _f8(16, 16).t(), torch.tensor(1.0), torch.tensor(1.0)]


def _declared(op: declaration.Op) -> Op:
    """The example call of an op; parts that may be uneven have 4 rows on all ranks."""

    def flat(on: declaration.Caller) -> tuple[list[Any], Any]:
        assert op.example is not None
        return tree_flatten(tuple(op.example(on)))

    def tensors(W: int) -> Tensors:
        leaves, _ = flat(declaration.Caller("", 0, W, [4] * W))
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    def call(given: Tensors, group: dist.ProcessGroup) -> Any:
        leaves, spec = flat(caller(group, sizes=[4] * group.size()))
        remaining = iter(given)
        filled = [next(remaining) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        return completed(op, getattr(OPS, op.name)(*args, **kwargs))

    kinds = [
        argument for argument in op.overload._schema.arguments if "Tensor" in str(argument.type)
    ]
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in kinds
    ]
    return Op(tensors, call, written.index(True) if any(written) else None)


#: The first returns memory of the peers, the last take tensors in symmetric memory only
#: (tests/ops/test_gpu_only.py). Only graphs and gradients call the others, with layouts,
#: modifiers or saved tensors that they hold: users call `flex_attention`, which is among the entry
#: points.
LEFT_OUT = (
    "get_remote_tensors",
    "flex_all_gather_attention",
    "flex_all_gather_attention_backward",
    *(op.name for op in gpu_only.OPS),
)


def _raw_ops() -> dict[str, Op]:
    return {op.name: _declared(op) for op in declaration.declared() if op.name not in LEFT_OUT}


def _recurrence(W: int) -> Tensors:
    return [_r(1, 4, 2, 3), _r(1, 4, 2, 3), _r(1, 4, 2, 3), -_r(1, 4, 2).abs(), _r(1, 4, 2)]


def _in_context(attend: Callable[..., Any], heads: int = 2, **options: Any) -> Op:
    """A function of torch on parts of a sequence, within `context_parallel`."""

    def call(given: Tensors, group: dist.ProcessGroup) -> Any:
        with symm_cp.context_parallel(group):
            return attend(*given, **options)

    return Op(lambda W: [_r(1, heads, 4, 8) for _ in range(3)], call)


def _varlen() -> Op:
    """Two documents of 3 and 5 tokens, on two ranks."""

    def call(given: Tensors, group: dist.ProcessGroup) -> Any:
        *tensors, edges = given
        balancer = symm_cp.Sequential(4 * group.size(), group.size())
        with symm_cp.context_parallel(group, load_balancer=balancer):
            return varlen_attn(*tensors, edges, edges, 5, 5)

    edges = torch.tensor([0, 3, 8], dtype=torch.int32)
    return Op(lambda W: [*(_r(4, 2, 8) for _ in range(3)), edges], call)


def _causal(b: Any, h: Any, query: Any, key: Any) -> Any:
    return query >= key


def _entry_points() -> dict[str, Op]:
    s = symm_cp
    return {
        "all_gather_matmul": Op(
            lambda W: [_r(4, 6), _r(6, 5)], lambda t, g: s.all_gather_matmul(*t, group=g)
        ),
        "matmul_reduce_scatter": Op(
            lambda W: [_r(4 * W, 6), _r(6, 5)], lambda t, g: s.matmul_reduce_scatter(*t, group=g)
        ),
        "matmul_all_reduce": Op(
            lambda W: [_r(4, 6), _r(6, 5), torch.ones(5)],
            lambda t, g: s.matmul_all_reduce(t[0], t[1], bias=t[2], group=g),
        ),
        "scaled_all_gather_matmul": Op(
            _scaled,
            lambda t, g: s.scaled_all_gather_matmul(*t, group=g, out_dtype=torch.float32),
        ),
        "scaled_matmul_reduce_scatter": Op(
            _scaled,
            lambda t, g: s.scaled_matmul_reduce_scatter(*t, group=g, out_dtype=torch.float32),
        ),
        "scaled_matmul_all_reduce": Op(
            _scaled, lambda t, g: s.scaled_matmul_all_reduce(*t, group=g, out_dtype=torch.float32)
        ),
        "low_contention_all_gather": Op(
            lambda W: [_r(4, 6)],
            lambda t, g: wait_tensor(s.low_contention_all_gather(*t, group=g)),
        ),
        "low_contention_reduce_scatter": Op(
            lambda W: [_r(4 * W, 6)],
            lambda t, g: wait_tensor(s.low_contention_reduce_scatter(*t, group=g)),
        ),
        "all_gather_attention": Op(
            lambda W: [_r(1, 2, 4, 8) for _ in range(3)],
            lambda t, g: s.all_gather_attention(*t, group=g, is_causal=True),
        ),
        "ulysses": Op(
            lambda W: [_r(1, W, 4, 8) for _ in range(3)],
            lambda t, g: s.all_gather_attention(*t, group=g, is_causal=True, method="ulysses"),
        ),
        "scaled_dot_product_attention": _in_context(F.scaled_dot_product_attention, is_causal=True),
        "flex_attention": _in_context(
            flex_attention, block_mask=create_block_mask(_causal, None, None, 8, 8, "cpu")
        ),
        "flex_attention with a score_mod": _in_context(
            flex_attention, score_mod=lambda score, b, h, query, key: score + query - key
        ),
        "varlen_attn": _varlen(),
        "all_gather_kv_entry": Op(
            lambda W: [_r(1, 2, 4, 3), _r(1, 2, 4, 3)],
            lambda t, g: s.all_gather_kv(*t, group=g),
        ),
        "exchange_halo_entry": Op(
            lambda W: [_r(1, 2, 4)], lambda t, g: s.exchange_halo(*t, 1, group=g)
        ),
        "scan_states_entry": Op(
            lambda W: [_r(2, 3, 3), _r(2, 3, 3)],
            lambda t, g: s.scan_states(t[0], decay=t[1], group=g),
        ),
        "gated_delta_rule": Op(_recurrence, lambda t, g: s.gated_delta_rule(*t, group=g)),
        "gated_linear_attention": Op(
            lambda W: _recurrence(W)[:4], lambda t, g: s.gated_linear_attention(*t, group=g)
        ),
        "rwkv7": Op(
            lambda W: [_r(1, 4, 2, 3), -_r(1, 4, 2, 3).abs(), *(_r(1, 4, 2, 3) for _ in range(4))],
            lambda t, g: s.rwkv7(*t, group=g),
        ),
        "spread_cache_attention_scattered_entry": Op(
            lambda W: [_r(1, 2 * W, 1, 3), _r(1, W, 4, 3), _r(1, W, 4, 3)],
            lambda t, g: s.spread_cache_attention(*t, group=g, scatter_heads=True),
        ),
        "causal_convolution": Op(
            lambda W: [_r(1, 2, 4), _r(2, 3)],
            lambda t, g: s.causal_convolution(*t, group=g),
        ),
        "sequence_to_heads": Op(
            lambda W: [_r(1, 2 * W, 4, 3)], lambda t, g: s.sequence_to_heads(t[0], group=g)
        ),
        "heads_to_sequence": Op(
            lambda W: [_r(1, 2, 4 * W, 3)], lambda t, g: s.heads_to_sequence(t[0], group=g)
        ),
        "ulysses_projection": Op(
            lambda W: [_r(1, 4, 6), _r(6, 4 * W), _r(4 * W)],
            lambda t, g: s.ulysses_projection(t[0], t[1], biases=t[2], features=2, group=g),
        ),
        "ulysses_output_projection": Op(
            lambda W: [_r(1, 2, 4 * W, 3), _r(6 * W, 5), torch.ones(5)],
            lambda t, g: s.ulysses_output_projection(t[0], t[1], bias=t[2], group=g),
        ),
    }


def _collectives() -> dict[str, Op]:
    """Collectives of torch.distributed, over a group of the backend symm_cp.

    Functional ones are left out: they copy their input before they call a backend, and torch
    crashes if the input's storage was freed.
    """

    def all_reduce(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.all_reduce(t[0], group=g)
        return t[0]

    def all_reduce_coalesced(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.all_reduce_coalesced(t, group=g)
        return t

    def in_background(t: Tensors, g: dist.ProcessGroup) -> Any:
        work = dist.all_reduce(t[0], group=g, async_op=True)
        assert work is not None
        work.wait()
        return t[0]

    def reduce(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.reduce(t[0], group_dst=1, group=g)
        return t[0] if g.rank() == 1 else None

    def broadcast(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.broadcast(t[0], group_src=1, group=g)
        return t[0]

    def all_gather(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.all_gather(t[1:], t[0], group=g)
        return t[1:]

    def all_gather_into_tensor(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.all_gather_into_tensor(t[1], t[0], group=g)
        return t[1]

    def reduce_scatter(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.reduce_scatter(t[0], t[1:], group=g)
        return t[0]

    def reduce_scatter_tensor(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.reduce_scatter_tensor(t[1], t[0], group=g)
        return t[1]

    def all_to_all(t: Tensors, g: dist.ProcessGroup) -> Any:
        W = g.size()
        dist.all_to_all(t[:W], t[W:], group=g)
        return t[:W]

    def all_to_all_single(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.all_to_all_single(t[1], t[0], group=g)
        return t[1]

    def gather(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.gather(t[0], t[1:] if g.rank() == 0 else None, group=g, group_dst=0)
        return t[1:] if g.rank() == 0 else None

    def scatter(t: Tensors, g: dist.ProcessGroup) -> Any:
        dist.scatter(t[0], t[1:] if g.rank() == 0 else None, group=g, group_src=0)
        return t[0]

    def parts(W: int) -> Tensors:
        return [_r(2, 3) for _ in range(W + 1)]

    return {
        "all_reduce": Op(lambda W: [_r(4, 6)], all_reduce, writes=0),
        "all_reduce of several": Op(lambda W: [_r(4, 6), _r(3, 2)], all_reduce_coalesced),
        "all_reduce in the background": Op(lambda W: [_r(4, 6)], in_background, writes=0),
        "reduce": Op(lambda W: [_r(4, 6)], reduce),
        "broadcast": Op(lambda W: [_r(4, 6)], broadcast, writes=0),
        "all_gather": Op(parts, all_gather),
        "all_gather_into_tensor": Op(
            lambda W: [_r(4, 6), torch.empty(4 * W, 6)], all_gather_into_tensor, writes=1
        ),
        "reduce_scatter": Op(parts, reduce_scatter, writes=0),
        "reduce_scatter_tensor": Op(
            lambda W: [_r(4 * W, 6), torch.empty(4, 6)], reduce_scatter_tensor, writes=1
        ),
        "all_to_all": Op(lambda W: [_r(2, 3) for _ in range(2 * W)], all_to_all),
        "all_to_all_single": Op(
            lambda W: [_r(2 * W, 3), torch.empty(2 * W, 3)], all_to_all_single, writes=1
        ),
        "gather": Op(parts, gather),
        "scatter": Op(parts, scatter, writes=0),
    }


RAW, ENTRY_POINTS, COLLECTIVES = _raw_ops(), _entry_points(), _collectives()
ALL: dict[str, Op] = {**RAW, **ENTRY_POINTS, **COLLECTIVES}


def values(result: Any) -> Tensors:
    """The tensors of a result."""
    return [x.detach() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def called(op: Op, tensors: Tensors, group: dist.ProcessGroup) -> Any:
    """The results of a call, or the error."""
    try:
        return values(op.call(tensors, group))
    except Exception as error:
        return error
