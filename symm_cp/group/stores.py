"""A group's store, which either answers in time or raises.

A store may never answer: the process that hosts it (rank 0, for a `TCPStore`), or that holds its
lock (any rank, for a `FileStore`), may have been stopped. torch's own requests then wait without
end, so each request runs in a thread of its own, which is abandoned when it is late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from symm_cp import env, native

T = TypeVar("T")


class StoreLostError(RuntimeError):
    """A group's store did not answer in time."""


def timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    """Returns the time-out of a process group's collectives."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    # torch exposes no options of third-party backends in C++, such as this package's.
    milliseconds = native.load().symm_cp_group_timeout_ms(process_group.group_name.encode())
    return timedelta(milliseconds=milliseconds)


def wait_limit_of(process_group: dist.ProcessGroup) -> timedelta:
    """Returns how long ops wait for a peer: `SYMM_CP_TIMEOUT_MS`, or the group's time-out."""
    if env.timeout_ms():
        return timedelta(milliseconds=env.timeout_ms())
    return timeout_of(process_group)


class TimedStore:
    """A store of torch; a request that takes longer than `limit` raises `StoreLostError`."""

    def __init__(self, store: dist.Store, limit: timedelta) -> None:
        #: For torch's own use.
        self.untimed = store
        self._limit = limit

    def under(self, prefix: str) -> TimedStore:
        """Returns the part of the store whose keys begin with a prefix."""
        return TimedStore(dist.PrefixStore(prefix, self.untimed), self._limit)

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value."""
        self._ask(key, lambda: self.untimed.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Returns a value; waits until it is there."""
        return self._ask(key, lambda: self.untimed.get(key))

    def add(self, key: str, value: int) -> int:
        """Adds to a number; returns the sum."""
        return self._ask(key, lambda: self.untimed.add(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes a value if the present one is `expected` (none for ""); returns the new value."""
        return self._ask(key, lambda: self.untimed.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(keys[0], lambda: self.untimed.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Returns when all keys are there; raises torch's error after the time-out."""
        self._ask(keys[0], lambda: self.untimed.wait(list(keys), timeout), timeout)

    def delete_key(self, key: str) -> bool:
        """Removes a value; returns whether there was one."""
        return self._ask(key, lambda: self.untimed.delete_key(key))

    def _ask(self, key: str, request: Callable[[], T], meant_to_last: timedelta = timedelta()) -> T:
        answers: list[T] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(request())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        done = threading.Event()
        threading.Thread(target=ask, name="store request", daemon=True).start()
        if not done.wait((meant_to_last + self._limit).total_seconds()):
            raise StoreLostError(
                f"the group's store did not answer within {self._limit.total_seconds():g} s (key "
                f"{key!r}): the process that hosts it, or holds its lock, may have been stopped"
            )
        if errors:
            raise errors[0]
        return answers[0]
