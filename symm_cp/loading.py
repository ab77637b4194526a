"""What an import of `symm_cp` loads: everything, or for `import symm_cp.schedule` almost nothing.

Schedules need no torch, no native part and no Linux. But Python imports a package before its
modules, so `symm_cp/__init__.py` asks here for which module it is imported. The rest is loaded, as
by `import symm_cp`, at the first use of another name of `symm_cp`, or at an import of another of
its modules or of torch: a program that imports both expects the ops to be there. If torch is
imported already, everything is loaded at once.

torch's own import asks for `symm_cp.autoload`, which needs nothing else of this package.

`when_imported` calls a function as soon as another library has been imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

_PACKAGE = "symm_cp"
_PURE = "symm_cp.schedule"
_AUTOLOAD = "symm_cp.autoload"


def require_linux() -> None:
    """Raises `ImportError` on systems other than Linux."""
    if sys.platform != "linux":
        raise ImportError(
            f"symm_cp runs on Linux only, and this is {sys.platform}; only its schedules run here: "
            f"import {_PURE}"
        )


def only_schedule() -> bool:
    """Whether `symm_cp` is being imported only for `symm_cp.schedule` or `symm_cp.autoload`.

    Raises `ImportError` if everything is needed on systems other than Linux.
    """
    wanted = _imported_for()
    if wanted == _AUTOLOAD:
        return True
    if _is_pure(wanted) and (sys.platform != "linux" or "torch" not in sys.modules):
        if not is_partial():
            sys.meta_path.insert(0, _Finder())
        return True
    require_linux()
    return False


def is_partial() -> bool:
    """Whether only `symm_cp.schedule` has been loaded so far."""
    return bool(_finders())


def loads_more() -> bool:
    """Whether to load everything for a name that `symm_cp` lacks.

    Not while modules of `symm_cp` are being imported: everything is loaded after them.
    """
    return any(finder.running == 0 for finder in _finders())


def _finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def load_everything() -> None:
    """Loads the rest of the package; raises `ImportError` if it cannot, such as without torch."""
    require_linux()
    finders = _finders()
    for finder in finders:
        sys.meta_path.remove(finder)
    try:
        importlib.reload(sys.modules[_PACKAGE])
    except BaseException:
        sys.meta_path[:0] = finders
        raise


def _is_pure(name: str) -> bool:
    return name == _PURE or name.startswith(f"{_PURE}.")


def _imported_for() -> str:
    """Returns the module for which Python is importing its package `symm_cp`, "" if none.

    Reads both names from the arguments of the import system's running functions.
    """
    names: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(names) < 2:
        of_imports = frame.f_code.co_filename.startswith("<frozen importlib")
        if of_imports and frame.f_code.co_name == "_find_and_load":
            names.append(frame.f_locals["name"])
        elif names and not of_imports:
            break
        frame = frame.f_back
    return names[1] if names[:1] == [_PACKAGE] and len(names) == 2 else ""


class _Finder(MetaPathFinder):
    """Loads everything once torch, or a module of `symm_cp` that imports torch, is imported."""

    def __init__(self) -> None:
        self.running = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{_PACKAGE}.") and not _is_pure(name):
            require_linux()
        elif name != "torch" or sys.platform != "linux":
            return None
        return _followed(self, name, path, target, self._begin, self._end)

    def _begin(self) -> None:
        self.running += 1

    def _end(self, failed: bool) -> None:
        self.running -= 1
        if not failed and self.running == 0 and "torch" in sys.modules and is_partial():
            _load_the_rest()


class _Arrival(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, module: str, function: Callable[[], object]) -> None:
        self._module, self._function = module, function

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        return _followed(self, name, path, target, lambda: None, self._end)

    def _end(self, failed: bool) -> None:
        if not failed and self in sys.meta_path:
            sys.meta_path.remove(self)
            _quietly(self._function)


def when_imported(module: str, function: Callable[[], object]) -> None:
    """Calls a function now, or as soon as a module has been imported; its errors are printed."""
    if module in sys.modules:
        _quietly(function)
    else:
        sys.meta_path.insert(0, _Arrival(module, function))


def _followed(
    ours: MetaPathFinder,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
    begin: Callable[[], None],
    end: Callable[[bool], None],
) -> ModuleSpec | None:
    """Returns another finder's spec, with a loader that calls `begin` and then `end(failed)`."""
    for finder in sys.meta_path:
        if finder is not ours and (spec := finder.find_spec(name, path, target)) is not None:
            if spec.loader is not None:
                spec.loader = _Loader(spec.loader, begin, end)
            return spec
    return None


class _Loader(Loader):
    """Wraps another loader, and calls functions before and after it."""

    def __init__(self, of: Loader, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._of, self._begin, self._end = of, begin, end

    def __getattr__(self, name: str) -> object:
        return getattr(self._of, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._of.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._of
        module.__loader__ = self._of
        failed = True
        self._begin()
        try:
            self._of.exec_module(module)
            failed = False
        finally:
            self._end(failed)


def _load_the_rest() -> None:
    _quietly(load_everything)


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception as error:  # the user imports torch or another module, which must not fail
        print(f"symm_cp: not loaded: {type(error).__name__}: {error}", file=sys.stderr)
