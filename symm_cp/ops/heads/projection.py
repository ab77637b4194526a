"""Projections fused with the exchange of a sequence for heads, and of heads for a sequence.

Before attention, a rank multiplies each peer's heads straight into the message for that peer, while
the peers' messages are under way. After attention, it adds the product of a peer's heads with their
rows of the output projection as soon as they arrive. Each op is the gradient of the other.

B batch, S positions, D features of the model, H heads of E features each; s and h are this rank's
part of positions and heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.ops import autocast
from symm_cp.ops.heads.exchange_heads import exchange_fake, exchange_name, exchange_of
from symm_cp.ops.heads.packing import HeadExchange
from symm_cp.ops.matmul.operands import check_matrices, check_multiplied
from symm_cp.ops.matmul.products import Sum
from symm_cp.ops.op import ONE_BY_ONE, Gradient, Op, arguments, declare
from symm_cp.ops.types import sum_of_products
from symm_cp.runtime.calls import ExchangeCall
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import viewing

PROJECT = "project_to_heads"
COLLECT = "project_from_heads"

# The options of `exchange_heads`.
OPTIONS = (
    "str group_name, int[]? head_ranges=None, int[]? chunk_order=None, "
    "SymInt[]? chunk_lengths=None, int? rank=None"
)


def projected(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], features: int
) -> list[torch.Tensor]:
    """Checks arguments; returns stand-ins for the products: (B, H, s, E), without memory."""
    if x.dim() != 3:
        raise ValueError(
            f"{PROJECT}: x has shape {list(x.shape)}, must have 3 dimensions: (batch, positions, "
            "features)"
        )
    check_matrices(PROJECT, x, weights, x.shape[2], ("x", "weights"))
    if not weights:
        raise ValueError(f"{PROJECT}: weights is empty")
    if features < 1:
        raise ValueError(f"{PROJECT}: {features=} must be at least 1")
    for index, weight in enumerate(weights):
        if weight.shape[1] % features:
            raise ValueError(
                f"{PROJECT}: weights[{index}] has {weight.shape[1]} columns, which is not "
                f"divisible by {features} features of a head"
            )
    if biases and [list(b.shape) for b in biases] != [[w.shape[1]] for w in weights]:
        raise ValueError(
            f"{PROJECT}: biases have shapes {[list(b.shape) for b in biases]}, must have one "
            f"number for each of {[w.shape[1] for w in weights]} columns"
        )
    for index, bias in enumerate(biases):
        if bias.dtype != x.dtype or bias.device != x.device:
            raise TypeError(
                f"{PROJECT}: biases[{index}] is {bias.dtype} on {bias.device}, x {x.dtype} on "
                f"{x.device}: they must agree"
            )
    return [
        x.new_empty(()).expand(x.shape[0], w.shape[1] // features, x.shape[1], features)
        for w in weights
    ]


class Projection:
    """The products of one call on this rank, on the way to the ranks of their heads."""

    def __init__(
        self,
        exchange: HeadExchange,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        self.exchange = exchange
        self.batch = x.shape[0]
        self.x = rows_of(x)
        self.weights, self.biases = weights, biases
        self.outputs = exchange.new_outputs([x for _ in exchange.parts])

    def run(self, group: Group, op: str) -> list[torch.Tensor]:
        """Multiplies and exchanges; returns this rank's heads."""
        name, sizes = exchange_name(self.exchange, op), self.exchange.sizes
        passing = self.give, self.keep, self.take
        runtime.run(ExchangeCall(group, *passing, self.x.device, name, sizes))
        return self.outputs

    def multiply(self, index: int, heads: tuple[int, int], out: torch.Tensor) -> None:
        """Writes a range of heads, (B * s, h * E)."""
        begin, end = (head * self.exchange.parts[index].shape[3] for head in heads)
        weight = self.weights[index][:, begin:end]
        if self.biases:
            torch.addmm(self.biases[index][begin:end], self.x, weight, out=out)
        else:
            torch.mm(self.x, weight, out=out)

    def give(self, to: int, memory: torch.Tensor) -> None:
        """Multiplies a peer's heads into the message for it."""
        offsets, view_at = self.exchange.offsets(self.exchange.rank, to), viewing(memory)
        for index, part in enumerate(self.exchange.parts):
            shape = len(self.x), part.heads(to) * part.shape[3]
            if shape[1] > 0:
                self.multiply(index, part.ranges[to], view_at(offsets[index], shape, part.dtype))

    def keep(self) -> None:
        """Multiplies this rank's heads."""
        rank = self.exchange.rank
        for index, (part, output) in enumerate(zip(self.exchange.parts, self.outputs, strict=True)):
            columns = part.heads(rank) * part.shape[3]
            if len(self.x) * columns == 0:
                continue
            memory = new_result(output, (len(self.x), columns))
            self.multiply(index, part.ranges[rank], memory)
            self._place(index, rank, memory)

    def take(self, source: int, memory: torch.Tensor) -> None:
        """Copies a peer's products to their positions."""
        offsets, view_at = self.exchange.offsets(source, self.exchange.rank), viewing(memory)
        for index, part in enumerate(self.exchange.parts):
            rows = self.batch * part.layout.lengths[source]
            columns = part.heads(self.exchange.rank) * part.shape[3]
            if rows * columns > 0:
                arrived = view_at(offsets[index], (rows, columns), part.dtype)
                self._place(index, source, arrived)

    def _place(self, index: int, source: int, product: torch.Tensor) -> None:
        part, output = self.exchange.parts[index], self.outputs[index]
        heads = part.heads(self.exchange.rank)
        rows = part.layout.lengths[source]
        shaped = product.view(self.batch, rows, heads, part.shape[3]).transpose(1, 2)
        for rows, place in part.rows_of(shaped, output, source):
            place.copy_(rows)


def _project_kernel(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    features: int,
    *options: Any,
) -> list[torch.Tensor]:
    products = projected(x, weights, biases, features)
    group, exchange = exchange_of(products, True, *options, op=PROJECT)
    return Projection(exchange, x, weights, biases).run(group, PROJECT)


def _project_fake(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    features: int,
    *options: Any,
) -> list[torch.Tensor]:
    products = projected(x, weights, biases, features)
    return exchange_fake(products, True, *options, op=PROJECT)


def _check_collected(tensors: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    if not weights or len(weights) != len(tensors):
        raise ValueError(
            f"{COLLECT}: there are {len(weights)} weights for {len(tensors)} tensors, must be one "
            "for each"
        )
    for index, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
        check_multiplied(COLLECT, f"tensors[{index}]", tensor)
        if weight.dim() != 2 or weight.shape[1] != weights[0].shape[1]:
            columns = f" of {weights[0].shape[1]} columns" if weights[0].dim() == 2 else ""
            raise ValueError(
                f"{COLLECT}: weights[{index}] has shape {list(weight.shape)}, must be a matrix"
                f"{columns}"
            )
        if weight.dtype != tensor.dtype or weight.device != tensor.device:
            raise TypeError(
                f"{COLLECT}: weights[{index}] is {weight.dtype} on {weight.device}, "
                f"tensors[{index}] {tensor.dtype} on {tensor.device}"
            )


def _check_rows(index: int, weight: torch.Tensor, heads: int, features: int) -> None:
    if weight.shape[0] != heads * features:
        raise ValueError(
            f"{COLLECT}: weights[{index}] has {weight.shape[0]} rows, must have {heads * features} "
            f"for {heads} heads of {features} features"
        )


def _collect_kernel(
    tensors: list[torch.Tensor], weights: list[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    _check_collected(tensors, weights)
    group, exchange = exchange_of(tensors, False, *options, op=COLLECT)
    for index, (part, weight) in enumerate(zip(exchange.parts, weights, strict=True)):
        _check_rows(index, weight, part.shape[1], part.shape[3])
    arrived = exchange.new_outputs(tensors)
    batch, _, rows, _ = arrived[0].shape
    out = new_result(tensors[0], (batch, rows, weights[0].shape[1]))
    total = Sum(out.flatten(0, 1), group.world_size * len(tensors))

    def add(source: int) -> None:
        for part, tensor, weight in zip(exchange.parts, arrived, weights, strict=True):
            if part.disjoint and part.heads(source) > 0:
                begin, end = (head * part.shape[3] for head in part.ranges[source])
                total.add_product(flat(tensor)[:, begin:end], weight[begin:end])

    def keep() -> None:
        exchange.keep(tensors, arrived)
        add(group.rank)

    def take(source: int, memory: torch.Tensor) -> None:
        exchange.take(arrived, source, memory)
        add(source)

    call = ExchangeCall(
        group,
        lambda to, memory: exchange.give(tensors, to, memory),
        keep,
        take,
        out.device,
        exchange_name(exchange, COLLECT),
        exchange.sizes,
    )
    runtime.run(call)
    collected = exchange.summed(arrived)
    for part, tensor, weight in zip(exchange.parts, collected, weights, strict=True):
        if not part.disjoint:
            total.add_product(flat(tensor), weight)
    total.finish()
    return out, [flat(t).view(batch, rows, t.shape[1] * t.shape[3]) for t in collected]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """(B, H, s, E) with the heads of a position side by side as (B * s, H * E)."""
    batch, heads, rows, features = tensor.shape
    return tensor.transpose(1, 2).view(batch * rows, heads * features)


def _collect_fake(
    tensors: list[torch.Tensor], weights: list[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    _check_collected(tensors, weights)
    results = exchange_fake(tensors, False, *options, op=COLLECT)
    for index, (result, weight) in enumerate(zip(results, weights, strict=True)):
        _check_rows(index, weight, result.shape[1], result.shape[3])
    batch, _, rows, _ = results[0].shape
    flat = [r.new_empty(batch, rows, r.shape[1] * r.shape[3]) for r in results]
    return results[0].new_empty(batch, rows, weights[0].shape[1]), flat


# --- gradients -------------------------------------------------------------------------------


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as a matrix of its last dimension's rows."""
    # vmap supports reshape, unlike `flatten`; -1 rows would be ambiguous for an empty tensor.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _setup_project(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, biases, _, *ctx.others = inputs
    ctx.has_biases = len(biases) > 0
    ctx.save_for_backward(x, *weights)


def _project_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    grad_x, local = torch.ops.symm_mem.project_from_heads(
        list(grads), [weight.mH for weight in weights], *ctx.others
    )
    rows = rows_of(x)
    _, of_weights, of_biases, *rest = ctx.needs_input_grad
    grad_weights = [
        rows.mH @ rows_of(grad) if needed else None
        for grad, needed in zip(local, of_weights, strict=True)
    ]
    grad_biases = [
        rows_of(grad).sum(0) if needed else None
        for grad, needed in zip(local, of_biases, strict=False)
    ]
    return (grad_x, grad_weights, grad_biases, *(None for _ in rest))


def _setup_collect(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, weights, *ctx.others = inputs
    ctx.set_materialize_grads(False)
    ctx.features = [tensor.shape[3] for tensor in tensors]
    ctx.save_for_backward(*weights, *output[1])


def _collect_backward(
    ctx: Any, grad_out: torch.Tensor | None, grad_local: list[torch.Tensor | None]
) -> tuple[Any, ...]:
    count = len(ctx.features)
    saved = ctx.saved_tensors  # read once: a checkpoint recomputes them on each read
    weights, local = saved[:count], saved[count:]
    of_tensors: list[torch.Tensor | None] = [None] * count
    of_weights: list[torch.Tensor | None] = [None] * count
    if grad_out is not None:
        for index, needed in enumerate(ctx.needs_input_grad[1]):
            if needed:
                of_weights[index] = rows_of(local[index]).mH @ rows_of(grad_out)
    equal = all(features == ctx.features[0] for features in ctx.features)
    if equal and grad_out is not None:
        of_tensors = torch.ops.symm_mem.project_to_heads(
            grad_out, [weight.mH for weight in weights], [], ctx.features[0], *ctx.others
        )
    elif grad_out is not None:
        of_tensors = [
            torch.ops.symm_mem.project_to_heads(
                grad_out, [weight.mH], [], features, *_options_of(ctx.others, index, count)
            )[0]
            for index, (weight, features) in enumerate(zip(weights, ctx.features, strict=True))
        ]
    for index, grad in enumerate(grad_local):
        if grad is not None:
            heads = grad.reshape(*grad.shape[:2], -1, ctx.features[index]).transpose(1, 2)
            (more,) = torch.ops.symm_mem.exchange_heads(
                [heads], True, *_options_of(ctx.others, index, count)
            )
            before = of_tensors[index]
            of_tensors[index] = more if before is None else before + more
    return (of_tensors, of_weights, *(None for _ in ctx.needs_input_grad[2:]))


def _options_of(options: Sequence[Any], index: int, count: int) -> list[Any]:
    """The options of an exchange of one of several tensors."""
    group_name, ranges, *others = options
    if ranges is not None:
        each = len(ranges) // count
        ranges = ranges[index * each : (index + 1) * each]
    return [group_name, ranges, *others]


def project_types(t: Any, x: Any, weights: Any, biases: Any, **_: Any) -> Any:
    """Describes a projection of a part of the sequence, and the exchange for heads."""
    results = []
    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True):
        product = t.local("{} @ {}", "bsk,kn->bns_", x, weight, linear_in=(0, 1))
        if bias is not None:
            product = t.local("{} + {}", "bns_,n->bns_", product, bias)
        results.append(t.all_to_all(product, 2, 1))
    return results


def _collect_types(t: Any, tensors: Any, weights: Any, **_: Any) -> Any:
    local = [
        t.local("heads of {}", "bhs_->bsh", t.all_to_all(x, 1, 2), linear_in=(0,)) for x in tensors
    ]
    return sum_of_products(t, local, weights, None), local


declare(
    Op(
        name=PROJECT,
        types=project_types,
        schema=(
            f"(Tensor x, Tensor[] weights, Tensor[] biases, SymInt features, {OPTIONS})"
            " -> Tensor[]"
        ),
        kernel=_project_kernel,
        fake=_project_fake,
        gradient=Gradient(_project_backward, _setup_project),
        autocast=autocast.cast,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(1, 4, 6), [on.rand(6, 4 * on.world_size)], [on.rand(4 * on.world_size)], 2,
            on.group_name,
        ),
    ),
    # Also returns the factors: all heads of this rank's positions, (B, s, H * E) of each tensor.
    Op(
        name=COLLECT,
        types=_collect_types,
        schema=f"(Tensor[] tensors, Tensor[] weights, {OPTIONS}) -> (Tensor, Tensor[])",
        kernel=_collect_kernel,
        fake=_collect_fake,
        gradient=Gradient(_collect_backward, _setup_collect),
        autocast=autocast.cast,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            [on.rand(1, 2, 4 * on.world_size, 3)], [on.rand(6 * on.world_size, 5)], on.group_name
        ),
    ),
)  # fmt: skip
