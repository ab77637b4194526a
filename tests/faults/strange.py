"""Kinds of tensors that ops seldom see, and small calls of every op to give them to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import wait_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import symm_cp
from symm_cp.ops import op as declaration
from symm_cp.ops.collectives import gpu_only
from tests.ops.calls import caller, completed

OPS = torch.ops.symm_mem
FLOAT8 = torch.float8_e4m3fn
Tensors = list[torch.Tensor]


# --- kinds of tensors ------------------------------------------------------------------------


class Unwrapping(torch.Tensor):
    """A wrapper that calls ops with the tensor inside, and returns plain results."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Unwrapping:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Unwrapping, lambda x: x.inner, (args, kwargs or {}))
        return op(*args, **kwargs)


class Refusing(Unwrapping):
    """A wrapper that has no rule for any op."""

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError(f"no rule for {op}")


class Careless(torch.Tensor):
    """A subclass that changes nothing."""


def _with_storage(x: torch.Tensor) -> torch.Tensor:
    assert x.nbytes, "an empty tensor has none"
    return x.clone()


def _deleted(x: torch.Tensor) -> torch.Tensor:
    x = _with_storage(x)
    x.untyped_storage().resize_(0)
    return x


def _shrunk(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage has half the bytes that it needs."""
    x = _with_storage(x)
    x.untyped_storage().resize_(x.nbytes // 2)
    return x


def _conj(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x.float(), -x.float()).conj()


def _leaked_batch(x: torch.Tensor) -> torch.Tensor:
    """A batched tensor that outlives its vmap."""
    kept: Tensors = []

    def body(row: torch.Tensor) -> torch.Tensor:
        kept.append(row + 0)
        return row

    torch.vmap(body)(torch.stack([x.float(), x.float()]))
    return kept[0]


def _leaked_grad(x: torch.Tensor) -> torch.Tensor:
    """A tensor of torch.func.grad that outlives it."""
    kept: Tensors = []

    def body(inner: torch.Tensor) -> torch.Tensor:
        kept.append(inner * 1)
        return inner.sum()

    torch.func.grad(body)(x.float())
    return kept[0]


def _spread(x: torch.Tensor) -> torch.Tensor:
    """Elements that lie far apart."""
    wide = torch.zeros(*x.shape, 4097, dtype=x.dtype)[..., 0]
    return wide.copy_(x)


def _view_of_leaf(x: torch.Tensor) -> torch.Tensor:
    leaf = torch.stack([x, x]).requires_grad_(x.dtype.is_floating_point)
    return leaf[1]


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def _quantised(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.ones(x.shape[0]), torch.zeros(x.shape[0], dtype=torch.int64)
    return torch.quantize_per_channel(x.float(), scales, zeros, 0, torch.quint8)


def _jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x.float(), x.float()], layout=torch.jagged)


def _of_dtype(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=getattr(torch, name))

    return make


def _overlapping(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel() + 8.0).as_strided(x.shape, (1,) * x.dim())


#: Functions that make a strange tensor from a plain one, or raise if that shape allows none.
MAKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": _jagged,
    "sparse": lambda x: x.to_sparse(),
    "sparse_hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantised": _quantised,
    "quantised_by_channel": _by_channel,
    "quint4x2": _of_dtype("quint4x2"),
    **{
        name: _of_dtype(name)
        for name in (
            "uint4", "int4", "uint1", "int7", "bits8", "bits1x8", "float4_e2m1fn_x2",
            "float8_e8m0fnu", "float8_e5m2fnuz", "uint16", "uint64", "complex32", "bool",
        )
        if hasattr(torch, name)
    },
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "meta": lambda x: x.to("meta"),
    "named": lambda x: x.rename(*"abcdefgh"[: x.dim()]),
    "deleted": _deleted,
    "shrunk": _shrunk,
    "unwrapping": Unwrapping,
    "refusing": Refusing,
    "careless": lambda x: x.as_subclass(Careless),
    "functional": lambda x: torch._to_functional_tensor(x),
    "leaked_batch": _leaked_batch,
    "leaked_grad": _leaked_grad,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "conj": _conj,
    "negative": lambda x: torch._neg_view(-x),
    "complex": lambda x: x.to(torch.complex64),
    "lazy_clone": lambda x: torch._lazy_clone(x),
    "view_of_leaf": _view_of_leaf,
    "inference": _inference,
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "overlapping": _overlapping,
    "spread": _spread,
    "no_dims": lambda x: torch.tensor(1.0).to(x.dtype),
    "enormous": lambda x: torch.zeros(1, dtype=x.dtype).expand(1 << 42, *x.shape[1:]),
    "overflowing": lambda x: torch.zeros((), dtype=x.dtype).expand(1 << 31, 1 << 31),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.dtype.is_floating_point),
    "uninitialised": lambda x: torch.nn.UninitializedParameter(),
    "list": lambda x: [x],  # type: ignore[dict-item,return-value]
    "none": lambda x: None,  # type: ignore[dict-item,return-value]
}  # fmt: skip


#: Kinds that no kernel of ours supports: refused in every argument.
WITHOUT_DENSE_MEMORY = (
    "nested", "jagged", "sparse", "sparse_hybrid", "csr", "csc", "bsr", "mkldnn", "quantised",
    "quantised_by_channel", "quint4x2",
)  # fmt: skip
#: Kinds whose storage is missing or too small.
WITHOUT_STORAGE = ("deleted", "shrunk")
#: Kinds that have shapes only: a call with them returns such tensors, and no peer takes part.
STAND_INS = ("fake", "meta")


def is_shell(x: torch.Tensor) -> bool:
    """Whether torch neither copies nor compares elements of that dtype."""
    return re.search(r"int[1-7]\b|float4|bits", str(x.dtype)) is not None


def dense(x: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor with the values of a strange one."""
    if torch._is_functional_tensor(x):
        x = torch._from_functional_tensor(x)
    if isinstance(x, Unwrapping):
        x = x.inner
    if torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    x = x.detach().as_subclass(torch.Tensor)
    if is_shell(x):
        return x
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


# --- ops -------------------------------------------------------------------------------------


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
