"""Tells context_parallel about transformers' models: see `Inspector`.

This imports transformers only for models passed to `context_parallel`. A release with unknown masks
raises there; models are still checked.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from symm_cp.context_parallel import inspectors
from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.inspectors import BatchRules, Verdict, known_of
from symm_cp.integrations.transformers.batches import ModelBatchRules
from symm_cp.integrations.transformers.calls import check_call
from symm_cp.integrations.transformers.limits import (
    ATTRIBUTES,
    FLEX_ATTENTION,
    attends_with_symm_cp,
    first_position,
    implementation_of,
    limits_of,
    uses_transformers,
)


class _FlexMasks:
    """Makes models with their own flex attention use masks of the whole sequence.

    transformers makes masks only of the model's input, this rank's part. While a context is active,
    flex_masks.py's function replaces the one that transformers registered for
    `attn_implementation="flex_attention"`. In threads outside of any region it still makes
    transformers' own masks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] | None = None

    @property
    def whole(self) -> bool:
        """Whether masks of models with flex attention cover the whole sequence."""
        return self._restore is not None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Makes masks cover the whole sequence in the `with` block."""
        with self._lock:
            self._users += 1
            if self._restore is None:
                self._restore = _replace()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._restore is not None:
                    self._restore()
                    self._restore = None


def _replace() -> Callable[[], None] | None:
    """Returns a function that undoes the replacement, or None if nothing was replaced.

    If None, attention refuses masks that do not depend on positions alone.
    """
    module = _flex_masks_module()
    restore: Callable[[], None] | None = None if module is None else module.register()
    return restore


@functools.cache
def _flex_masks_module() -> types.ModuleType | None:
    """Returns the module, or None for a release of transformers with unknown masks."""
    try:
        from symm_cp.integrations.transformers import flex_masks
    except ImportError:
        return None
    return flex_masks


_flex_masks = _FlexMasks()


class _State(NamedTuple):
    """Facts from models that have run in a region, for judging modules that run later."""

    chosen: str | None  # the last model's attention implementation
    first_position: int  # the number from which it counts positions


class _Inspector(inspectors.Inspector):
    attributes = ATTRIBUTES
    mask_module = "transformers.masking_utils"

    def judge(self, module: nn.Module, state: Hashable) -> Verdict:
        of_model = uses_transformers(module)
        if state is None and not of_model:
            return Verdict()
        before = state if isinstance(state, _State) else _State(None, 0)
        after = _State(
            implementation_of(module) or before.chosen,
            before.first_position or first_position(module),
        )
        limits = tuple(limits_of(module, after.chosen))
        return Verdict(limits, after, of_model and hasattr(module, "base_model_prefix"))

    def check_call(self, watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
        flex = _flex_masks.whole and implementation_of(module) == FLEX_ATTENTION
        whole = flex or attends_with_symm_cp(module)
        state = watch.states.get(self)
        first = state.first_position if isinstance(state, _State) else 0
        check_call(watch, module, args, kwargs, masks_are_whole=whole, first=first)

    @contextmanager
    def attending(
        self, models: Sequence[nn.Module], *, spread: bool
    ) -> Iterator[list[nn.Module] | None]:
        """Makes models attend with symm_cp, or with masks of the whole, in the `with` block."""
        with ExitStack() as stack:
            if spread:
                stack.enter_context(_flex_masks.in_use())
            known = [known_of(model) for model in models]
            if not any(each.select(uses_transformers) for each in known):
                yield None
                return
            from symm_cp.integrations.transformers.models import attending

            yield stack.enter_context(attending(known))

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules:
        return ModelBatchRules(op, model)


inspectors.add(_Inspector())
