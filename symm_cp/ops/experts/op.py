"""Dispatch of tokens to their experts, and the combination of the results: mixtures of experts.

W ranks divide E experts among them, T tokens of a rank have K experts each. The ranks first
exchange how many tokens they have for each expert; these numbers determine what each rank sends,
what it gets and where that belongs. A rank's experts get their tokens in rank order, and each
rank's tokens in the rank's own order, so results do not depend on W.

Source: expert parallelism (Lepikhin et al., GShard, 2020); rows are in the order of
`torch.nn.functional.grouped_mm`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.common import group_of, world_size_of
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.experts.table import Table, added, gathered_counts, limited, places_of
from symm_cp.ops.op import (
    ONE_BY_ONE,
    Caller,
    Gradient,
    NoGradient,
    Op,
    arguments,
    declare,
    shows_types,
    untouched,
)
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import contiguous, new_result

_ROUTE = "_route_to_experts"
DISPATCH = "dispatch_to_experts"
COMBINE = "combine_from_experts"
#: For `rows` of a call: the number is read from the table. csrc/ops/experts.cpp has the same.
ANY_ROWS = -1
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# --- checks ----------------------------------------------------------------------------------


def _check_route(experts: torch.Tensor, num_experts: int, capacity: int | None, ranks: int) -> int:
    """Returns the number of experts of a rank."""
    if experts.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{_ROUTE}: experts is {experts.dtype}, must be torch.int64 or torch.int32")
    if experts.dim() != 2:
        raise ValueError(
            f"{_ROUTE}: experts {list(experts.shape)} must have 2 dimensions: (tokens, experts of "
            "each)"
        )
    if capacity is not None and capacity < 0:
        raise ValueError(f"{_ROUTE}: {capacity=} must not be negative")
    return experts_of_rank(_ROUTE, num_experts, ranks)


def experts_of_rank(op: str, num_experts: int, ranks: int) -> int:
    """Returns the number of experts of a rank."""
    if num_experts <= 0 or num_experts % ranks:
        raise ValueError(f"{op}: {num_experts=} must be a positive multiple of world size {ranks}")
    return num_experts // ranks


def check_dispatch(tokens: torch.Tensor, pairs: int, top_k: int, op: str = DISPATCH) -> None:
    """Raises `ValueError` unless tokens fit a routing of `pairs` pairs, `top_k` for each."""
    if tokens.dim() == 0:
        raise ValueError(f"{op}: tokens must have at least 1 dimension")
    if top_k <= 0 or tokens.shape[0] * top_k != pairs:
        raise ValueError(
            f"{op}: tokens {list(tokens.shape)} with {top_k=} do not belong to a routing of "
            f"{pairs} pairs of a token and an expert"
        )


def check_combine(
    rows: torch.Tensor, weights: torch.Tensor | None, pairs: int, top_k: int, op: str = COMBINE
) -> None:
    """Raises `ValueError` or `TypeError` for rows or weights that cannot be combined."""
    if rows.dim() == 0:
        raise ValueError(f"{op}: rows must have at least 1 dimension")
    if rows.dtype not in SUMMED:
        raise TypeError(
            f"{op}: rows is {rows.dtype}, must be " + ", ".join(map(str, SUMMED[:-1])) + " or "
            f"{SUMMED[-1]}"
        )
    if top_k <= 0 or pairs % top_k:
        raise ValueError(f"{op}: {top_k=} must divide the {pairs} pairs of the routing")
    if weights is None:
        return
    if not weights.is_floating_point():
        raise TypeError(f"{op}: weights is {weights.dtype}, must be a floating dtype")
    if weights.dim() != 2 or weights.shape[0] * top_k != pairs or weights.shape[1] != top_k:
        raise ValueError(
            f"{op}: weights {list(weights.shape)} must be {[pairs // top_k, top_k]}, one for "
            "each token and expert"
        )


# --- kernels for groups that span hosts and for streams; csrc/ops/experts.cpp has the others -----


def _route_kernel(
    experts: torch.Tensor, num_experts: int, capacity: int | None, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group = group_of(group_name)
    local = _check_route(experts, num_experts, capacity, group.world_size)
    experts = experts.long()
    if experts.numel():
        low, high = int(experts.min()), int(experts.max())
        if low < -1 or high >= num_experts:
            wrong = low if low < -1 else high
            raise ValueError(
                f"{_ROUTE}: expert {wrong} must be from 0 to {num_experts - 1}, or -1 for none"
            )
    detail = f"top {experts.shape[1]} capacity {capacity}"
    counts = limited(gathered_counts(_ROUTE, group, experts, num_experts, detail), capacity)
    places = places_of(experts, counts[group.rank])
    table = torch.cat([torch.tensor(counts, device=places.device).reshape(-1), places])
    begin = group.rank * local
    each = [sum(row[e] for row in counts) for e in range(begin, begin + local)]
    ends = torch.tensor(each, device=places.device).cumsum(0).to(torch.int32)
    return table, ends


def _dispatch_kernel(
    tokens: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> torch.Tensor:
    group = group_of(group_name)
    experts_of_rank(DISPATCH, num_experts, group.world_size)
    found = Table(DISPATCH, table, num_experts, group)
    check_dispatch(tokens, found.places.numel(), top_k)
    if rows not in (found.rows, ANY_ROWS):
        raise ValueError(
            f"{DISPATCH}: {rows=} must be {found.rows}, the rows of this rank's experts"
        )
    packed = tokens.index_select(0, found.pairs // top_k)
    out = new_result(tokens, (found.rows, *tokens.shape[1:]))
    found.exchange(DISPATCH, group, packed, out, back=False)
    return out


def _combine_kernel(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> torch.Tensor:
    group = group_of(group_name)
    experts_of_rank(COMBINE, num_experts, group.world_size)
    found = Table(COMBINE, table, num_experts, group)
    check_combine(rows, weights, found.places.numel(), top_k)
    if rows.shape[0] != found.rows:
        raise ValueError(
            f"{COMBINE}: rows {list(rows.shape)} must have {found.rows}, as dispatch returned"
        )
    packed = new_result(rows, (found.sent, *rows.shape[1:]))
    found.exchange(COMBINE, group, packed, contiguous(rows), back=True)
    return added(found, packed, weights, top_k)


# --- fake kernels ----------------------------------------------------------------------------


def pairs_of(op: str, table: torch.Tensor, num_experts: int, group_name: str) -> int:
    """Returns the number of pairs of a token and an expert in a table."""
    ranks = world_size_of(group_name)
    experts_of_rank(op, num_experts, ranks)
    return table.shape[0] - ranks * num_experts


def _route_fake(
    experts: torch.Tensor, num_experts: int, capacity: int | None, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = world_size_of(group_name)
    local = _check_route(experts, num_experts, capacity, ranks)
    length = ranks * num_experts + experts.numel()
    table = experts.new_empty((length,), dtype=torch.int64)
    return table, experts.new_empty((local,), dtype=torch.int32)


def _dispatch_fake(
    tokens: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> torch.Tensor:
    check_dispatch(tokens, pairs_of(DISPATCH, table, num_experts, group_name), top_k)
    return tokens.new_empty((rows, *tokens.shape[1:]))


def _combine_fake(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> torch.Tensor:
    pairs = pairs_of(COMBINE, table, num_experts, group_name)
    check_combine(rows, weights, pairs, top_k)
    return rows.new_empty((pairs // top_k, *rows.shape[1:]))


# --- gradients -------------------------------------------------------------------------------


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, table, _, *ctx.rest = inputs
    ctx.save_for_backward(table)


def _dispatch_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (table,) = ctx.saved_tensors
    return direct(COMBINE)(grad, None, table, *ctx.rest), *(None,) * 5


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weights, table, *ctx.rest = inputs
    ctx.save_for_backward(rows, weights, table)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Sends gradients and weights of rows to the experts' ranks, and gradients of weights back.

    A row of gradients travels once for each expert of a token; weights are single numbers.
    """
    rows, weights, table = ctx.saved_tensors
    top_k, num_experts, name = ctx.rest
    sent = direct(DISPATCH)(grad, table, rows.shape[0], top_k, num_experts, name)
    if weights is None:
        return sent, *(None,) * 5
    factors = direct(DISPATCH)(weights.reshape(-1, 1), table, rows.shape[0], 1, num_experts, name)
    dtype = wide(torch.promote_types(weights.dtype, rows.dtype))
    products = (sent.to(dtype) * rows.to(dtype)).reshape(rows.shape[0], math.prod(rows.shape[1:]))
    products = products.sum(1, keepdim=True)
    of_weights = direct(COMBINE)(products, None, table, 1, num_experts, name)
    of_rows = (sent * factors.view(-1, *(1,) * (rows.dim() - 1))).to(rows.dtype)
    return of_rows, of_weights.view_as(weights).to(weights.dtype), *(None,) * 4


# --- declarations ----------------------------------------------------------------------------


def example_table(on: Caller) -> torch.Tensor:
    """Returns a table: every rank has two tokens for each rank's only expert."""
    return torch.tensor([2] * on.world_size**2 + list(range(2 * on.world_size)))


def _route_types(t: Any, experts: Any, **_: Any) -> Any:
    table = t.varying("route of {}", "__->_", experts, "all_gather_into_tensor")
    return table, t.local("", "_->_", table)


def _dispatch_types(t: Any, tokens: Any, table: Any, **_: Any) -> Any:
    t.ignore(table)
    return t.varying("rows of {}", "_d->_d", tokens, "all_to_all_single")


def _combine_types(t: Any, rows: Any, weights: Any, table: Any, **_: Any) -> Any:
    t.ignore(weights, table)
    return t.varying("tokens of {}", "_d->_d", rows, "all_to_all_single")


declare(
    Op(
        name=_ROUTE,
        types=_route_types,
        schema=(
            "(Tensor experts, int num_experts, SymInt? capacity, str group_name)"
            " -> (Tensor, Tensor)"
        ),
        kernel=_route_kernel,
        fake=_route_fake,
        gradient=NoGradient("integers have none"),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            torch.arange(6).view(3, 2) % on.world_size, on.world_size, None, on.group_name
        ),
        native=True,
        internal=True,
    ),
    Op(
        name=DISPATCH,
        types=_dispatch_types,
        schema=(
            "(Tensor tokens, Tensor table, SymInt rows, int top_k, int num_experts, str group_name)"
            " -> Tensor"
        ),
        kernel=_dispatch_kernel,
        fake=_dispatch_fake,
        gradient=Gradient(_dispatch_backward, _dispatch_setup),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(2 * on.world_size, 3),
            example_table(on),
            2 * on.world_size,
            1,
            on.world_size,
            on.group_name,
        ),
        native=True,
    ),
    Op(
        name=COMBINE,
        types=_combine_types,
        schema=(
            "(Tensor rows, Tensor? weights, Tensor table, int top_k, int num_experts, "
            "str group_name) -> Tensor"
        ),
        kernel=_combine_kernel,
        fake=_combine_fake,
        gradient=Gradient(_combine_backward, _combine_setup),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(2 * on.world_size, 3),
            on.rand(on.world_size, 2),
            example_table(on),
            2,
            on.world_size,
            on.group_name,
        ),
        native=True,
    ),
)


# --- entry points ----------------------------------------------------------------------------


class Routing(NamedTuple):
    """Where the tokens of a `dispatch` call went; `combine` needs it to bring results back.

    `ends` (E / W,) int32: the row after the last row of each of this rank's experts, as
    `torch.nn.functional.grouped_mm` takes it for `offs`.
    """

    ends: torch.Tensor
    table: torch.Tensor
    top_k: int
    num_experts: int
    group_name: str


def route(
    tokens: torch.Tensor, experts: torch.Tensor, num_experts: int, capacity: int | None, name: str
) -> tuple[int, Routing]:
    """Returns how many rows this rank's experts get, and the routing. Collective."""
    if tokens.dim() == 0 or experts.dim() != 2 or tokens.shape[0] != experts.shape[0]:
        raise ValueError(
            f"dispatch: experts {list(experts.shape)} must be (tokens, experts of each) for tokens "
            f"{list(tokens.shape)}"
        )
    if tokens.device != experts.device:
        raise ValueError(f"dispatch: experts is on {experts.device}, tokens on {tokens.device}")
    table, ends = direct(_ROUTE)(experts, num_experts, capacity, name)
    rows = ends[-1].item()
    if torch.compiler.is_compiling():
        torch._check(rows >= 0)
    return rows, Routing(ends, table, experts.shape[1], num_experts, name)


@entry_point()
@shows_types(DISPATCH)
def dispatch(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    group: GroupLike,
    capacity: int | None = None,
) -> tuple[torch.Tensor, Routing]:
    """Sends each token to the ranks of its experts.

    Same result as::

        tokens, experts = torch.cat(all_ranks_tokens), torch.cat(all_ranks_experts)
        mine = range(rank * num_experts // W, (rank + 1) * num_experts // W)
        rows = torch.cat([tokens[(experts == e).nonzero()[:, 0]] for e in mine])

    Args:
        tokens: (T, ...), of any dtype; T may differ from rank to rank, and be 0.
        experts: (T, K) int64 or int32, the experts of each token, from 0 to `num_experts` - 1, or
            -1 for none. Rank r has the experts from r * num_experts / W on.
        num_experts: of all ranks, a multiple of W.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        capacity: the most tokens that an expert takes, from all ranks together; it takes the first
            ones in rank order. Pairs that it does not take count as zeros in `combine`.

    Returns the rows of this rank's experts (N, ...), ordered by expert, then by rank, then as the
    tokens of that rank, and the routing. Twice differentiable. N is known once the ranks have
    exchanged their numbers of tokens: `torch.compile` breaks the graph there, or captures N
    with `torch._dynamo.config.capture_scalar_outputs`. Raises `ValueError` or `TypeError` for
    arguments that do not fit, before any communication; `RuntimeError` when a peer fails or
    disagrees.
    """
    name = group_name(group)
    rows, routing = route(tokens, experts, num_experts, capacity, name)
    sent = direct(DISPATCH)(tokens, routing.table, rows, *routing[2:])
    return sent, routing


@shows_types(COMBINE)
def combine(rows: torch.Tensor, weights: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Brings the results of experts back to their tokens, and adds them up.

    Same result as, with `all_rows` of all ranks and `row_of(t, e)` token t's row of expert e::

        out[t] = sum(weights[t, k] * all_rows[row_of(t, experts[t, k])] for k in range(K))

    Args:
        rows: (N, ...), the results for the rows that `dispatch` returned, in their order; float64,
            float32, bfloat16 or float16.
        weights: (T, K), one for each token and expert, of any floating dtype; None: all are 1.
        routing: from `dispatch`.

    Returns (T, ...) of the dtype of rows, each sum added in the order of `experts`, in float32 for
    16-bit types, and rounded once. Twice differentiable in rows and weights. Raises `ValueError`
    or `TypeError` for arguments that do not fit, before any communication; `RuntimeError` when a
    peer fails or disagrees.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"combine: routing is {type(routing).__name__}, must be from dispatch()")
    out: torch.Tensor = direct(COMBINE)(
        rows, weights, routing.table, routing.top_k, routing.num_experts, routing.group_name
    )
    return out
