"""Checks of the options that change scores and weights, before any communication.

Shapes: B batch, H query heads; S_q and S_k are the lengths of the whole sequences.
"""

from __future__ import annotations

import math

import torch

from symm_cp.schedule.layout import SequenceLayout

#: The dtypes of queries, keys, values, sinks and biases.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPE_NAMES = "float64, float32, bfloat16 or float16"


def check_scores(
    op: str,
    query: torch.Tensor,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> None:
    """Raises unless these options fit the queries; those that need no layout."""
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
    _check_dropout(op, dropout_p, dropout_seed)


def _check_like_query(op: str, name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {_DTYPE_NAMES}")
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


def seed_of(dropout_p: float, seed: torch.Tensor | None) -> int | None:
    """Returns the seed of dropout; None without dropout."""
    return int(seed) if dropout_p > 0 and seed is not None else None


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


def check_over_sequence(
    op: str,
    name: str,
    tensor: torch.Tensor,
    query: torch.Tensor,
    length: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raises unless a tensor has an entry of these dtypes for each position of each sample."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype)[6:] for dtype in dtypes)
        raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {expected}")
    batch = query.shape[0]
    if tensor.dim() != 2 or tensor.shape[0] not in (1, batch) or tensor.shape[1] != length:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}, must be [{batch} or 1, {length}]: the "
            "samples and the positions of the whole sequence"
        )
