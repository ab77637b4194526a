"""The ops that loopback.py measures, at the shapes of a layer of a model.

Each peer's memory is this rank's own: gathers give W copies of this rank's shard, so their results
are known. In scatters, only this rank's own part is known; the others are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from benchmarks.one_rank import Call, gradient
from symm_cp.schedule.layout import head_tail_order

_DTYPE, _FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
#: Allowed error relative to the largest value, for sums of products of rounded numbers.
_TOLERANCE = 2**-5


@dataclass(frozen=True)
class Model:
    """The sizes of a layer, and the tokens of all ranks."""

    name: str
    hidden: int
    feed: int
    heads: int
    kv_heads: int
    features: int
    tokens: int


#: A rank has 8192 / W rows, and its part of matrices' columns.
MODELS = (
    Model("Llama-3 8B", 4096, 14336, 32, 8, 128, 8192),
    Model("Llama-3 70B", 8192, 28672, 64, 8, 128, 8192),
)
#: For short runs, at up to 16 ranks.
SMALL = Model("small", 64, 256, 16, 4, 16, 512)


@dataclass(frozen=True)
class Case:
    """A call of an op on this rank.

    `alone` is the same compute on inputs that are gathered already; None for ops that only move
    data. `check` raises `AssertionError` for a wrong result of `run`. `slot_bytes`: what a graph
    of the call needs, 0 for calls that are not captured.
    """

    name: str
    run: Call
    alone: Call | None
    check: Callable[[Any], None]
    slot_bytes: int = 0


def cases(group: dist.ProcessGroup, model: Model, device: torch.device) -> Iterator[Case]:
    """Yields the cases of a model."""
    inputs = _Inputs(group, model, device)
    yield from _matmuls(inputs)
    yield from _matmul_gradients(inputs)
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        yield from _scaled(inputs)
    yield from _attentions(inputs)
    yield from _moves(inputs)


class _Inputs:
    """A rank's tensors for a model."""

    def __init__(self, group: dist.ProcessGroup, model: Model, device: torch.device) -> None:
        self.group, self.ranks, self.name = group, group.size(), group.group_name
        self.model, self.device = model, device
        self.rows, self.columns = model.tokens // self.ranks, model.feed // self.ranks

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=_DTYPE)

    def gathered(self, shard: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns the result of a gather of a shard in loopback."""
        return torch.cat([shard] * self.ranks, dim)

    def up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that a rank has, and its columns of the matrix up."""
        return self.normal(self.rows, self.model.hidden), self.normal(
            self.model.hidden, self.columns
        )

    def down(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a rank's features, and its rows of the matrix down."""
        x = self.normal(self.model.tokens, self.columns)
        return x, self.normal(self.columns, self.model.hidden)

    def heads(self) -> list[torch.Tensor]:
        """Queries, keys and values of a rank, laid out as models do: positions before heads."""
        model = self.model
        return [
            self.normal(1, self.rows, heads, model.features).transpose(1, 2)
            for heads in (model.heads, model.kv_heads, model.kv_heads)
        ]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def equals(expected: Callable[[], Any]) -> Callable[[Any], None]:
    """Returns a check that results equal a function's, up to rounding."""

    def check(result: Any) -> None:
        for actual, wanted in zip(_tensors(result), _tensors(expected()), strict=True):
            assert actual.shape == wanted.shape, f"{actual.shape=}, not {wanted.shape}"
            error = (actual.double() - wanted.double()).abs().max()
            limit = _TOLERANCE * wanted.double().abs().max()
            assert error <= limit, f"an error of {error:.3g}, above {limit:.3g}"

    return check


def like(*wanted: torch.Tensor) -> Callable[[Any], None]:
    """Returns a check that results are finite and have these tensors' shapes."""

    def check(result: Any) -> None:
        for actual, tensor in zip(_tensors(result), wanted, strict=True):
            assert actual.shape == tensor.shape, f"{actual.shape=}, not {tensor.shape}"
            assert actual.isfinite().all(), "some numbers are not finite"

    return check


def _matmuls(inputs: _Inputs) -> Iterator[Case]:
    group = inputs.group
    x, up = inputs.up()
    full = inputs.gathered(x)

    def multiply() -> torch.Tensor:
        return full @ up

    yield Case(
        "all-gather-matmul",
        lambda: symm_cp.all_gather_matmul(x, up, group=group),
        multiply,
        equals(multiply),
        x.nbytes,
    )
    yield Case(
        "all-gather-matmul, with the gathered",
        lambda: symm_cp.all_gather_matmul(x, up, group=group, return_gathered=True),
        multiply,
        equals(lambda: (full, multiply())),
        x.nbytes,
    )
    part = inputs.normal(inputs.model.tokens, inputs.model.hidden // inputs.ranks)
    whole, matrix = inputs.gathered(part, 1), inputs.normal(inputs.model.hidden, inputs.columns)
    yield Case(
        "all-gather-matmul of columns",
        lambda: symm_cp.all_gather_matmul(part, matrix, gather_dim=1, group=group),
        lambda: whole @ matrix,
        equals(lambda: whole @ matrix),
        part.nbytes,
    )
    wide, down = inputs.down()
    product = inputs.model.tokens * inputs.model.hidden * down.element_size()
    yield Case(
        "matmul-reduce-scatter",
        lambda: symm_cp.matmul_reduce_scatter(wide, down, group=group),
        lambda: wide @ down,
        equals(lambda: wide[: inputs.rows] @ down),
        product,
    )
    yield Case(
        "matmul-all-reduce",
        lambda: symm_cp.matmul_all_reduce(wide, down, group=group),
        lambda: wide @ down,
        like(wide @ down),
        2 * product,
    )


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def _matmul_gradients(inputs: _Inputs) -> Iterator[Case]:
    group = inputs.group
    leaves = _leaves(*inputs.up())
    full = _leaves(inputs.gathered(leaves[0].detach()), leaves[1])
    yield Case(
        "all-gather-matmul, backward",
        gradient(symm_cp.all_gather_matmul(*leaves, group=group), leaves),
        gradient(full[0] @ full[1], full),
        like(*leaves),
    )
    leaves = _leaves(*inputs.down())
    yield Case(
        "matmul-reduce-scatter, backward",
        gradient(symm_cp.matmul_reduce_scatter(*leaves, group=group), leaves),
        gradient(leaves[0] @ leaves[1], leaves),
        like(*leaves),
    )


def _scaled(inputs: _Inputs) -> Iterator[Case]:
    group, one = inputs.group, torch.ones((), device=inputs.device)
    x, up = inputs.up()
    x8, up8 = x.to(_FLOAT8), up.t().contiguous().to(_FLOAT8).t()
    full = inputs.gathered(x8)
    wide, down = inputs.down()
    wide8, down8 = wide.to(_FLOAT8), down.t().contiguous().to(_FLOAT8).t()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=_DTYPE)

    options = {"group": group, "out_dtype": _DTYPE}
    yield Case(
        "scaled all-gather-matmul",
        lambda: symm_cp.scaled_all_gather_matmul(x8, up8, one, one, **options)[1],
        lambda: multiply(full, up8),
        equals(lambda: multiply(full, up8)),
        x8.nbytes,
    )
    yield Case(
        "scaled matmul-reduce-scatter",
        lambda: symm_cp.scaled_matmul_reduce_scatter(wide8, down8, one, one, **options),
        lambda: multiply(wide8, down8),
        equals(lambda: multiply(wide8[: inputs.rows], down8)),
        inputs.model.tokens * inputs.model.hidden * _DTYPE.itemsize,
    )


def _attentions(inputs: _Inputs) -> Iterator[Case]:
    attend, name = torch.ops.symm_mem.fused_all_gather_attention, inputs.name
    q, k, v = inputs.heads()
    keys, values = (inputs.gathered(t, 2) for t in (k, v))

    def alone(
        q: torch.Tensor = q, k: torch.Tensor = keys, v: torch.Tensor = values
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def run() -> torch.Tensor:
        return attend(q, k, v, name, enable_gqa=True)[0]

    slot = k.nbytes + v.nbytes
    yield Case("attention", run, alone, equals(alone), slot)
    order = list(head_tail_order(inputs.ranks))
    yield Case(
        "attention, causal head-tail",
        lambda: attend(q, k, v, name, enable_gqa=True, is_causal=True, chunk_order=order)[0],
        None,  # a rank's share of the causal triangle is no single call of torch's kernels
        like(q),
        slot,
    )
    leaves, full = _leaves(q, k, v), _leaves(q, keys, values)
    yield Case(
        "attention, backward",
        gradient(attend(*leaves, name, enable_gqa=True)[0], leaves),
        gradient(alone(*full), full),
        like(*leaves),
    )


def _moves(inputs: _Inputs) -> Iterator[Case]:
    """Ops that move data; no compute to compare with."""
    ops, name, group = torch.ops.symm_mem, inputs.name, inputs.group
    wait = torch.ops._c10d_functional.wait_tensor
    q, k, v = inputs.heads()
    slot = k.nbytes + v.nbytes

    def both() -> Sequence[torch.Tensor]:
        return [inputs.gathered(t, 2) for t in (k, v)]

    yield Case(
        "all-gather of keys and values",
        lambda: ops.all_gather_kv(k, v, 2, name),
        None,
        equals(both),
        slot,
    )

    def own_positions(result: torch.Tensor) -> None:
        own = q[:, : inputs.model.heads // inputs.ranks]
        assert torch.equal(result[:, :, : inputs.rows], own), "the own positions are wrong"

    yield Case(
        "exchange of a sequence for heads",
        lambda: symm_cp.sequence_to_heads(q, group=group),
        None,
        own_positions,
        q.nbytes,
    )
    x, whole = inputs.up()[0], inputs.normal(inputs.model.tokens, inputs.model.hidden)
    yield Case(
        "low-contention all-gather",
        lambda: wait(ops._low_contention_all_gather(x, name)),
        None,
        equals(lambda: inputs.gathered(x)),
    )
    yield Case(
        "low-contention reduce-scatter",
        lambda: wait(ops._low_contention_reduce_scatter(whole, "sum", name)),
        None,
        equals(lambda: whole[: inputs.rows]),
    )
