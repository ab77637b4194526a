"""Spreads the experts of transformers' models over ranks: `ep_implementation="symm_cp"`.

With `DistributedConfig(ep_size=W, ep_implementation="symm_cp")`, `symm_cp.moe` sends tokens to
their experts, and results back: fused with the experts' matmuls if their module leaves these to
transformers' `ExpertsInterface`, else around the module. Source: transformers' "all_to_all", which
sorts, copies and permutes the rows on both sides of each exchange; `grouped_mm_experts_forward`.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from symm_cp import moe
from symm_cp.integrations.transformers.attention import NAME
from symm_cp.tensors.dtypes import one_of, wide

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Implementations of `ExpertsInterface` that compute the same results.
_SAME_RESULTS = (None, "eager", "grouped_mm", "batched_mm")


def why_not_fused(experts: nn.Module, tokens: torch.Tensor) -> str | None:
    """Returns the reason why a module of experts is not fused, or None if it is."""
    forward = getattr(type(experts).forward, "__code__", None)
    if forward is None or "experts_interface" not in forward.co_freevars:
        return "its forward does not use transformers' ExpertsInterface"
    implementation = getattr(experts.config, "_experts_implementation", None)
    if implementation not in _SAME_RESULTS:
        return f"experts_implementation={implementation!r} has kernels of its own"
    if experts.has_post_expert_norm:
        return "it has a norm after the last matmul"
    for name, weight in (("up", _up(experts)), ("down_proj", experts.down_proj)):
        if type(weight) not in (torch.Tensor, nn.Parameter):
            return f"its weight {name} is a {type(weight).__name__}, not a plain tensor"
        if weight.dtype not in _DTYPES:
            return f"its weight {name} is {weight.dtype}, must be {one_of(_DTYPES)}"
        if weight.dtype != tokens.dtype and not torch.is_autocast_enabled(tokens.device.type):
            return f"its weight {name} is {weight.dtype}, the tokens are {tokens.dtype}"
    return None


def _up(experts: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return weight


class DispatchedExperts(EPImplementation):
    """Sends tokens to the ranks of their experts; ranks that share a batch send a part of it each.

    Takes this rank's tokens (T, D), their experts (T, K) and weights (T, K); returns the weighted
    sums (T, D).
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._module = experts
        # transformers replaces the instance's forward next; an earlier replacement stays in use.
        self._replaced = "forward" in vars(experts)
        self._reasons: set[str] = set()

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
        """Returns this rank's part of a tensor that a TP group shares; the gradient is whole."""
        shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _results(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if (reason := self._why_not_fused(tokens)) is None:
            return self._fused(tokens, chosen, weights)
        if reason not in self._reasons:
            self._reasons.add(reason)
            warnings.warn(
                f"ep_implementation={NAME!r}: {type(self._module).__name__} is not fused with "
                f"dispatch and combine: {reason}",
                stacklevel=2,
            )
        rows, routing = moe.dispatch(tokens, chosen, self._count, group=self.ep_mesh)
        return moe.combine(self._experts(rows, routing.ends), weights, routing)

    def _why_not_fused(self, tokens: torch.Tensor) -> str | None:
        if self._replaced:
            return "the forward of this instance was replaced"
        return why_not_fused(self._module, tokens)

    @property
    def _count(self) -> int:
        """The number of experts on all ranks."""
        count: int = self.num_local_experts * self.ep_mesh.size()
        return count

    def _fused(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes the same as an `ExpertsInterface` implementation, with the two fused ops."""
        experts = self._module

        def factor(weight: torch.Tensor) -> torch.Tensor:
            return weight if experts.is_transposed else weight.mT

        hidden, routing = moe.dispatch_matmul(
            tokens, factor(_up(experts)), chosen, self._count, group=self.ep_mesh
        )
        if experts.has_bias:
            bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
            counts = torch.diff(routing.ends, prepend=routing.ends.new_zeros(1))
            # Gradients of 16-bit biases are summed over the rows in float32.
            each = bias.to(wide(bias.dtype)).repeat_interleave(
                counts, 0, output_size=hidden.shape[0]
            )
            hidden = hidden + each.to(hidden.dtype)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        down = factor(experts.down_proj)
        if not experts.has_bias:
            return moe.matmul_combine(hidden, down, weights, routing)
        ones = hidden.new_ones((hidden.shape[0], 1))
        bias = experts.down_proj_bias.unsqueeze(1)
        return moe.matmul_combine((hidden, ones), (down, bias), weights, routing)

    def _experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Calls the experts with one expert per row and weight 1: `combine` applies the weights."""
        nothing = rows.shape[0] == 0
        if nothing:  # a row of zeros, cut off below: experts get gradients of zeros, not None
            rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
            ends = ends + 1
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        chosen = torch.repeat_interleave(counts).unsqueeze(1)
        out = self.experts_forward(rows, chosen, rows.new_ones(chosen.shape))
        return out[:0] if nothing else out


EPImplementationInterface.register(NAME, DispatchedExperts)
