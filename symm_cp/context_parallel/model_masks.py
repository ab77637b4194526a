"""Masks of the whole sequence for models of transformers with their own flex attention.

transformers makes a mask of what the model sees, which is this rank's part. While a context is
active, the function that it has registered for `attn_implementation="flex_attention"` is replaced
in its registry by that of integrations/transformers/flex_masks.py, which makes transformers' own
masks in threads outside of any region.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: The module in which transformers defines its masks.
TRANSFORMERS = "transformers.masking_utils"


class _FlexMasks:
    """Replaces the function while at least one context is active."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] | None = None

    @property
    def whole(self) -> bool:
        """Whether masks of models with flex attention are those of the whole sequence."""
        return self._restore is not None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it, masks are those of the whole sequence, if transformers is loaded by then."""
        with self._lock:
            self._users += 1
            if self._restore is None and TRANSFORMERS in sys.modules:
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
    """Returns what undoes it, or None if nothing was replaced.

    Attention then refuses masks that do not depend on positions alone.
    """
    integration = _integration()
    restore: Callable[[], None] | None = None if integration is None else integration.register()
    return restore


@functools.cache
def _integration() -> types.ModuleType | None:
    """None with a release of transformers whose masks are not known."""
    try:
        # A floor above this one, and it needs transformers.
        return importlib.import_module("symm_cp.integrations.transformers.flex_masks")
    except ImportError:
        return None


flex_masks = _FlexMasks()
