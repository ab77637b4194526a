"""Triton's interpreter, in versions that do not know the installed NumPy."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Lets tensors be bounds of loops: Triton 3.6 takes `int` of arrays, which NumPy 2.4 refuses.

    Triton 3.9 does not. Call this before the first launch.
    """
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
