"""Triton's interpreter, with the installed NumPy, and on memory that others write to."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

from tests.cuda.ahead import Ahead


def mend() -> None:
    """Call this before the first launch, and launch on CPU tensors only.

    Lets tensors be loop bounds: Triton 3.6 calls `int` on arrays, which NumPy 2.4 refuses; 3.9 does
    not. Skips copying all memory back at the end of a kernel: kernels work on the memory of CPU
    tensors itself, and a workspace copied over itself loses flags that peers raise meanwhile. Keeps
    Triton's language patched: restoring it at the end of one kernel would break a kernel that runs
    in another thread. On a simulated device, kernels run on the current stream.
    """
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    call = interpreter.GridExecutor.__call__

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        def run(args: Any, kwargs: Any) -> None:
            call(kernel, *args, **kwargs)

        ahead, name = Ahead.active(), kernel.fn.__name__
        if ahead is None:
            run(args, kwargs)
        else:
            kind = 2 if name == "arrival_matmul_kernel" else 1
            ahead.issue(name, run, args, kwargs, kind=kind)

    interpreter.GridExecutor.__call__ = launch
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    interpreter._LangPatchScope.restore = lambda _: None
