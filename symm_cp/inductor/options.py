"""What the passes do, and from which size on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """The options of `enable`.

    A matmul of fewer than `min_flops` floating-point operations is not fused. By default none is
    too small on CPU, where a fused op starts faster than a collective; on CUDA the parts of a small
    matmul fill no GPU (pytorch#179770: 0.3 of the speed), so that 1e9 are needed there.
    """

    async_tp: bool = True
    context_parallel: bool = True
    low_contention: bool = False
    strict: bool = False
    min_flops: float | None = None
    min_bytes: int = 1 << 20

    def too_small(self, device: torch.device, flops: float) -> str:
        """Why a matmul is left alone, or nothing."""
        least = self.min_flops
        if least is None:
            least = 0.0 if device.type == "cpu" else 1e9
        if flops >= least:
            return ""
        return f"a matmul of {flops:.3g} operations is too small (min_flops={least:.3g})"
