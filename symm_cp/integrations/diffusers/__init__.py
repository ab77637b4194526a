"""Context parallelism of Hugging Face's diffusers on this package's ops.

`enable()` once, then `model.enable_parallelism(config=ContextParallelConfig(...))` as usual.
"""

from __future__ import annotations

from symm_cp.integrations.diffusers.patches import disable, enable

__all__ = ["disable", "enable"]
