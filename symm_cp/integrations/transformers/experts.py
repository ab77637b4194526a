"""Experts of transformers' models over the ranks: `ep_implementation="symm_cp"`.

`DistributedConfig(ep_size=W, ep_implementation="symm_cp")` has tokens sent to their experts, and
results back, by `symm_cp.moe`. Source: transformers' "all_to_all", which sorts, copies and permutes
the rows on both sides of each exchange.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from symm_cp import moe
from symm_cp.integrations.transformers.attention import NAME


class DispatchedExperts(EPImplementation):
    """Sends tokens to the ranks of their experts; of a batch that ranks share, each sends a part.

    Called with the tokens (T, D) of this rank, their experts (T, K) and weights (T, K); returns the
    weighted sums (T, D).
    """

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of all experts for this rank's tokens."""
        if self.tp_mesh.size() == 1:
            return self._results(hidden_states, top_k_index, top_k_weights)
        given = [self._own_part(t) for t in (hidden_states, top_k_index, top_k_weights)]
        whole = hidden_states.shape
        parts = DTensor.from_local(
            self._results(*given),
            self.tp_mesh,
            [Shard(0)],
            run_check=False,
            shape=whole,
            stride=(whole[1], 1),
        )
        return parts.full_tensor()

    def _own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of what the ranks of a TP group share; its gradient is whole."""
        shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _results(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        experts = self.num_local_experts * self.ep_mesh.size()
        rows, routing = moe.dispatch(tokens, chosen, experts, group=self.ep_mesh)
        return moe.combine(self._experts(rows, routing.ends), weights, routing)

    def _experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Each row has one expert, with weight 1: `combine` weighs the results."""
        nothing = rows.shape[0] == 0
        if nothing:  # zeros that nobody gets: gradients of experts are zeros rather than None
            rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
            ends = ends + 1
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        chosen = torch.repeat_interleave(counts).unsqueeze(1)
        out = self.experts_forward(rows, chosen, rows.new_ones(chosen.shape))
        return out[:0] if nothing else out


EPImplementationInterface.register(NAME, DispatchedExperts)
