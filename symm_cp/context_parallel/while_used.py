"""Changes to torch that last while regions need them, in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WhileUsed:
    """Makes a change when it is acquired first, and undoes it when it is released last.

    `change` makes it, and returns a function that undoes it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], None] | None = None

    def acquire(self) -> None:
        """Makes the change, unless it is in use."""
        with self._lock:
            self._users += 1
            if self._undo is None:
                self._undo = self._change()

    def release(self) -> None:
        """Undoes the change if nobody else uses it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._undo is not None:
                self._undo()
                self._undo = None
