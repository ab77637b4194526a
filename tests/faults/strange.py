"""Kinds of tensors that ops seldom see, and small calls of every op to give them to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import wait_tensor
from torch.utils._pytree import tree_map_only

import symm_cp

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


def _deleted(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def _shrunk(x: torch.Tensor) -> torch.Tensor:
    """Its storage is half of what it says."""
    x = x.clone()
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


#: By name: makes a strange tensor of a plain one. Raises where there is none of that shape.
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


#: Those of which no kernel of ours knows: refused wherever they come.
WITHOUT_DENSE_MEMORY = (
    "nested", "jagged", "sparse", "sparse_hybrid", "csr", "csc", "bsr", "mkldnn", "quantised",
    "quantised_by_channel", "quint4x2",
)  # fmt: skip
#: Those whose storage is not there.
WITHOUT_STORAGE = ("deleted", "shrunk")
#: Those that stand for shapes only: a call with them returns others, and nobody takes part.
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


def _named(op: str, tensors: Callable[[int], Tensors], *options: Any, **named: Any) -> Op:
    """Of an op whose tensors come first; "group" in the options stands for its name."""

    def call(given: Tensors, group: dist.ProcessGroup) -> Any:
        rest = [_option(option, group) for option in options]
        return getattr(OPS, op)(*given, *rest, **named)

    return Op(tensors, call)


def _option(option: Any, group: dist.ProcessGroup) -> Any:
    return {"group": group.group_name, "rank": group.rank()}.get(str(option), option)


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _f8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(FLOAT8)


def _scaled(W: int) -> Tensors:
    return [_f8(4 * W, 16), _f8(16, 16).t(), torch.tensor(1.0), torch.tensor(1.0)]


def _raw_ops() -> dict[str, Op]:
    def gather_scaled(t: Tensors, group: dist.ProcessGroup) -> Any:
        return OPS.fused_all_gather_scaled_matmul(
            t[0], [t[1]], t[2], [t[3]], 0, group.group_name, [None], [None], [torch.float32],
            [False],
        )  # fmt: skip

    def scatter_scaled(t: Tensors, group: dist.ProcessGroup) -> Any:
        return OPS.fused_scaled_matmul_reduce_scatter(
            *t, "sum", 0, 0, group.group_name, [4 * group.size(), 16], None, None, torch.float32
        )

    def attention_backward(t: Tensors, group: dist.ProcessGroup) -> Any:
        return OPS.fused_all_gather_attention_backward(*t, group.group_name)

    return {
        "fused_all_gather_matmul": Op(
            lambda W: [_r(4, 6), _r(6, 5), _r(6, 3)],
            lambda t, g: OPS.fused_all_gather_matmul(t[0], t[1:], 0, g.group_name),
        ),
        "_all_gather_matmul_split": Op(
            lambda W: [_r(4, 6), _r(6, 5)],
            lambda t, g: OPS._all_gather_matmul_split(
                t[0], t[1:], 0, g.group_name, [4] * g.size(), g.rank()
            ),
        ),
        "fused_matmul_reduce_scatter": _named(
            "fused_matmul_reduce_scatter", lambda W: [_r(4 * W, 6), _r(6, 5)], "sum", 0, "group"
        ),
        "_matmul_reduce_scatter_split": Op(
            lambda W: [_r(4 * W, 6), _r(6, 5)],
            lambda t, g: OPS._matmul_reduce_scatter_split(
                *t, "sum", 0, g.group_name, [4] * g.size(), g.rank()
            ),
        ),
        "_fused_matmuls_reduce_scatter": Op(
            lambda W: [_r(4 * W, 6), _r(6, 5), _r(4 * W, 5)],
            lambda t, g: OPS._fused_matmuls_reduce_scatter(
                t[:1], t[1:2], t[2], "sum", 0, g.group_name
            ),
        ),
        "_fused_all_gather_weight_grad": Op(
            lambda W: [_r(4, 6), _r(4 * W, 3)],
            lambda t, g: OPS._fused_all_gather_weight_grad(t[0], t[1:], 0, g.group_name),
        ),
        "_fused_matmul_reduce_scatter_backward": _named(
            "_fused_matmul_reduce_scatter_backward",
            lambda W: [_r(4, 5), _r(4 * W, 6), _r(6, 5)], "sum", 0, "group", True, True,
        ),
        "fused_matmul_all_reduce": _named(
            "fused_matmul_all_reduce", lambda W: [_r(4, 6), _r(6, 5), torch.ones(5)], "sum", "group"
        ),
        "_fused_matmuls_all_reduce": Op(
            lambda W: [_r(4, 6), _r(6, 5), torch.ones(5)],
            lambda t, g: OPS._fused_matmuls_all_reduce(
                t[:1], t[1:2], None, t[2], "sum", g.group_name
            ),
        ),
        "fused_all_gather_scaled_matmul": Op(_scaled, gather_scaled),
        "fused_scaled_matmul_reduce_scatter": Op(_scaled, scatter_scaled),
        "fused_scaled_matmul_all_reduce": _named(
            "fused_scaled_matmul_all_reduce", _scaled, "sum", "group", out_dtype=torch.float32
        ),
        "_low_contention_all_gather": Op(
            lambda W: [_r(4, 6)],
            lambda t, g: wait_tensor(OPS._low_contention_all_gather(*t, g.group_name)),
        ),
        "_low_contention_all_gather_split": Op(
            lambda W: [_r(4, 6)],
            lambda t, g: wait_tensor(
                OPS._low_contention_all_gather_split(t[0], g.group_name, [4] * g.size(), g.rank())
            ),
        ),
        "_low_contention_all_gather_out": Op(
            lambda W: [_r(4, 6), torch.empty(4 * W, 6)],
            lambda t, g: wait_tensor(
                OPS._low_contention_all_gather_out(t[0], g.group_name, t[1])
            ),
            writes=1,
        ),
        "_low_contention_reduce_scatter": Op(
            lambda W: [_r(4 * W, 6)],
            lambda t, g: wait_tensor(OPS._low_contention_reduce_scatter(*t, "sum", g.group_name)),
        ),
        "_low_contention_reduce_scatter_split": Op(
            lambda W: [_r(4 * W, 6)],
            lambda t, g: wait_tensor(
                OPS._low_contention_reduce_scatter_split(
                    t[0], "sum", g.group_name, [4] * g.size(), g.rank()
                )
            ),
        ),
        "_low_contention_reduce_scatter_out": Op(
            lambda W: [_r(4 * W, 6), torch.empty(4, 6)],
            lambda t, g: wait_tensor(
                OPS._low_contention_reduce_scatter_out(t[0], "sum", g.group_name, t[1])
            ),
            writes=1,
        ),
        "one_shot_all_reduce": _named("one_shot_all_reduce", lambda W: [_r(4, 6)], "sum", "group"),
        "_one_shot_all_reduce": _named(
            "_one_shot_all_reduce", lambda W: [_r(4, 6)], "sum", "group"
        ),
        "_all_reduce": _named("_all_reduce", lambda W: [_r(4, 6)], "sum", "group"),
        "one_shot_all_reduce_out": Op(
            lambda W: [_r(4, 6), torch.empty(4, 6)],
            lambda t, g: OPS.one_shot_all_reduce_out(t[0], "sum", g.group_name, t[1]),
            writes=1,
        ),
        "one_shot_all_reduce_copy": _named(
            "one_shot_all_reduce_copy", lambda W: [_r(4, 6), _r(4, 6)], "sum", "group"
        ),
        "one_shot_all_reduce_copy_out": Op(
            lambda W: [_r(4, 6), _r(4, 6), torch.empty(4, 6)],
            lambda t, g: OPS.one_shot_all_reduce_copy_out(*t[:2], "sum", g.group_name, t[2]),
            writes=2,
        ),
        "two_shot_all_reduce_": Op(
            lambda W: [_r(4, 6)],
            lambda t, g: OPS.two_shot_all_reduce_(t[0], "sum", g.group_name),
            writes=0,
        ),
        "two_shot_all_reduce_out": Op(
            lambda W: [_r(4, 6), torch.empty(4, 6)],
            lambda t, g: OPS.two_shot_all_reduce_out(t[0], "sum", g.group_name, t[1]),
            writes=1,
        ),
        "reduce_scatter_out": Op(
            lambda W: [_r(4 * W, 6), torch.empty(4, 6)],
            lambda t, g: OPS.reduce_scatter_out(t[0], g.group_name, False, t[1]),
            writes=1,
        ),
        "_reduce_scatter": _named("_reduce_scatter", lambda W: [_r(4 * W, 6)], "group", False),
        "all_gather_kv": _named(
            "all_gather_kv", lambda W: [_r(1, 2, 4, 3), _r(1, 2, 4, 3)], 2, "group"
        ),
        "_all_gather_kv_backward": _named(
            "_all_gather_kv_backward",
            lambda W: [_r(1, 2, 4 * W, 3), _r(1, 2, 4 * W, 3)], 2, "group",
        ),
        "exchange_halo": _named("exchange_halo", lambda W: [_r(1, 4, 3)], 1, 1, 1, "group"),
        "_add_halo": _named("_add_halo", lambda W: [_r(1, 6, 3)], 1, 1, 1, "group"),
        "scan_states": _named(
            "scan_states", lambda W: [_r(2, 3, 3), _r(2, 3, 3)], True, False, "group"
        ),
        "_delta_rule_states": _named(
            "_delta_rule_states",
            lambda W: [_r(2, 3, 4, 5), _r(2, 3, 4, 5), _r(2, 3, 4, 6), _r(2, 3)], "group",
        ),
        "_delta_rule_grads": _named(
            "_delta_rule_grads",
            lambda W: [
                _r(2, 3, 4, 6), _r(2, 4, 5, 6), _r(2, 3, 4, 5), _r(2, 3, 4, 5), _r(2, 3),
            ], "group",
        ),
        "exchange_heads": Op(
            lambda W: [_r(1, 2 * W, 4, 3), _r(1, 2 * W, 4, 3)],
            lambda t, g: OPS.exchange_heads(t, True, g.group_name),
        ),
        "project_to_heads": Op(
            lambda W: [_r(1, 4, 6), _r(6, 4 * W), _r(4 * W)],
            lambda t, g: OPS.project_to_heads(t[0], t[1:2], t[2:], 2, g.group_name),
        ),
        "project_from_heads": Op(
            lambda W: [_r(1, 2, 4 * W, 3), _r(6 * W, 5)],
            lambda t, g: OPS.project_from_heads(t[:1], t[1:], g.group_name),
        ),
        "fused_all_gather_attention": _named(
            "fused_all_gather_attention", lambda W: [_r(1, 2, 4, 8) for _ in range(3)], "group"
        ),
        "fused_all_gather_attention_backward": Op(
            lambda W: [*(_r(1, 2, 4, 8) for _ in range(5)), _r(1, 2, 4)], attention_backward
        ),
    }  # fmt: skip


def _recurrence(W: int) -> Tensors:
    return [_r(1, 4, 2, 3), _r(1, 4, 2, 3), _r(1, 4, 2, 3), -_r(1, 4, 2).abs(), _r(1, 4, 2)]


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
    """Of torch.distributed, over a group of the backend symm_cp.

    Functional ones copy their input before they call a backend: torch crashes where its storage was
    freed.
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
