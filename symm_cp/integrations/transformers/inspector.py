"""Tells context_parallel about transformers' models: see `Inspector`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from symm_cp.context_parallel import inspectors
from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.inspectors import BatchRules, Limit, known_of
from symm_cp.integrations.transformers.batches import ModelBatchRules
from symm_cp.integrations.transformers.calls import check_call
from symm_cp.integrations.transformers.limits import (
    is_model,
    limits_of,
    uses_transformers,
)
from symm_cp.integrations.transformers.models import attending


class _Inspector(inspectors.Inspector):
    attributes = frozenset(("active_adapter",))  # of PEFT

    def limits(self, module: nn.Module) -> tuple[Limit, ...]:
        return (*super().limits(module), *limits_of(module))

    def is_of_library(self, module: nn.Module) -> bool:
        return uses_transformers(module)

    def checks_calls(self, module: nn.Module) -> bool:
        return is_model(module)

    def check_call(self, watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
        check_call(watch, module, args, kwargs)

    def attending(
        self, models: Sequence[nn.Module]
    ) -> AbstractContextManager[list[nn.Module] | None]:
        known = [known_of(model) for model in models]
        used = any(each.select(uses_transformers) for each in known)
        return attending(known) if used else nullcontext()

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules:
        return ModelBatchRules(op, model)


inspectors.use(_Inspector())
