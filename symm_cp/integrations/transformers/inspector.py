"""Tells context_parallel about transformers' models: see `Inspector`."""

from __future__ import annotations

from symm_cp.context_parallel import inspectors
from symm_cp.integrations.transformers.batches import ModelBatchRules
from symm_cp.integrations.transformers.calls import check_call
from symm_cp.integrations.transformers.limits import is_model, limits_of, uses_transformers
from symm_cp.integrations.transformers.models import attending

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
