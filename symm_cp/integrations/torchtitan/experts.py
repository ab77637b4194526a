"""An override of torchtitan's token dispatcher, to be named in `--override.imports`.

    --override.imports symm_cp.integrations.torchtitan.experts.token_dispatcher

`symm_cp.moe` then sends tokens to the experts that torchtitan spreads over the mesh "ep". It sorts
tokens by expert while it sends them, and adds results up as they come back; torchtitan's
all-to-alls need a sort and a permutation on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from symm_cp import moe

__all__ = ["SymmTokenDispatcher", "token_dispatcher"]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The metadata for `combine`: where tokens went, and the weights of their experts (T, K)."""

    routing: moe.Routing
    scores: torch.Tensor


class SymmTokenDispatcher(AllToAllTokenDispatcher):
    """Sends tokens to the ranks of their experts, and results back.

    Without a mesh "ep" it behaves like torchtitan's. Shapes: T tokens of this rank with K experts
    each, D features, R rows of this rank's experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """The same fields as torchtitan's `Config`."""

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Returns the rows (R, D) of this rank's experts, the count of each, and the metadata."""
        if self.ep_mesh is None:
            return super().dispatch(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        if spmd_types.is_type_checking():
            raise NotImplementedError(
                f"{type(self).__name__}: its functions have no rules for spmd_types: turn its "
                "type checking off"
            )
        rows, routing = moe.dispatch(x_TD, topk_expert_ids_TK, self.num_experts, group=self.ep_mesh)
        ends = routing.ends
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return rows, counts, Dispatched(routing=routing, scores=topk_scores_TK)

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sums (T, D) of the results of all experts for this rank's tokens."""
        if self.ep_mesh is None:
            return super().combine(routed_output_RD, metadata, x_TD)
        return moe.combine(routed_output_RD, metadata.scores, metadata.routing)


@override(
    target=AllToAllTokenDispatcher.Config,
    description="tokens to experts on symm_cp",
    exact=True,  # subclasses pad the tokens of experts, or have own buffers
)
def token_dispatcher(config: AllToAllTokenDispatcher.Config) -> AllToAllTokenDispatcher.Config:
    """Replaces torchtitan's `AllToAllTokenDispatcher` ("standard")."""
    return derive(config, SymmTokenDispatcher.Config)
