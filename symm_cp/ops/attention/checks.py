"""Checks of tensors and options, before any communication.

Shapes: B batch, H query heads; S_q and S_k are the lengths of the whole sequences.
"""

from __future__ import annotations

import math

import torch

from symm_cp.ops.attention.options import Options, ScoreOptions
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.dtypes import FLOATING, one_of


def check_tensors(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """Raises unless queries, keys and values fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{op}: {name} must be (batch, heads, sequence, features), has shape "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {one_of(FLOATING)}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype} and query {query.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and query on {query.device}")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"{op}: key of shape {list(key.shape)} must have batch {query.shape[0]} and "
            f"{query.shape[3]} features, as query of shape {list(query.shape)}"
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{op}: key {list(key.shape)} and value {list(value.shape)} must have the same batch, "
            "heads and length"
        )
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared and not enable_gqa:
        raise ValueError(
            f"{op}: query has {heads} heads and key {shared}: must be equal, or pass "
            "enable_gqa=True"
        )
    if heads != shared and (shared == 0 or heads % shared != 0):
        raise ValueError(f"{op}: query has {heads} heads, not divisible by {shared} key heads")


def check_saved(op: str, query: torch.Tensor, value: torch.Tensor, **saved: torch.Tensor) -> None:
    """Raises unless tensors of a backward pass have the dtype and shape of the output."""
    shape = [*query.shape[:3], value.shape[3]]
    for name, tensor in saved.items():
        if tensor.dtype != query.dtype or tensor.device != query.device or tensor.dim() != 4:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}, must be a dense {query.dtype} "
                f"tensor of 4 dimensions on {query.device}"
            )
        if list(tensor.shape) != shape:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, must be {shape}, as the output"
            )


def check_windows(op: str, options: Options) -> None:
    """Raises for negative sizes of a window."""
    for name, size in (
        ("window_left", options.window_left),
        ("window_right", options.window_right),
    ):
        if size is not None and size < 0:
            raise ValueError(f"{op}: {name}={size} must not be negative; None is no limit")


def check_scores(op: str, query: torch.Tensor, options: ScoreOptions) -> None:
    """Raises unless options that change scores and weights fit the queries; needs no layout."""
    softcap, sinks, bias = options.softcap, options.sinks, options.bias
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"{op}: {softcap=} must be positive and finite; None is no soft cap")
    heads = query.shape[1]
    if sinks is not None:
        _check_like_query(op, "sinks", sinks, query)
        if sinks.dim() != 1 or sinks.shape[0] != heads:
            raise ValueError(
                f"{op}: sinks has shape {list(sinks.shape)}, must be [{heads}], a logit for each "
                "query head"
            )
    if bias is not None:
        _check_like_query(op, "bias", bias, query)
        if bias.dim() != 2 or bias.shape[0] != heads:
            raise ValueError(
                f"{op}: bias has shape {list(bias.shape)}, must be [{heads}, S_q + S_k - 1], a row "
                "for each query head"
            )
    _check_dropout(op, options.dropout_p, options.dropout_seed)
    if options.head_offset < 0:
        raise ValueError(f"{op}: head_offset={options.head_offset} must not be negative")


def _check_like_query(op: str, name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {one_of(FLOATING)}")
    if tensor.device != query.device:
        raise ValueError(f"{op}: {name} is on {tensor.device} and query on {query.device}")


def _check_dropout(op: str, dropout_p: float, seed: torch.Tensor | None) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{op}: {dropout_p=} must be at least 0 and less than 1")
    required = "an int64 tensor of one element on CPU, equal on all ranks"
    if seed is None:
        if dropout_p > 0:
            raise ValueError(f"{op}: {dropout_p=} requires dropout_seed, {required}")
        return
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device.type != "cpu":
        raise ValueError(
            f"{op}: dropout_seed is {seed.dtype} {list(seed.shape)} on {seed.device}, must be "
            f"{required}"
        )


def seed_of(options: ScoreOptions) -> int | None:
    """Returns the seed of dropout; None without dropout."""
    seed = options.dropout_seed
    return int(seed) if options.dropout_p > 0 and seed is not None else None


def check_bias_length(
    op: str, bias: torch.Tensor, queries: SequenceLayout, keys: SequenceLayout
) -> None:
    """Raises unless a bias has an entry for every distance of a query and a key."""
    required = max(0, queries.length + keys.length - 1)
    if bias.shape[1] != required:
        raise ValueError(
            f"{op}: bias has shape {list(bias.shape)}, must be [{bias.shape[0]}, {required}]: an "
            f"entry for each distance of the {queries.length} queries and {keys.length} keys of "
            "the whole sequence"
        )
