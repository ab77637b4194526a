"""`varlen_attn` of torch.nn.attention.varlen within a region, on this rank's tokens.

`varlen_attn` is a Python function that calls the custom op `torch_attn::_varlen_attn`. The mode of
a region (hooks.py) sees that op, however the function was imported, also when Dynamo traces it.

Tokens have no sample dimension, so the number of sequences in a row follows from the end of the
cumulative lengths. Graphs can read that only when they run, so `_packed_sequence` is an op.

Shapes: T tokens of this rank, N documents, B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.context_parallel.attention import all_gather_attention, is_dtensor
from symm_cp.context_parallel.gathered_keys import in_tiles
from symm_cp.context_parallel.guards import constant_when_traced
from symm_cp.context_parallel.region import (
    ParallelRegion,
    outside_graph,
    untraced,
    with_padding,
)
from symm_cp.cuda.cached import HostReads
from symm_cp.ops.attention.layouts import decoded, encoded, encoded_in_a_row
from symm_cp.ops.attention.masks import check_readable
from symm_cp.ops.attention.mesh_calls import reporting_to_peers
from symm_cp.ops.error_reports import names_op
from symm_cp.schedule.layout import SequenceLayout, sequential

VARLEN = "varlen_attn"
#: The names of torch's ops, and of their only overloads.
OPS = frozenset(
    ("_varlen_attn", "_varlen_attn.default", "_varlen_attn_out", "_varlen_attn_out.default")
)

_INTS = (torch.int32, torch.int64)
_SHOWN = 8  # numbers of a list in an error


# --- the function, as the mode of a region sees it ----------------------------------------------


@constant_when_traced
def is_varlen(func: Any) -> bool:
    """Whether a function whose name is in `OPS` is one of torch's ops."""
    op = getattr(torch.ops.torch_attn, func.__name__.removesuffix(".default"))
    return func is op or func is op.default


def call(region: ParallelRegion, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the results of torch's op, for attention to the whole sequence: (out, lse, state).

    Unsupported calls are refused on several ranks, and left to torch on one rank.
    """
    given = {**dict(zip(_arguments(func), args, strict=False)), **kwargs}
    if region.world_size == 1 and _unsupported(func, given) is not None:
        return func(*args, **kwargs)
    query = given["query"]
    if not torch.compiler.is_dynamo_compiling():
        # In frames that Dynamo could not trace, it would compile the called functions piecewise.
        out, lse = untraced(_call)(region, func, given)
    elif region.holds_none or not in_tiles(query.device):
        out, lse = outside_graph(_call, region, func, given)
    else:
        out, lse = _call(region, func, given)
    return out, lse, torch.zeros((2,), dtype=torch.uint64, device=query.device)


@constant_when_traced
def _arguments(func: Any) -> tuple[str, ...]:
    """Returns the names of an op's arguments, which differ between releases of torch."""
    overload = getattr(func, "default", func)
    return tuple(argument.name for argument in overload._schema.arguments)


def _call(
    region: ParallelRegion, func: Any, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    return reporting_to_peers(region.peers, _attend_given, region, func, given)


_SERVED = {
    *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
    *("is_causal", "scale", "window_size", "enable_gqa"),
}


def _unsupported(func: Any, given: dict[str, Any]) -> str | None:
    """Returns why a call is not supported; None if it is."""
    if "out" in given:
        return (
            f"{VARLEN}_out within context_parallel is not supported: call {VARLEN}, which returns "
            "its result"
        )
    if given["cu_seq_k"] is None:
        return (
            f"{VARLEN}: cu_seq_k=None within context_parallel is not supported: pass cu_seq_q, "
            "since every document of queries is one of keys"
        )
    for name, value in given.items():
        # `seqused_k`, `block_table`, `num_splits`, and arguments that later releases add.
        if name not in _SERVED and value is not None and value is not False:
            return (
                f"{VARLEN}: {name} within context_parallel is not supported: leave it out (paged "
                "or partly filled key caches, and numbers of splits, work in one process only)"
            )
    return None


@names_op(VARLEN)
def _attend_given(
    region: ParallelRegion, func: Any, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    region.expect(VARLEN)
    reason = _unsupported(func, given)
    if reason is not None:
        raise NotImplementedError(reason)
    window = given.get("window_size")
    left, right = (-1, -1) if window is None else window
    if given.get("is_causal", False):
        right = 0
    tensors = (given["query"], given["key"], given["value"])
    documents = given["cu_seq_q"], given["cu_seq_k"]
    return attend(region, tensors, documents, (left, right), given.get("scale"))


# --- attention to packed documents --------------------------------------------------------------


def attend(
    region: ParallelRegion,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    documents: tuple[torch.Tensor, torch.Tensor],
    window: tuple[int, int],
    scale: float | None = None,
    *,
    layouts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends within documents packed into a whole sequence, or into B consecutive sequences.

    Args:
        region: gives the group, and how each sequence is spread.
        tensors: query (T, H, E), key (T, G, E) and value (T, G, V), this rank's parts of each
            sequence, one after the other. G is H or a divisor of it.
        documents: cumulative lengths of the documents of all ranks' queries and keys, (N + 1,) of
            int32 or int64.
        window: how many positions before and after its own a query sees; negative: all.
        scale: of the scores; 1 / sqrt(E) by default.
        layouts: encoded layouts to use instead of the region's.

    Returns (T, H, V), and the log-sum-exp (H, T). Raises `ValueError`, `TypeError` and
    `NotImplementedError` before any communication.
    """
    _check_tokens(*tensors)
    padding = tensors[0].shape[0] if region.holds_nothing else 0
    query, key, value = (tensor[padding:] for tensor in tensors) if padding else tensors
    tokens = query.shape[0]
    if layouts is None:
        layouts = _layouts(region, tokens)
    told = region.peers
    edges, layouts = torch.ops.symm_cp.packed_sequence(
        *documents,
        tokens,
        layouts,
        region.group,
        [told] if isinstance(told, str) else list(told),
    )
    left, right = window
    out, lse = all_gather_attention(
        *(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)),
        group=region.group,
        is_causal=right == 0,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        load_balancer=layouts,
        cu_seqlens=edges,
        window_left=left if left >= 0 else None,
        window_right=right if right > 0 else None,
        method=region.method,
        return_lse=True,
    )
    if padding:
        out, lse = (with_padding(each, 2, padding) for each in (out, lse))
    # Heads of a token are contiguous, as in torch's result, which users view as (T, H * V).
    return out[0].transpose(0, 1).contiguous(), lse[0]


def _check_tokens(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if is_dtensor(tensor):
            raise NotImplementedError(
                f"{VARLEN}: {name} is a DTensor, which is not supported within context_parallel: "
                "pass this rank's part (to_local())"
            )
        if tensor.dim() != 3:
            raise ValueError(
                f"{VARLEN}: {name} has shape {list(tensor.shape)}, must be (tokens, heads, "
                "features)"
            )
        if tensor.shape[0] != query.shape[0]:
            raise NotImplementedError(
                f"{VARLEN}: query has {query.shape[0]} tokens and {name} {tensor.shape[0]}: within "
                "context_parallel documents of queries and keys must be the same"
            )


def _layouts(region: ParallelRegion, tokens: int) -> torch.Tensor:
    if region.packed is not None:
        return region.packed
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            f"{VARLEN}: a function as load_balancer is not supported in compiled code: pass a "
            "LoadBalancer, or a mapping of lengths to LoadBalancers"
        )
    return encoded((region.layout(tokens).of_all_samples,))


# --- the op -------------------------------------------------------------------------------------

_library = torch.library.Library("symm_cp", "FRAGMENT")
_library.define(
    "packed_sequence(Tensor cu_seq_q, Tensor cu_seq_k, SymInt tokens, Tensor layouts, "
    "str group_name, str[] told) -> (Tensor, Tensor)"
)


def _packed_sequence(
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    tokens: int,
    layouts: torch.Tensor,
    group_name: str,
    told: list[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks and returns the edges of documents on CPU, and the layout of all tokens.

    The layout is the only one of `layouts` that fits the tokens, as one sequence or several in a
    row.
    """
    over = told[0] if len(told) == 1 else tuple(told)
    return reporting_to_peers(over, _checked, cu_seq_q, cu_seq_k, tokens, layouts, group_name)


def _checked(
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    tokens: int,
    layouts: torch.Tensor,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    edges = _edges("cu_seq_q", cu_seq_q)
    if cu_seq_k is not cu_seq_q and (other := _edges("cu_seq_k", cu_seq_k)) != edges:
        raise NotImplementedError(
            f"{VARLEN}: cu_seq_q is {_shown(edges)} and cu_seq_k {_shown(other)}: within "
            "context_parallel documents of queries and keys must be the same"
        )
    if len(edges) < 2 or edges[0] != 0 or edges != sorted(edges):
        raise ValueError(f"{VARLEN}: cu_seq_q={_shown(edges)} must ascend from 0")
    known = decoded(VARLEN, layouts, group.size())
    layout, samples = _spread(known, tokens, edges[-1], group.rank(), group.size())
    encoded_edges = torch.tensor(edges, dtype=torch.int64, device="cpu")
    return encoded_edges, encoded_in_a_row(layout, samples, int(layouts.shape[0]))


_edges_read: HostReads[list[int]] = HostReads()


def _edges(name: str, cu_seq: torch.Tensor) -> list[int]:
    if cu_seq.dim() != 1 or cu_seq.dtype not in _INTS:
        raise ValueError(
            f"{VARLEN}: {name} must be a 1-D tensor of int32 or int64, is {cu_seq.dtype} "
            f"{list(cu_seq.shape)}"
        )
    check_readable(VARLEN, name, cu_seq, cu_seq.device)
    return _edges_read.get(cu_seq, cu_seq.tolist)


def _shown(edges: Sequence[int]) -> str:
    if len(edges) <= _SHOWN:
        return str(list(edges))
    return f"[{', '.join(map(str, edges[: _SHOWN - 1]))}, ..., {edges[-1]}]"


def _spread(
    known: Sequence[SequenceLayout], tokens: int, total: int, rank: int, world_size: int
) -> tuple[SequenceLayout, int]:
    """Returns a sequence's layout, and the number of sequences in `total` tokens of all ranks."""
    if world_size == 1 and total == tokens:
        return sequential(total, 1), 1
    if tokens == total == 0:
        return sequential(0, world_size), 1
    if not known:
        raise ValueError(
            f"{VARLEN}: context_parallel has no load_balancer, so the number of sequences in the "
            "tokens is unknown: pass the load_balancer that the batch was cut by (shard_batch "
            "returns it as reduce_loss.load_balancer)"
        )
    found = []
    for layout in (each for each in known if each.length):
        samples, rest = divmod(total, layout.length)
        if rest == 0 and samples * layout.lengths[rank] == tokens:
            found.append((layout, samples))
    if len(found) == 1:
        return found[0]
    if found:
        lengths = [layout.length for layout, _ in found]
        raise ValueError(
            f"{VARLEN}: {total} tokens may be sequences of any of {lengths} positions: pass a "
            "load_balancer of one of these lengths"
        )
    held = " or ".join(f"{each.lengths[rank]} of {each.length}" for each in known)
    raise ValueError(
        f"{VARLEN}: cu_seq_q ends at {total}, this rank has {tokens} tokens, and the load_balancer "
        f"gives it {held} positions: cu_seq_q must end at the number of all ranks' tokens. Compute "
        "cumulative lengths from the whole batch, before it is cut (shard_batch leaves tensors "
        "named cu_seq... whole), and count padding as a document"
    )


def _fake_packed_sequence(
    cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, tokens: int, layouts: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    edges = torch.empty(cu_seq_q.shape, dtype=torch.int64, device="cpu")
    return edges, torch.empty(layouts.shape, dtype=torch.int64, device="cpu")


_library.impl("packed_sequence", _packed_sequence, "CompositeExplicitAutograd")
torch.library.register_fake("symm_cp::packed_sequence", _fake_packed_sequence, lib=_library)
