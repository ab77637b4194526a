"""Changes attributes of objects while contexts use them."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

_lock = threading.Lock()
# By object and attribute: the object, the attribute before, and how many contexts use it. Keyed by
# id, since configurations are not hashable; the entries keep them alive.
_users: dict[tuple[int, str], tuple[Any, dict[str, Any], int]] = {}


def hold(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of the object itself until the end of `stack`, unless it is in use.

    Several threads or nested contexts may hold it; the last to end restores it.
    """
    with _lock:
        _, before, count = _users.get((id(owner), name), (owner, None, 0))
        if before is None:
            before = {name: vars(owner)[name]} if name in vars(owner) else {}
            vars(owner)[name] = value
        _users[id(owner), name] = owner, before, count + 1
    stack.callback(_release, owner, name)


def _release(owner: Any, name: str) -> None:
    with _lock:
        _, before, count = _users.pop((id(owner), name))
        if count > 1:
            _users[id(owner), name] = owner, before, count - 1
            return
        vars(owner).pop(name, None)
        vars(owner).update(before)
