"""The ops that loopback.py measures, at the shapes of a layer of a model.

Each peer's memory is this rank's own: gathers give W copies of this rank's shard, so their results
are known. In scatters, only this rank's own part is known; the others are 0. Real peers draw the
same numbers: gathers give the same, and scatters W times a rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
import torch.nn.functional as F

import symm_cp
from symm_cp import cuda, tuning
from symm_cp.schedule.layout import head_tail_order

Call = Callable[[], object]

#: The algorithms that each fused matmul, and attention, is measured with, where they serve it.
MATMUL_ALGORITHMS = (*tuning.ALGORITHMS, tuning.TILES)
ATTENTION_ALGORITHMS = tuning.ATTENTION_ALGORITHMS
_FLOAT8 = torch.float8_e4m3fn
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
    dtype: torch.dtype = torch.bfloat16


#: A rank has 8192 / W rows, and its part of matrices' columns.
MODELS = (
    Model("Llama-3 8B", 4096, 14336, 32, 8, 128, 8192),
    Model("Llama-3 70B", 8192, 28672, 64, 8, 128, 8192),
)
#: For short runs, at up to 16 ranks.
SMALL = Model("small", 64, 256, 16, 4, 16, 512)


def tiny(ranks: int) -> Model:
    """Returns sizes whose matmuls take the CPU next to no time; rows are aligned to 64 bytes."""
    width = 16 * ranks
    return Model("tiny", width, width, 2 * ranks, 2 * ranks, 16, width, torch.float32)


@dataclass(frozen=True)
class Case:
    """A call of an op on this rank.

    `alone` is the same compute on inputs that are gathered already; None for ops that only move
    data. `check` raises `AssertionError` for a wrong result of `run`. `slot_bytes`: what a graph
    of the call needs, 0 for calls that are not captured. `torchs`: torch's pipeline for it.
    `algorithms`: those that are forced in turn, if the op has several.
    """

    name: str
    run: Call
    alone: Call | None
    check: Callable[[Any], None]
    slot_bytes: int = 0
    torchs: Call | None = None
    algorithms: tuple[str, ...] = ()


def cases(
    group: dist.ProcessGroup, model: Model, device: torch.device, *, peers: bool = False
) -> Iterator[Case]:
    """Yields the cases of a model; `peers`: the group's other ranks exist."""
    inputs = _Inputs(group, model, device, peers)
    if cuda.device_of(device).polls():
        yield from _tiles_alone(inputs)  # first: kernels that wait for copies could hang
    yield from _matmuls(inputs)
    yield from _matmul_gradients(inputs)
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        yield from _scaled(inputs)
    yield from _attentions(inputs)
    yield from _moves(inputs)


class _Inputs:
    """A rank's tensors for a model."""

    def __init__(
        self, group: dist.ProcessGroup, model: Model, device: torch.device, peers: bool
    ) -> None:
        torch.manual_seed(0)
        self.group, self.ranks, self.name = group, group.size(), group.group_name
        self.rank, self.terms = group.rank(), group.size() if peers else 1
        self.model, self.device = model, device
        self.rows, self.columns = model.tokens // self.ranks, model.feed // self.ranks
        #: The bytes of a product of all rows with this rank's part of the matrix down.
        self.product_bytes = model.tokens * model.hidden * model.dtype.itemsize

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.model.dtype)

    def gathered(self, shard: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns the result of a gather of a shard in loopback."""
        return torch.cat([shard] * self.ranks, dim)

    def scattered(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the result of a scatter of a whole tensor, summed over ranks."""
        return whole.chunk(self.ranks)[self.rank] * self.terms

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


def gradient(out: torch.Tensor, inputs: list[torch.Tensor]) -> Call:
    """Returns a call of the backward pass that leads to `out`, which may be repeated."""
    ones = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, ones, retain_graph=True)


def _matmuls(inputs: _Inputs) -> Iterator[Case]:
    group, name = inputs.group, inputs.name
    gather, scatter = symm_cp.all_gather_matmul, symm_cp.matmul_reduce_scatter
    theirs = torch_symm_mem._fused_all_gather_matmul
    algorithms = MATMUL_ALGORITHMS
    x, up = inputs.up()
    full = inputs.gathered(x)

    def multiply() -> torch.Tensor:
        return full @ up

    yield Case(
        "all-gather-matmul",
        lambda: gather(x, up, group=group),
        multiply,
        equals(multiply),
        x.nbytes,
        lambda: theirs(x, [up], 0, name, return_A=False),
        algorithms,
    )
    yield Case(
        "all-gather-matmul, with the gathered",
        lambda: gather(x, up, group=group, return_gathered=True),
        multiply,
        equals(lambda: (full, multiply())),
        x.nbytes,
        lambda: theirs(x, [up], 0, name, return_A=True),
        algorithms,
    )
    part = inputs.normal(inputs.model.tokens, inputs.model.hidden // inputs.ranks)
    whole, matrix = inputs.gathered(part, 1), inputs.normal(inputs.model.hidden, inputs.columns)
    yield Case(
        "all-gather-matmul of columns",
        lambda: gather(part, matrix, gather_dim=1, group=group),
        lambda: whole @ matrix,
        equals(lambda: whole @ matrix),
        part.nbytes,
        lambda: theirs(part, [matrix], 1, name, return_A=False),
    )
    wide, down = inputs.down()
    yield Case(
        "matmul-reduce-scatter",
        lambda: scatter(wide, down, group=group),
        lambda: wide @ down,
        equals(lambda: inputs.scattered(wide @ down)),
        inputs.product_bytes,
        lambda: torch_symm_mem._fused_matmul_reduce_scatter(wide, down, "sum", 0, name),
        algorithms,
    )
    yield Case(
        "matmul-all-reduce",
        lambda: symm_cp.matmul_all_reduce(wide, down, group=group),
        lambda: wide @ down,
        like(wide @ down),
        2 * inputs.product_bytes,
        algorithms=algorithms,
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
        algorithms=MATMUL_ALGORITHMS,
    )
    leaves = _leaves(*inputs.down())
    yield Case(
        "matmul-reduce-scatter, backward",
        gradient(symm_cp.matmul_reduce_scatter(*leaves, group=group), leaves),
        gradient(leaves[0] @ leaves[1], leaves),
        like(*leaves),
        algorithms=MATMUL_ALGORITHMS,
    )


def _scaled(inputs: _Inputs) -> Iterator[Case]:
    group, name = inputs.group, inputs.name
    one, to = torch.ones((), device=inputs.device), torch.bfloat16
    x, up = inputs.up()
    x8, up8 = x.to(_FLOAT8), up.t().contiguous().to(_FLOAT8).t()
    full = inputs.gathered(x8)
    wide, down = inputs.down()
    wide8, down8 = wide.to(_FLOAT8), down.t().contiguous().to(_FLOAT8).t()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=to)

    options = {"group": group, "out_dtype": to}
    yield Case(
        "scaled all-gather-matmul",
        lambda: symm_cp.scaled_all_gather_matmul(x8, up8, one, one, **options)[1],
        lambda: multiply(full, up8),
        equals(lambda: multiply(full, up8)),
        x8.nbytes,
        lambda: torch_symm_mem._fused_all_gather_scaled_matmul(
            x8, [up8], one, [one], 0, name, [None], [None], [to], [False]
        ),
    )
    yield Case(
        "scaled matmul-reduce-scatter",
        lambda: symm_cp.scaled_matmul_reduce_scatter(wide8, down8, one, one, **options),
        lambda: multiply(wide8, down8),
        equals(lambda: inputs.scattered(multiply(wide8, down8))),
        inputs.model.tokens * inputs.model.hidden * to.itemsize,
        lambda: torch_symm_mem._fused_scaled_matmul_reduce_scatter(
            wide8, down8, one, one, "sum", 0, 0, name, [len(wide), down.shape[1]], None, None, to
        ),
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

    slot, algorithms = k.nbytes + v.nbytes, ATTENTION_ALGORITHMS
    yield Case("attention", run, alone, equals(alone), slot, algorithms=algorithms)
    order = list(head_tail_order(inputs.ranks))
    yield Case(
        "attention, causal head-tail",
        lambda: attend(q, k, v, name, enable_gqa=True, is_causal=True, chunk_order=order)[0],
        None,  # a rank's share of the causal triangle is no single call of torch's kernels
        like(q),
        slot,
        algorithms=algorithms,
    )
    leaves, full = _leaves(q, k, v), _leaves(q, keys, values)
    yield Case(
        "attention, backward",
        gradient(attend(*leaves, name, enable_gqa=True)[0], leaves),
        gradient(alone(*full), full),
        like(*leaves),
        algorithms=algorithms,
    )


def _moves(inputs: _Inputs) -> Iterator[Case]:
    """Ops that move data; no compute to compare with, but beside a matmul."""
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
        own = q.chunk(inputs.ranks, 1)[inputs.rank]
        assert torch.equal(result.chunk(inputs.ranks, 2)[inputs.rank], own), "own positions"

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
        torchs=lambda: wait(torch_symm_mem._low_contention_all_gather(x, name)),
    )
    yield Case(
        "low-contention reduce-scatter",
        lambda: wait(ops._low_contention_reduce_scatter(whole, "sum", name)),
        None,
        # The slot holds all parts: peers that are this rank itself add its own part, too.
        equals(lambda: whole.chunk(inputs.ranks)[inputs.rank] * inputs.ranks),
        torchs=lambda: wait(torch_symm_mem._low_contention_reduce_scatter(whole, "sum", name)),
    )
    wide, down = inputs.down()

    def beside() -> list[torch.Tensor]:
        moving = ops._low_contention_all_gather(x, name)
        product = wide @ down
        return [product, wait(moving)]

    yield Case(
        "low-contention all-gather beside a matmul",
        beside,
        lambda: wide @ down,
        equals(lambda: [wide @ down, inputs.gathered(x)]),
    )


def _tiles_alone(inputs: _Inputs) -> Iterator[Case]:
    """The kernels by tiles with shards that have arrived, against torch.mm; in several tilings."""
    from symm_cp.cuda.kernels import tile_matmul
    from symm_cp.cuda.kernels.tile_matmul import Tiling

    x, weight = inputs.up()
    shards, full = torch.stack([x] * inputs.ranks), inputs.gathered(x)
    out = full.new_empty(len(full), inputs.columns)
    words = torch.ones(inputs.ranks * 16, device=inputs.device, dtype=torch.int32)
    marks = tile_matmul.Words(words, 16, 1)

    def poll(tiling: Tiling | None) -> torch.Tensor:
        tile_matmul.arrival_matmul(x, shards, 1, weight, out, 0, marks, tiling=tiling)
        return out

    def count(tiling: Tiling | None) -> torch.Tensor:
        parts = out.view(inputs.ranks, inputs.rows, -1)
        tile_matmul.counted_matmul(full, weight, parts, parts[0], 0, marks, tiling=tiling)
        return out

    def case(name: str, kernel: Callable[[Tiling | None], Any], tiling: Tiling | None) -> Case:
        return Case(
            f"tiles alone, {name}",
            lambda: kernel(tiling),
            lambda: torch.mm(full, weight, out=out),
            equals(lambda: full @ weight),
            algorithms=(tuning.TILES,),
        )

    yield case("polling", poll, None)
    yield case("counting", count, None)
    for rows, columns, inner, stages in ((128, 256, 64, 3), (128, 128, 64, 3), (128, 128, 32, 4)):
        tiling = Tiling(rows, columns, inner, 8, stages)
        yield case(f"polling, {rows}x{columns}x{inner}, {stages} stages", poll, tiling)
