"""Which passes run, and from which size on they fuse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch._inductor.config


@dataclass(frozen=True)
class Options:
    """The options of `enable`.

    A matmul of fewer than `min_flops` floating-point operations is not fused. The default is 0 on
    CPU, where a fused op costs no more than a collective. On CUDA the parts of a smaller matmul do
    not fill a GPU (pytorch#179770: 0.3 of the speed). There the default is 2e11, which take an H100
    about as long as Python takes to start the parts, or 3e10 in CUDA graphs, which need no Python.
    """

    async_tp: bool = True
    context_parallel: bool = True
    low_contention: bool = False
    strict: bool = False
    min_flops: float | None = None
    min_bytes: int = 1 << 20
    all_reduce: bool = True

    def too_small(self, device: torch.device, flops: float) -> str:
        """Returns why matmuls are left alone, or an empty text."""
        min_flops = self.min_flops
        if min_flops is None:
            in_graphs = torch._inductor.config.triton.cudagraphs
            min_flops = 0.0 if device.type == "cpu" else 3e10 if in_graphs else 2e11
        if flops >= min_flops:
            return ""
        return f"a matmul of {flops:.3g} operations is too small (min_flops={min_flops:.3g})"
