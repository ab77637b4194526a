"""Projections to heads with RMSNorm and RoPE between the product and the exchange, as in Qwen3.

Norms and rotations of heads are the same work before and after an exchange. Before it, a rank has
the positions of its own part of the sequence, and its peers' heads travel meanwhile.

Shapes as in projection.py: x (B, s, D) varies with the rank's positions, weights (D, H * E) and
norms (E,) are replicated, results (B, h, S, E) vary with the rank's heads; the gradients of
weights, biases and norms are partial sums.

Source: `fused_qk_norm_rope` of FlashInfer and TensorRT-LLM, which do it on one GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from symm_cp import runtime
from symm_cp.ops import autocast
from symm_cp.ops.call import Call
from symm_cp.ops.heads.exchange_heads import exchange_fake, exchange_name, exchange_of, run_exchange
from symm_cp.ops.heads.packing import HeadExchange
from symm_cp.ops.heads.projection import (
    OPTIONS,
    PROJECT,
    Projection,
    flat,
    project_types,
    projected,
    rows_of,
)
from symm_cp.ops.op import BackwardOp, Caller, NoGradient, arguments
from symm_cp.ops.recipe import own_op
from symm_cp.runtime.exchange import exchanged
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result

PROJECT_NORMED = "_project_normed_to_heads"
_BACKWARD = f"{PROJECT_NORMED}_backward"
_SHAPING = (
    "SymInt features, Tensor[] norms, bool[] normed, float eps, Tensor? cos, Tensor? sin, "
    "bool[] rotated"
)
Tensors = list[torch.Tensor]


class Shaping(NamedTuple):
    """What happens to the heads of each matrix: the arguments of the op from `features` on."""

    features: int
    norms: Tensors  # of the matrices that are `normed`
    normed: list[bool]
    eps: float
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    rotated: list[bool]

    def check(self, x: torch.Tensor, weights: Tensors) -> None:
        """Raises `ValueError` or `TypeError` for arguments that do not fit."""
        matrices, features = len(weights), self.features
        if not len(self.normed) == len(self.rotated) == matrices:
            raise ValueError(
                f"{PROJECT}: norms are for {len(self.normed)} and rotated for {len(self.rotated)} "
                f"matrices, must be for {matrices}"
            )
        if len(self.norms) != sum(self.normed):
            raise ValueError(f"{PROJECT}: got {len(self.norms)} norms for {sum(self.normed)}")
        for index, norm in enumerate(self.norms):
            if list(norm.shape) != [features]:
                raise ValueError(
                    f"{PROJECT}: norms[{index}] has shape {list(norm.shape)}, must be [{features}]:"
                    " one number for each feature of a head"
                )
            if norm.dtype != x.dtype or norm.device != x.device:
                raise TypeError(
                    f"{PROJECT}: norms[{index}] is {norm.dtype} on {norm.device}, x {x.dtype} on "
                    f"{x.device}: they must agree"
                )
        if not 0 < self.eps < math.inf and self.norms:
            raise ValueError(f"{PROJECT}: eps={self.eps} must be positive and finite")
        if any(self.rotated):
            self._check_rope(x)

    def _check_rope(self, x: torch.Tensor) -> None:
        if self.features % 2:
            raise ValueError(f"{PROJECT}: rope needs an even number of features: {self.features}")
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if table is None:
                raise ValueError(f"{PROJECT}: rope has no {name}, which rotated heads need")
            whole = (*x.shape[:2], self.features)
            shape = tuple(table.shape)
            if shape not in (whole, whole[1:], (1, *whole[1:])):
                raise ValueError(
                    f"{PROJECT}: {name} of rope has shape {list(shape)}, must be {list(whole)} or "
                    f"{list(whole[1:])}: (batch, positions of this rank, features of a head)"
                )
            if not table.dtype.is_floating_point or table.device != x.device:
                raise TypeError(
                    f"{PROJECT}: {name} of rope is {table.dtype} on {table.device}, must be "
                    f"floating on {x.device}"
                )

    def tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns cosines and sines of each row, (B * s, 1, E), in the dtype of x."""
        if self.cos is None or self.sin is None or not any(self.rotated):
            return None
        whole = (*x.shape[:2], self.features)
        cos, sin = (
            table.to(x.dtype).expand(whole).reshape(math.prod(whole[:2]), 1, self.features)
            for table in (self.cos, self.sin)
        )
        return cos, sin

    def columns(self, weights: Tensors) -> list[tuple[int, int] | None]:
        """Returns for each matrix where its product is saved; None if it is not."""
        widths = [
            w.shape[1] if normed else 0 for w, normed in zip(weights, self.normed, strict=True)
        ]
        ends = list(itertools.accumulate(widths))
        pairs = zip(widths, ends, self.normed, strict=True)
        return [(end - width, end) if normed else None for width, end, normed in pairs]

    def norm_of(self, index: int) -> torch.Tensor | None:
        """Returns the norm of a matrix."""
        return self.norms[sum(self.normed[:index])] if self.normed[index] else None


def _saved(products: torch.Tensor, columns: tuple[int, int], rows: int) -> torch.Tensor:
    """Returns a matrix's part of the saved products, one after the other: (B * s, H * E)."""
    begin, end = columns
    return products[rows * begin : rows * end].view(rows, end - begin)


def _rotate(
    heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    """Writes heads * cos + (-second half, first half of heads) * sin."""
    (cos, sin), half = tables, heads.shape[-1] // 2
    torch.mul(heads, cos, out=out)
    out[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(heads[..., :half], sin[..., half:])


def _rotate_back(grad: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    (cos, sin), half = tables, grad.shape[-1] // 2
    out = grad * cos
    out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
    out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
    return out


def _norm_backward(
    grad: torch.Tensor, heads: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the heads, in their dtype, and of the norm."""
    x, g = (t.to(wide(heads.dtype)) for t in (heads, grad))
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * inverse
    of_norm = (g * normed).sum((0, 1))
    g = g * norm
    of_heads = (g - normed * (g * normed).mean(-1, keepdim=True)) * inverse
    return of_heads.to(heads.dtype), of_norm.to(norm.dtype)


class _Normed(Projection):
    """Products that are shaped on their way; those that are normed are saved for the gradient."""

    def __init__(
        self, exchange: HeadExchange, x: torch.Tensor, weights: Tensors, biases: Tensors,
        shaping: Shaping,
    ) -> None:  # fmt: skip
        super().__init__(exchange, x, weights, biases)
        self.shaping, self.tables = shaping, shaping.tables(x)
        self.columns = shaping.columns(weights)
        width = max((at[1] for at in self.columns if at is not None), default=0)
        self.products = new_result(x, (len(self.x) * width,))

    def multiply(self, index: int, heads: tuple[int, int], out: torch.Tensor) -> None:
        """Writes a range of heads, normed and rotated."""
        shaping, saved = self.shaping, self.columns[index]
        rotates = shaping.rotated[index] and self.tables is not None
        features, product = shaping.features, out
        if saved is not None:
            product = _saved(self.products, saved, len(self.x))
            product = product[:, heads[0] * features : heads[1] * features]
        elif rotates:
            product = new_result(out, out.shape)
        super().multiply(index, heads, product)
        by_head = (len(self.x), heads[1] - heads[0], features)
        shaped, to = product.view(by_head), out.view(by_head)
        norm = shaping.norm_of(index)
        if norm is not None:
            shaped = torch.nn.functional.rms_norm(shaped, norm.shape, norm, shaping.eps)
        if rotates and self.tables is not None:
            _rotate(shaped, self.tables, to)
        elif norm is not None:
            to.copy_(shaped)

    def all_heads(self, positions: int) -> Tensors:
        """Returns the heads of this rank's positions, (B, H, s, E) of each matrix."""
        found = []
        for index, part in enumerate(self.exchange.parts):
            _, heads, _, features = part.shape
            out = new_result(self.x, (len(self.x), heads * features))
            self.multiply(index, (0, heads), out)
            found.append(out.view(self.batch, positions, heads, features).transpose(1, 2))
        return found


def _check(ranks: int, x: torch.Tensor, weights: Tensors, biases: Tensors, *others: Any) -> None:
    shaping = Shaping(*others[: len(Shaping._fields)])
    projected(x, weights, biases, shaping.features)
    shaping.check(x, weights)


def _fake(
    x: torch.Tensor, weights: Tensors, biases: Tensors, *others: Any
) -> tuple[Tensors, torch.Tensor]:
    count = len(Shaping._fields)
    shaping = Shaping(*others[:count])
    products = projected(x, weights, biases, shaping.features)
    width = sum(w.shape[1] for w, normed in zip(weights, shaping.normed, strict=True) if normed)
    heads = exchange_fake(products, True, *others[count:], op=PROJECT)
    return heads, x.new_empty(x.shape[0] * x.shape[1] * width)


def _types(t: Any, norms: Any, cos: Any, sin: Any, **named: Any) -> Any:
    t.ignore(norms, cos, sin)
    heads = project_types(t, **named)
    return heads, t.local("", "bhs_->_", heads[0])


@own_op(
    f"{PROJECT_NORMED}(Tensor x, Tensor[] weights, Tensor[] biases, {_SHAPING}, {OPTIONS})"
    " -> (Tensor[] heads, Tensor products)",
    check=_check,
    fake=_fake,
    gradient=BackwardOp(_BACKWARD, once=True),
    types=_types,
    example=lambda on: arguments(*_example(on), on.group_name),
    internal=True,  # `products` has no gradient
)
def _project(
    call: Call, x: torch.Tensor, weights: Tensors, biases: Tensors, *others: Any
) -> tuple[Tensors, torch.Tensor]:
    shaping, options = _divided(others)
    stand_ins = projected(x, weights, biases, shaping.features)
    group, exchange = exchange_of(stand_ins, True, call.group.name, *options, op=PROJECT)
    projection = _Normed(exchange, x, weights, biases, shaping)
    if runtime.exchanges(group, x):
        # On CPU nothing travels while a rank multiplies: one product of all heads is faster.
        heads = projection.all_heads(x.shape[1])
        name = exchange_name(exchange, PROJECT_NORMED)
        return run_exchange(group, exchange, heads, projection.outputs, name), projection.products
    return projection.run(group, PROJECT_NORMED), projection.products


def _divided(others: Sequence[Any]) -> tuple[Shaping, Sequence[Any]]:
    count = len(Shaping._fields)
    return Shaping(*others[:count]), others[count:]


def _check_backward(
    ranks: int, some_grads: Tensors, x: torch.Tensor, weights: Tensors, biases: Tensors,
    products: torch.Tensor, needed: list[bool], *others: Any,
) -> None:  # fmt: skip
    _check(ranks, x, weights, biases, *others)
    shaping, _ = _divided(others)
    width = sum(w.shape[1] for w, normed in zip(weights, shaping.normed, strict=True) if normed)
    numbers = x.shape[0] * x.shape[1] * width
    given = {f"some_grads[{index}]": grad for index, grad in enumerate(some_grads)}
    for name, tensor in {**given, "products": products}.items():
        missing = name != "products" and tensor.dtype == torch.bool and tensor.numel() == 0
        if not missing and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise TypeError(
                f"{_BACKWARD}: {name} is {tensor.dtype} on {tensor.device}, x {x.dtype} on "
                f"{x.device}: they must agree"
            )
    if list(products.shape) != [numbers] or len(some_grads) <= len(weights):
        raise ValueError(
            f"{_BACKWARD}: products {list(products.shape)} must be {[numbers]}, and there must "
            f"be {len(weights) + 1} gradients, not {len(some_grads)}"
        )


def _given(
    x: torch.Tensor, weights: Tensors, biases: Tensors, shaping: Shaping
) -> list[torch.Tensor]:
    """Returns the tensors that the forward op was given, in its order."""
    tables = [table for table in (shaping.cos, shaping.sin) if table is not None]
    return [x, *weights, *biases, *shaping.norms, *tables]


def _fake_backward(
    some_grads: Tensors, x: torch.Tensor, weights: Tensors, biases: Tensors,
    products: torch.Tensor, needed: list[bool], *others: Any,
) -> Tensors:  # fmt: skip
    shaping, _ = _divided(others)
    given = _given(x, weights, biases, shaping)
    tables = len(given) - 1 - len(weights) - len(biases) - len(shaping.norms)
    wanted = [*needed[: len(given) - tables], *(False for _ in range(tables))]
    return [
        t.new_empty(t.shape) if want else t.new_empty(0, dtype=torch.bool)
        for t, want in zip(given, wanted, strict=True)
    ]


@own_op(
    f"{_BACKWARD}(Tensor[] some_grads, Tensor x, Tensor[] weights, Tensor[] biases, "
    f"Tensor products, bool[] needed, {_SHAPING}, {OPTIONS}) -> Tensor[]",
    check=_check_backward,
    fake=_fake_backward,
    gradient=NoGradient("second derivatives of ulysses_projection with norms are not supported"),
    types=lambda t, some_grads, **_: [t.all_to_all(grad, 1, 2) for grad in some_grads],
    autocast=autocast.as_they_are,
    example=lambda on: _example_backward(on),
    internal=True,
)
def _project_backward(
    call: Call, some_grads: Tensors, x: torch.Tensor, weights: Tensors, biases: Tensors,
    products: torch.Tensor, needed: list[bool], *others: Any,
) -> Tensors:  # fmt: skip
    shaping, options = _divided(others)
    tables = shaping.tables(x)
    of_products = _grads_of_products(call, some_grads, x, weights, biases, shaping, options)
    with exchanged():
        found = _gradients(of_products, x, weights, biases, products, needed, shaping, tables)
        return [grad if want else _none(x) for grad, want in zip(found, needed, strict=True)]


def _gradients(
    of_products: Tensors, x: torch.Tensor, weights: Tensors, biases: Tensors,
    products: torch.Tensor, needed: list[bool], shaping: Shaping,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
) -> Tensors:  # fmt: skip
    """Returns the gradients of the forward op's tensors, given those of its products."""
    columns, rows = shaping.columns(weights), rows_of(x)
    of_x: torch.Tensor | None = None
    of_weights, of_biases, of_norms = Tensors(), Tensors(), Tensors()
    for index, (weight, grad) in enumerate(zip(weights, of_products, strict=True)):
        heads = grad.view(len(rows), weight.shape[1] // shaping.features, shaping.features)
        if shaping.rotated[index] and tables is not None:
            heads = _rotate_back(heads, tables)
        norm, saved = shaping.norm_of(index), columns[index]
        if norm is not None and saved is not None:
            product = _saved(products, saved, len(rows)).view(heads.shape)
            heads, of_norm = _norm_backward(heads, product, norm, shaping.eps)
            of_norms.append(of_norm)
        grad = heads.reshape(len(rows), weight.shape[1])
        if needed[0]:
            of_x = grad @ weight.mT if of_x is None else of_x.addmm_(grad, weight.mT)
        of_weights.append(rows.mT @ grad if needed[1 + index] else _none(x))
        if biases:
            of_biases.append(grad.sum(0))
    return [
        _none(x) if of_x is None else of_x.view(x.shape), *of_weights, *of_biases, *of_norms,
        *(_none(x) for table in (shaping.cos, shaping.sin) if table is not None),
    ]  # fmt: skip


def _none(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.bool)


def _grads_of_products(
    call: Call, some_grads: Tensors, x: torch.Tensor, weights: Tensors, biases: Tensors,
    shaping: Shaping, options: Sequence[Any],
) -> Tensors:  # fmt: skip
    """Sends the gradients of heads back: (B * s, H * E) of each matrix."""
    name = call.group.name
    stand_ins = projected(x, weights, biases, shaping.features)
    _, there = exchange_of(stand_ins, True, name, *options, op=PROJECT)
    grads = [
        x.new_zeros(part.arriving_shape(call.rank, to_heads=True))
        if grad.dtype == torch.bool
        else grad
        for part, grad in zip(there.parts, some_grads, strict=False)
    ]
    group, back = exchange_of(grads, False, name, *options, op=_BACKWARD)
    return [flat(arrived) for arrived in run_exchange(group, back, grads)]


def _example(on: Caller) -> tuple[Any, ...]:
    W = on.world_size
    weights = [on.rand(6, 4 * W), on.rand(6, 2 * W)]
    tables = on.rand(3, 2), on.rand(3, 2)
    shaping = Shaping(2, [on.rand(2)], [True, False], 1e-6, *tables, [True, False])
    return on.rand(2, 3, 6), weights, [], *shaping


def _example_backward(on: Caller) -> Any:
    x, weights, biases, *shaping = _example(on)
    W = on.world_size
    grads = [on.rand(2, 2, 3 * W, 2), on.rand(2, 1, 3 * W, 2), on.rand(1).bool()[:0]]
    products, needed = on.rand(6 * 4 * W), [True] * 4 + [False] * 2
    return arguments(grads, x, weights, biases, products, needed, *shaping, on.group_name)
