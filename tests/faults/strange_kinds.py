"""Kinds of tensors that ops seldom see."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

Tensors = list[torch.Tensor]


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
