"""Changes attributes of objects while contexts use them."""

from __future__ import annotations

import threading
from typing import Any


class InUse:
    """Changes objects while several threads or nested contexts use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Keyed by id, since configurations are not hashable; the entries keep them alive.
        self._users: dict[int, tuple[Any, dict[str, Any], int]] = {}

    def acquire(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of the object itself, unless it is in use."""
        with self._lock:
            _, before, count = self._users.get(id(owner), (owner, None, 0))
            if before is None:
                before = {name: vars(owner)[name]} if name in vars(owner) else {}
                vars(owner)[name] = value
            self._users[id(owner)] = owner, before, count + 1

    def release(self, owner: Any, name: str) -> None:
        """Restores the attribute when the last user releases the object."""
        with self._lock:
            _, before, count = self._users.pop(id(owner))
            if count > 1:
                self._users[id(owner)] = owner, before, count - 1
                return
            vars(owner).pop(name, None)
            vars(owner).update(before)
