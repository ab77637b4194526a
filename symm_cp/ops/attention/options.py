"""The options of the attention ops: their schemas are made of the fields of `Options`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from symm_cp.ops.attention.masks import MaskOptions, SymInts

#: A number that a graph may not know.
SymInt: TypeAlias = int

_TYPES = {
    "torch.Tensor": "Tensor",
    "list[int]": "int[]",
    "list[str]": "str[]",
    "SymInts": "SymInt[]",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreOptions:
    """How scores and weights change, and how the work is split: the options of all attention ops.

    `all_gather_attention` describes them. `head_offset` is the number of the call's first query
    head among the model's heads; dropout depends on it. `Method.of` interprets the options of a
    method.
    """

    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None
    head_offset: SymInt = 0
    method: str = "allgather"
    method_groups: list[str] | None = None
    method_columns: list[int] | None = None

    @property
    def scored_by_position(self) -> list[str]:
        """The options other than masks whose effect on a score depends on the query's position."""
        bias = ["bias"] if self.bias is not None else []
        return [*bias, "dropout_p"] if self.dropout_p > 0 else bias


@dataclass(frozen=True, kw_only=True, eq=False)
class Options(MaskOptions, ScoreOptions):
    """The options of a call; torch leaves out options that have the default of the schema.

    `layouts` (see layouts.py) replace the chunks: they say how keys and queries are spread.
    """

    chunk_order: list[int] | None = None
    chunk_lengths: SymInts | None = None
    query_chunk_order: list[int] | None = None
    query_chunk_lengths: SymInts | None = None
    layouts: torch.Tensor | None = None

    @property
    def by_position(self) -> list[str]:
        """The options that depend on the positions of queries."""
        return [*super().by_position, *self.scored_by_position]


def schema_of(*names: str) -> str:
    """Returns options as an op's schema declares them."""
    declared = {field.name: field for field in fields(Options)}
    return ", ".join(
        f"{_schema_type(declared[name].type)} {name}={_schema_default(declared[name].default)}"
        for name in names
    )


def _schema_type(annotation: Any) -> str:
    of_value, *optional = str(annotation).split(" | ")
    return _TYPES.get(of_value, of_value) + ("?" if optional else "")


def _schema_default(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# The order of the first options in the schemas, which is fixed; later options follow.
_FIRST = (
    *("is_causal", "scale", "enable_gqa", "chunk_order", "chunk_lengths", "cu_seqlens"),
    *("document_edges", "window_left", "window_right", "softcap", "sinks", "bias", "dropout_p"),
    *("dropout_seed", "document_ids", "key_mask", "query_chunk_order", "query_chunk_lengths"),
    *("layouts", "head_offset", "method", "method_groups", "method_columns"),
)
#: All options, in a schema.
OPTIONS = schema_of(*dict.fromkeys((*_FIRST, *(field.name for field in fields(Options)))))
#: Flex attention's options, in a schema: its mask is a function, scale and enable_gqa positional.
FLEX_OPTIONS = schema_of(*(field.name for field in fields(ScoreOptions)[2:]))
