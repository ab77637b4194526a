"""The context manager `context_parallel`; sharding and un-sharding of tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.context_parallel import agreement, guards, inspectors
from symm_cp.context_parallel.block_mask import local_block_mask
from symm_cp.context_parallel.hooks import entered
from symm_cp.context_parallel.layouts import cut, note_cut, remember, remembered
from symm_cp.context_parallel.lengths import Balancers, BalancersByLength, balancer_for
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.context_parallel.region import active, region_over
from symm_cp.group.memory import GroupLike
from symm_cp.ops.attention.methods import MethodLike, group_by
from symm_cp.ops.common import unfused_all_gather
from symm_cp.ops.error_reports import reports_to_peers

Buffer = TypeVar("Buffer", torch.Tensor, BlockMask)


def _dim(op: str, tensor: torch.Tensor, seq_dim: int) -> int:
    if not -tensor.dim() <= seq_dim < tensor.dim():
        raise ValueError(f"{op}: {seq_dim=} is out of range for shape {list(tensor.shape)}")
    return seq_dim % tensor.dim()


def _balancers_for(
    op: str,
    buffers: Sequence[torch.Tensor | BlockMask],
    seq_dims: Sequence[int],
    world_size: int,
    load_balancer: Balancers | None,
) -> list[LoadBalancer]:
    """Returns each buffer's load balancer; if none is given, buffers must have equal lengths."""
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"{op}: {len(buffers)} buffers and {len(seq_dims)} sequence dimensions, must be equal"
        )
    balancers = []
    for buffer, seq_dim in zip(buffers, seq_dims, strict=True):
        if isinstance(buffer, BlockMask):
            length = buffer.seq_lengths[0]
        elif isinstance(buffer, torch.Tensor):
            length = buffer.shape[_dim(op, buffer, seq_dim)]
        else:
            raise TypeError(f"{op}: a buffer is a {type(buffer).__name__}, must be a tensor")
        balancers.append(balancer_for(op, load_balancer, length, world_size))
        if load_balancer is None:
            load_balancer = balancers[0]
    return balancers


def context_parallel_shard(
    mesh: GroupLike,
    buffers: Sequence[torch.Tensor | BlockMask] | Mapping[str, torch.Tensor | BlockMask],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: BalancersByLength | None = None,
    *,
    method: MethodLike | None = None,
) -> list[torch.Tensor | BlockMask] | dict[str, torch.Tensor | BlockMask]:
    """Returns this rank's parts of tensors and block masks, which stay unchanged.

    Args:
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name; a 2-D DeviceMesh for two methods.
        buffers: a list or dict of tensors of the whole sequence, the same on all ranks, and of
            `BlockMask`s. A mask is cut to this rank's queries against all keys, in the order in
            which `all_gather_kv` gathers keys; its sequence dimension is ignored.
        seq_dims: the sequence dimension of each buffer, negative counts from the end.
        load_balancer: how the sequence is spread, head-tail by default; for buffers of several
            lengths, a mapping from each length to its load balancer.
        method: required for a 2-D mesh, where the sequence is spread over all ranks; as in
            `context_parallel`.

    Not differentiable. Collective. Raises `ValueError` for buffers of different lengths or a length
    other than the load balancer's, `RuntimeError` on all ranks if they cut different buffers.
    Source: torch's `_context_parallel_shard`.
    """
    op = "context_parallel_shard"
    group = group_by(op, mesh, method)
    return _shard(op, group, buffers, seq_dims, load_balancer)


@reports_to_peers
def _shard(
    op: str,
    group: dist.ProcessGroup,
    buffers: Sequence[torch.Tensor | BlockMask] | Mapping[str, torch.Tensor | BlockMask],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: BalancersByLength | None,
) -> list[torch.Tensor | BlockMask] | dict[str, torch.Tensor | BlockMask]:
    if isinstance(buffers, Mapping):
        if not isinstance(seq_dims, Mapping) or set(seq_dims) != set(buffers):
            raise ValueError(f"{op}: seq_dims must have the keys of buffers, {sorted(buffers)}")
        names = list(buffers)
        each, dims = [buffers[n] for n in names], [seq_dims[n] for n in names]
        shards = _shard(op, group, each, dims, load_balancer)
        return dict(zip(names, shards, strict=True))
    if isinstance(seq_dims, Mapping):
        raise TypeError(f"{op}: seq_dims is a dict and buffers is not")
    balancers = _balancers_for(op, buffers, seq_dims, group.size(), load_balancer)
    _compare(op, group, buffers, seq_dims, balancers)
    parts: list[torch.Tensor | BlockMask] = []
    for buffer, dim, balancer in zip(buffers, seq_dims, balancers, strict=True):
        if isinstance(buffer, BlockMask):
            parts.append(local_block_mask(buffer, balancer, group.rank()))
        else:
            rows = balancer.positions(group.rank())
            parts.append(cut(op, buffer.detach(), dim % buffer.dim(), rows))
    for balancer in dict.fromkeys(balancers):
        tensors = (p for p, b in zip(parts, balancers, strict=True) if b == balancer)
        remember(group, balancer, shards=any(isinstance(t, torch.Tensor) for t in tensors))
    note_cut(group, set(balancers), (p for p in parts if isinstance(p, torch.Tensor)))
    return parts


def _compare(
    op: str,
    group: dist.ProcessGroup,
    buffers: Sequence[torch.Tensor | BlockMask],
    seq_dims: Sequence[int],
    balancers: Sequence[LoadBalancer],
) -> None:
    if buffers:
        named = [(f"buffers[{k}]", b) for k, b in enumerate(buffers) if isinstance(b, torch.Tensor)]
        agreement.compare_cut(op, group, named, balancers, list(seq_dims))


@contextmanager
def context_parallel(
    mesh: GroupLike,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
    load_balancer: Balancers | None = None,
    method: MethodLike | None = None,
    on_unfused: Literal["raise", "warn", "ignore"] = "raise",
) -> Iterator[None]:
    """Cuts buffers to this rank's part of the sequence, and runs attention context parallel.

    Inside, `F.scaled_dot_product_attention`, `flex_attention` and torch's `varlen_attn`, however
    they were imported, take this rank's parts of queries, keys and values and attend to the whole
    sequence. Cumulative lengths of `varlen_attn`, and `mask_mod`, `score_mod` and `BlockMask` of
    `flex_attention`, describe the whole (packed) sequence::

        with symm_cp.context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 0]):
            loss = model(tokens, positions)
            loss.backward()

    Args:
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name; a 2-D DeviceMesh for two methods.
        model: one or several models of transformers that run inside. Until the end they attend with
            attn_implementation="symm_cp", which supports their masks (padding, packed documents,
            windows, chunks), soft caps, sinks and dropout.
        buffers: tensors of the whole sequence, the same on all ranks, of equal length (or with a
            load balancer for each length, see below). They are cut
            in place (the same tensor objects then hold the shard) and restored at the end, also
            after an exception. Must not be parameters.
        buffer_seq_dims: the sequence dimension of each buffer, negative counts from the end.
        no_restore_buffers: the buffers that stay cut.
        load_balancer: how the sequence is spread, head-tail by default: then every rank has the
            same work under a causal mask. Any mask can be combined with any load balancer.
        method: how attention is split over the ranks. "allgather": each rank attends with its
            queries to all keys. "ulysses": ranks exchange parts of the sequence for heads; there
            must be at least one head per rank. "auto": for each call the one that is
            likely faster. For a 2-D mesh the method of each dimension, as in ("ulysses",
            "allgather"). The default is set by `set_rotate_method`.
        on_unfused: what to do at the end if modules ran but no such function was called, so that
            attention, if there was any, saw only this rank's part: "raise" `RuntimeError`, "warn",
            or "ignore" it. Does not apply after an exception or if no module ran.

    Contexts may be nested: the innermost counts. Compiled functions may be called within several
    contexts and without one; a context entered within a compiled function breaks its graph, and so
    does a checkpoint. `torch.utils.checkpoint` recomputes activations in the context of their first
    run, even if that has ended when the backward pass runs. An `attn_mask` must cover the whole
    sequence. Raises `NotImplementedError` for modules whose attention would be wrong:
    `nn.MultiheadAttention`, models of transformers that are not passed as `model`, or of families
    not known to equal one process, missing positions and generation. On one rank nothing is spread
    or refused. Raises `ValueError` or `TypeError` for an invalid model, and `ValueError` for
    invalid buffers and methods, and for shards that another load balancer has cut, before anything
    is changed; `RuntimeError` on all ranks if their buffers differ, or the parameters of a model
    that runs for the first time. Source: torch's `context_parallel`.
    """
    group, tensors = group_by("context_parallel", mesh, method), list(buffers or ())
    keep = {id(tensor) for tensor in no_restore_buffers or ()}
    balancers, shards = _cut_buffers(
        group, tensors, buffer_seq_dims or (), keep, load_balancer, on_unfused, model is not None
    )
    region = region_over(
        mesh,
        balancers[0] if balancers and load_balancer is None else load_balancer,
        method=method,
    )

    @contextmanager
    def again() -> Iterator[None]:
        with _holding(tensors, shards), ExitStack() as stack:
            _enter_models(stack, None, model)
            yield

    watch = region.watch()
    with (
        _holding(tensors, shards, keep),
        _attending(watch, model),
        entered(region, watch, again),
    ):
        yield
        watch.check_fused(on_unfused)


@contextmanager
def _holding(
    tensors: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], keep: Container[int] = ()
) -> Iterator[None]:
    """Has tensors hold shards; at the end restores all but those whose ids are in `keep`."""
    originals = [tensor.detach() for tensor in tensors]
    try:
        for tensor, shard in zip(tensors, shards, strict=True):
            _become(tensor, shard)
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            if id(tensor) not in keep:
                _become(tensor, original)


@contextmanager
def _attending(
    watch: guards.Watch, model: nn.Module | Sequence[nn.Module] | None
) -> Iterator[None]:
    """Has models attend to the whole sequence, through their library's inspector."""
    with ExitStack() as stack:
        guards.untraced(watch, lambda _: _enter_models(stack, watch, model))
        yield


def _enter_models(
    stack: ExitStack, watch: guards.Watch | None, model: nn.Module | Sequence[nn.Module] | None
) -> None:
    """Has models attend to the whole sequence until the end of `stack`; a watch judges them."""
    models = [] if model is None else [model] if isinstance(model, nn.Module) else list(model)
    for each in models:
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"context_parallel: model is a {type(each).__name__}, must be a module or several"
            )
    inside = stack.enter_context(inspectors.current().attending(models))
    if watch is not None and inside is not None:
        for each in models:
            watch.expects(each, inside)
    if model is not None and inside is None:
        names = ", ".join(sorted({type(each).__name__ for each in models}))
        raise ValueError(f"context_parallel: model={names} has no model of transformers in it")


@reports_to_peers
def _cut_buffers(
    group: dist.ProcessGroup,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    keep: set[int],
    load_balancer: Balancers | None,
    on_unfused: str,
    with_model: bool,
) -> tuple[list[LoadBalancer], list[torch.Tensor]]:
    """Checks the arguments of `context_parallel`; returns each buffer's load balancer and shard."""
    op = "context_parallel"
    if on_unfused not in guards.ON_UNFUSED:
        raise ValueError(f"{op}: {on_unfused=} must be one of {guards.ON_UNFUSED}")
    if not keep <= {id(buffer) for buffer in buffers}:
        raise ValueError(f"{op}: no_restore_buffers must be among buffers")
    for buffer in buffers:
        if isinstance(buffer, torch.nn.Parameter):
            raise ValueError(f"{op}: a buffer of shape {list(buffer.shape)} is a parameter")
    balancers = _balancers_for(op, buffers, seq_dims, group.size(), load_balancer)
    _compare(op, group, buffers, seq_dims, balancers)
    for balancer in balancers if with_model else ():
        if 0 in balancer.lengths:
            raise NotImplementedError(
                f"{op}: buffers of {balancer.seq_length} positions give some of {group.size()} "
                "ranks none, and models cannot reshape empty tensors: use symm_cp.training_step or "
                "symm_cp.shard_batch, which give such ranks a row of padding"
            )
    shards = [
        cut(op, buffer.detach(), dim % buffer.dim(), balancer.positions(group.rank()))
        for buffer, dim, balancer in zip(buffers, seq_dims, balancers, strict=True)
    ]
    for balancer in dict.fromkeys(balancers):
        remember(group, balancer, shards=bool(keep))
    return balancers, shards


@torch.no_grad()
def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    # set_ copies nothing; resize_ and copy_ would change tensors that share a view's memory.
    tensor.set_(other)  # type: ignore[call-overload]


def _balancer_used(op: str, group: dist.ProcessGroup, local_length: int) -> LoadBalancer:
    region = active()
    if region is not None and region.group == str(group.group_name):
        return region.layout(local_length)
    known = remembered(group, local_length)
    orders = [balancer.permutation() for balancer in known]
    if known and all(torch.equal(order, orders[0]) for order in orders):
        return next(iter(known))
    by = f"were cut by {sorted(map(repr, known))}" if known else "were not cut on this group"
    raise ValueError(
        f"{op}: shards of {local_length} positions {by}: pass the load_balancer that the sequence "
        "was cut by"
    )


@torch.no_grad()
def context_parallel_unshard(
    mesh: GroupLike,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    load_balancer: LoadBalancer | None = None,
    *,
    method: MethodLike | None = None,
) -> list[torch.Tensor]:
    """Gathers the ranks' parts of a sequence, in sequence order.

    Args:
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name; a 2-D DeviceMesh for two methods.
        buffers: this rank's parts.
        seq_dims: the sequence dimension of each, negative counts from the end.
        load_balancer: the load balancer that cut the sequence. By default the active context's, or
            else the one that `context_parallel`, `context_parallel_shard` or `shard_batch` used on
            this group for shards of this length.
        method: required for a mesh of two dimensions; as in `context_parallel`.

    Returns the whole tensors, the same on all ranks. Not differentiable. Raises `ValueError` if no
    load balancer is given and none or several were used, or for shards of the wrong length.
    Source: torch's `context_parallel_unshard`.
    """
    op = "context_parallel_unshard"
    group = group_by(op, mesh, method)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"{op}: {len(buffers)} buffers and {len(seq_dims)} seq_dims, must be equal"
        )
    dims = [_dim(op, buffer, dim) for buffer, dim in zip(buffers, seq_dims, strict=True)]
    gathered, rank = [], group.rank()
    for buffer, dim in zip(buffers, dims, strict=True):
        length = buffer.shape[dim]
        balancer = load_balancer or _balancer_used(op, group, length)
        fits = balancer.world_size == group.size()
        if not fits or length not in (balancer.lengths[rank], balancer.rows(rank)):
            raise ValueError(
                f"{op}: {balancer} gives rank {rank} of {group.size()} {balancer.lengths[rank]} "
                f"positions, the buffer has {length}"
            )
        gathered.append(_gather(buffer, dim, balancer, group))
    return gathered


def _gather(
    buffer: torch.Tensor, dim: int, balancer: LoadBalancer, group: dist.ProcessGroup
) -> torch.Tensor:
    size = max(balancer.lengths)
    padded = buffer.new_zeros([*buffer.shape[:dim], size, *buffer.shape[dim + 1 :]])
    held = balancer.lengths[group.rank()]  # without the padding of a rank without a position
    padded.narrow(dim, 0, held).copy_(buffer.narrow(dim, 0, held))
    gathered = unfused_all_gather(padded, dim, str(group.group_name))
    rows = balancer.gathered_rows()[balancer.inverse()]
    return cut("context_parallel_unshard", gathered, dim, rows)
