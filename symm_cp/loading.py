"""What an import of `symm_cp` loads: everything, unless torch's own import asks for the backend.

`when_imported` calls a function as soon as another library has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType


def everything() -> bool:
    """Whether to load all of `symm_cp`; False for `symm_cp.autoload`, which torch's import calls.

    Raises `ImportError` on systems other than Linux.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_import_device_backends":
        frame = frame.f_back
    if frame is None and sys.platform != "linux":
        raise ImportError(f"symm_cp runs on Linux only, and this is {sys.platform}")
    return frame is None


class _Arrival(MetaPathFinder):
    """Finds a module as Python does, and calls a function once it has been imported."""

    def __init__(self, module: str, function: Callable[[], object]) -> None:
        self._module, self._function = module, function

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _quietly(self._function)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(module: str, function: Callable[[], object]) -> None:
    """Calls a function now, or as soon as a module has been imported; its errors are printed."""
    if module in sys.modules:
        _quietly(function)
    else:
        sys.meta_path.insert(0, _Arrival(module, function))


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception as error:  # the user imports another module, which must not fail
        print(f"symm_cp: not loaded: {type(error).__name__}: {error}", file=sys.stderr)
