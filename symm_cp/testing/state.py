"""Restores global state that a function may change in the process of a rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

_patches: list[pytest.MonkeyPatch] = []


def fresh_monkeypatch() -> pytest.MonkeyPatch:
    """Returns a `MonkeyPatch` that `restored` undoes; ranks use it as the fixture `monkeypatch`."""
    _patches.append(pytest.MonkeyPatch())
    return _patches[-1]


def reduce_monkeypatch(fixture: pytest.MonkeyPatch) -> Any:
    """Pickles a `monkeypatch` without its patches, which belong to another process."""
    return fresh_monkeypatch, ()


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """At its end, restores torch's global settings and the environment."""
    environment = dict(os.environ)
    dtype, device = torch.get_default_dtype(), _default_device()
    grad, deterministic = torch.is_grad_enabled(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        while _patches:
            _patches.pop().undo()
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if _default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(grad)
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        changed = {k: v for k, v in environment.items() if os.environ.get(k) != v}
        os.environ.update(changed)
