"""vLLM's device communicator for CPU tensors over shared memory.

It keeps the methods of `DeviceCommunicatorBase` that run well over the backend symm_cp
(`all_gather`, `reduce_scatter`, `gather`, `send`, `recv`, `broadcast`). It adds functions that the
base class and vLLM's `CpuCommunicator` lack: gathers and reduce-scatters of unequal parts.

A call with invalid sizes raises `ValueError` before any communication, and the error is reported to
the other ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from symm_cp.group.hosts import apart_of
from symm_cp.group.memory import resolve
from symm_cp.integrations import parts
from symm_cp.ops.direct import direct

_CPU = torch.device("cpu")


class SymmCommunicator(DeviceCommunicatorBase):
    """Communication of one of vLLM's groups, over a `device_group` with the backend symm_cp.

    All ranks of the group must construct it together. Ranks in arguments are ranks in the group.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        super().__init__(
            cpu_group, device, device_group, unique_name=unique_name, use_all2all=use_all2all
        )
        self.device_group = cpu_group if device_group is None else device_group
        self._group_name = self.device_group.group_name
        self._on_one_host = apart_of(resolve(self.device_group), _CPU) is None
        if self.use_all2all:  # as in vLLM's CPU communicator: gathers, then reduce-scatters
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, in new memory; on several hosts in the input's memory."""
        if not self._on_one_host:
            return super().all_reduce(input_)
        # Native code from the dispatcher on, and one opaque op for vLLM's compiler.
        total: torch.Tensor = direct("one_shot_all_reduce")(input_, "sum", self._group_name)
        return total

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gathers parts whose lengths along `dim` are `sizes`, by default this rank's length each.

        With a list it gathers all tensors, whose parts must have the same lengths.
        """
        inputs = [input_] if isinstance(input_, torch.Tensor) else list(input_)
        outputs = parts.gather("all_gatherv", inputs, dim, sizes, self.device_group)
        return outputs[0] if isinstance(input_, torch.Tensor) else outputs

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Returns this rank's part, `sizes[rank]` long along `dim`, of the sum over the ranks.

        By default all parts are equal, and the world size must divide the dimension.
        """
        return parts.reduce_scatter("reduce_scatterv", input_, dim, sizes, self.device_group)

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: list[int] | None = None,
    ) -> torch.Tensor:
        """Writes the result of `reduce_scatterv` to `output`, and returns it."""
        op = "reduce_scatterv_into_output"
        return parts.reduce_scatter(op, input_, dim, sizes, self.device_group, output)

    # vLLM's manager sends to the experts' ranks and back, with the gathers above. Without a manager
    # the base class returns its input.

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers the tokens of all ranks, and the router's logits."""
        return self._experts.dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers the tokens of all ranks, and the experts that they chose."""
        return self._experts.dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the sums of the experts' results for this rank's tokens."""
        return self._experts.combine(*args, **kwargs)

    def combine_into_output(self, *args: Any, **kwargs: Any) -> Any:
        """Writes the result of `combine` to `output`, and returns it."""
        return self._experts.combine_into_output(*args, **kwargs)

    @property
    def _experts(self) -> Any:
        return super() if self.all2all_manager is None else self.all2all_manager
