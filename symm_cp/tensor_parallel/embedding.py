"""Embeddings split by vocabulary: each rank looks up its own tokens, and the results are summed.

The weight is a DTensor with `Shard(0)`, like the weight of an output layer split by output
features, so both may be one parameter (tied weights).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from symm_cp.ops.error_reports import reports_to_peers
from symm_cp.tensor_parallel import replicated
from symm_cp.tensor_parallel.features import Features
from symm_cp.tensor_parallel.linear import local_part, output_placement


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose vocabulary is split over the ranks; all of them take the same tokens.

    Same result as::

        x = F.embedding(tokens, weight.full_tensor(), padding_idx)
        x_shard = x.chunk(W, sequence_dim)[rank]  # unless the output is replicated

    Made by the style, not by its constructor. Derived classes keep their own `forward`, which calls
    this one: the scaled embeddings of Gemma and BART scale the sum.
    """

    features: Features
    group: str
    sequence_dim: int | None
    local_output: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns (B, S, N) or (B, S / W, N) for tokens (B, S); `IndexError` for unknown tokens."""
        look_up = _look_up_reporting_to_peers if input.device.type == "cpu" else _look_up
        found, placement = look_up(input, self, self.group)
        if isinstance(placement, Shard):
            output: torch.Tensor = torch.ops.symm_mem._fused_matmuls_reduce_scatter(
                [], [], found, "sum", placement.dim, self.group
            )
        else:
            output = replicated.sum_ranks(found, self.group)
        if self.local_output:
            return output
        return DTensor.from_local(output, self.weight.device_mesh, [placement], run_check=False)


def _look_up(
    tokens: torch.Tensor, module: VocabParallelEmbedding, group: str
) -> tuple[torch.Tensor, Placement]:
    """Returns the embeddings of this rank's tokens, zeros for others, and the placement."""
    style, mesh = "FusedRowwiseParallel", module.weight.device_mesh
    tokens = local_part(style, "the tokens are", tokens, mesh, Replicate())
    weight, features = module.weight.to_local(), module.features
    start, count = features.computed.start(features.rank), features.count
    if count == 0:  # its gradient, empty, still takes part in the backward pass
        weight = F.pad(weight, (0, 0, 0, 1))
    index = tokens - start
    # Tokens that no rank has keep an index out of range, so that torch raises its `IndexError`.
    outside = (tokens >= 0) & (tokens < features.length) & ((index < 0) | (index >= count))
    padding = None
    if module.padding_idx is not None and 0 <= module.padding_idx - start < count:
        padding = module.padding_idx - start
    found = F.embedding(index.masked_fill(outside, 0), weight, padding)
    found = found.masked_fill(outside.unsqueeze(-1), 0)
    ranks = len(features.computed.sizes)
    return found, output_placement(style, module.sequence_dim, found, ranks)


_look_up_reporting_to_peers = reports_to_peers(_look_up)


@cache
def split_class(kind: Any) -> Any:
    """Returns the class of embeddings of a class that are split by vocabulary."""
    if kind is nn.Embedding:
        return VocabParallelEmbedding
    return type(kind.__name__, (kind, VocabParallelEmbedding), {"__doc__": kind.__doc__})


def check_embedding(style: str, module: nn.Embedding) -> None:
    """Raises `NotImplementedError` for options that need the whole vocabulary on each rank."""
    if "forward" in vars(module):
        name = type(module).__name__
        raise NotImplementedError(f"{style}: the forward of this {name} was replaced on the object")
    if option := option_of_whole(module):
        raise NotImplementedError(
            f"{style}: an embedding with {option}={getattr(module, option)} cannot be split by "
            "vocabulary"
        )


def option_of_whole(embedding: nn.Embedding) -> str | None:
    """Returns the name of an option of an embedding that needs the whole vocabulary, if any."""
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    return next((option for option in options if getattr(embedding, option)), None)
