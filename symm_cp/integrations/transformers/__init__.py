"""Runs Hugging Face's transformers in `context_parallel`: `attn_implementation="symm_cp"`.

Importing this registers the implementation with `AttentionInterface` and `AttentionMaskInterface`,
and tells context_parallel about transformers' models (`Inspector`).
If the release has them, it also registers experts with `EPImplementationInterface`, fused styles
with `ALL_PARALLEL_STYLES`, and the backend for the groups that transformers itself starts on CPU.
"""

from __future__ import annotations

from contextlib import suppress

import transformers
from packaging.version import Version

if Version(transformers.__version__) < Version("5.23"):
    raise ImportError(
        f"symm_cp.integrations.transformers: transformers {transformers.__version__} is installed, "
        "must be 5.23 or later"
    )

from transformers import AttentionInterface, AttentionMaskInterface

from symm_cp.context_parallel import inspectors
from symm_cp.integrations.transformers.attention import NAME, attention_function, mask_function
from symm_cp.integrations.transformers.batches import ModelBatchRules
from symm_cp.integrations.transformers.calls import check_call
from symm_cp.integrations.transformers.families import FAMILIES
from symm_cp.integrations.transformers.limits import is_model, limits_of, uses_transformers
from symm_cp.integrations.transformers.models import attending

__all__ = ["FAMILIES", "NAME", "attending"]

inspectors.use(
    inspectors.Inspector(
        limits=limits_of,
        is_of_library=uses_transformers,
        checks_calls=is_model,
        check_call=check_call,
        attending=attending,
        batch_rules=ModelBatchRules,
    )
)
AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, mask_function)

with suppress(ImportError):
    from symm_cp.integrations.transformers import experts as _experts  # noqa: F401
with suppress(ImportError):
    from symm_cp.integrations.transformers import styles as _styles  # noqa: F401
with suppress(ImportError):
    from transformers.distributed.utils import DISTRIBUTED_BACKEND_MAP

    if DISTRIBUTED_BACKEND_MAP.get("cpu") == "gloo":  # the user has chosen no other
        DISTRIBUTED_BACKEND_MAP["cpu"] = NAME
