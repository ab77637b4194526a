"""Triton's interpreter, with the installed NumPy, and on memory that others write to."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Call this before the first launch, and launch on CPU tensors only.

    Lets tensors be bounds of loops: Triton 3.6 takes `int` of arrays, which NumPy 2.4 refuses; 3.9
    does not. Leaves out that all memory is copied back when a kernel has ended. That of CPU tensors
    is the kernel's own: a workspace that is copied over itself loses the flags which peers raise
    meanwhile. And leaves Triton's language as the interpreter changes it: the end of one kernel
    would take it away from another that runs in another thread.
    """
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    interpreter._LangPatchScope.restore = lambda _: None
