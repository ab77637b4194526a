"""The options of the attention ops, as their schemas and their kernels have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: In a schema: a `Method` of methods.py.
METHOD_OPTIONS = 'str method="allgather", str[]? method_groups=None, int[]? method_columns=None'

#: In a schema; `Options` has the same.
OPTIONS = (
    "bool is_causal=False, float? scale=None, bool enable_gqa=False, int[]? chunk_order=None, "
    "SymInt[]? chunk_lengths=None, Tensor? cu_seqlens=None, SymInt[]? document_edges=None, "
    "int? window_left=None, int? window_right=None, float? softcap=None, Tensor? sinks=None, "
    "Tensor? bias=None, float dropout_p=0.0, Tensor? dropout_seed=None, "
    "Tensor? document_ids=None, Tensor? key_mask=None, int[]? query_chunk_order=None, "
    "SymInt[]? query_chunk_lengths=None, Tensor? layouts=None, SymInt head_offset=0, "
    f"{METHOD_OPTIONS}"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The options of a call; torch leaves out those that have the default of the schema.

    `document_edges` are those that `cu_seqlens` would hold, `layouts` (see layouts.py) say how keys
    and queries are spread instead of their chunks. `head_offset` is the number of the first of the
    call's query heads among all of the model, which dropout depends on. `Method.of` knows what the
    options of a method mean. The others are those of `all_gather_attention`.
    """

    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    chunk_order: list[int] | None = None
    chunk_lengths: list[int] | None = None
    cu_seqlens: torch.Tensor | None = None
    document_edges: list[int] | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    query_chunk_order: list[int] | None = None
    query_chunk_lengths: list[int] | None = None
    layouts: torch.Tensor | None = None
    head_offset: int = 0
    method: str = "allgather"
    method_groups: list[str] | None = None
    method_columns: list[int] | None = None

    @property
    def of_documents(self) -> list[str]:
        """The options that give documents."""
        return [
            name
            for name in ("cu_seqlens", "document_edges", "document_ids")
            if getattr(self, name) is not None
        ]

    @property
    def by_position(self) -> list[str]:
        """The options that depend on the positions of queries."""
        limits = [
            name for name in ("window_left", "window_right") if getattr(self, name) is not None
        ]
        causal = ["is_causal"] if self.is_causal else []
        return [*causal, *limits, *self.of_documents, *self.scored_by_position]

    @property
    def scored_by_position(self) -> list[str]:
        """The options that do so for every score, not as a mask."""
        bias = ["bias"] if self.bias is not None else []
        return [*bias, "dropout_p"] if self.dropout_p > 0 else bias
