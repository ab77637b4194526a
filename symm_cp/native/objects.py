"""A cache of compiled objects, in the folder of built code, keyed by their inputs.

The key of an object is its unit, its compiler (version, flags, processor, torch) and its contents
(the sources and all files that they include below csrc/). Builds hold the lock of the folder, so no
build removes or replaces objects that another build is about to link. As with libraries (see
`trusted`), only the user can change objects.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from symm_cp import trusted
from symm_cp.native.compiler import Compiler, torch_flags
from symm_cp.native.sources import Sources, Unit

#: The most bytes that the cache keeps, and the seconds that it keeps an unused object. A build's
#: objects take 6 MB, precompiled headers 500 MB for each torch. With less room, builds of several
#: checkouts, or for several torches, would remove each other's objects.
_MAX_BYTES = 2 << 30
_MAX_AGE = 30 * 24 * 3600


class Objects:
    """The cache in a folder, for one compiler; callers must hold the lock of builds."""

    def __init__(self, folder: Path, sources: Sources, compiler: Compiler) -> None:
        self._folder = folder
        self._sources = sources
        self._compiler = compiler
        python = str(sysconfig.get_config_var("SOABI"))
        self._toolchain = _digest(compiler.identity, torch.__version__, python)[:12]
        with trusted.folder(folder, create=True):
            pass

    def compile(self, plain: Sequence[Unit], torch_units: Sequence[Unit] = ()) -> list[Path]:
        """Returns the objects of units; compiles missing ones.

        The first build compiles each of `torch_units` as a whole, since the headers cost most. In a
        checkout, where single sources change, later builds compile sources one by one, with
        precompiled headers; in a first build precompiling takes longer than it saves.
        """
        whole = [unit for unit in torch_units if not self._is_split(unit)]
        units = [*whole, *plain]  # the slow units first, so that others compile meanwhile
        parts = [p for unit in torch_units if unit not in whole for p in self._sources.parts(unit)]
        with self._scratch() as scratch:
            jobs = [partial(self._make, scratch, unit) for unit in units if not self._has(unit)]
            missing = [unit for unit in parts if not self._has(unit)]
            header, used = [], []
            if missing and self._compiler.takes_precompiled:
                text = "".join(f"#include <{name}>\n" for name in self._all_torch_headers())
                path = self._path("torch", f"{text} {_installation()}", ".h")
                if not (_is_there(path) and _is_there(_precompiled(path))):
                    jobs.insert(0, partial(self._precompile, scratch, text, path))
                header, used = ["-include", str(path)], [path, _precompiled(path)]
            _run(jobs)
            _run([partial(self._make, scratch, unit, header) for unit in missing])
        objects = [self._object(unit) for unit in (*units, *parts)]
        for path in [*objects, *used]:
            with suppress(OSError):
                os.utime(path)
        self._prune()
        return objects

    def forget(self, objects: Sequence[Path]) -> None:
        """Removes objects, which may be damaged."""
        for path in objects:
            path.unlink(missing_ok=True)

    def _is_split(self, unit: Unit) -> bool:
        """Whether to compile sources one by one: an earlier version of the unit was built here."""
        if not self._sources.is_checkout or self._has(unit):
            return False
        return any(self._folder.glob(f"{unit.name}-{self._toolchain}-*.o"))

    def _has(self, unit: Unit) -> bool:
        return _is_there(self._object(unit))

    def _object(self, unit: Unit) -> Path:
        contents = self._sources.digest(self._sources.closure(*unit.sources))
        return self._path(unit.name, f"{unit.flags} {contents}", ".o")

    def _path(self, name: str, contents: str, suffix: str) -> Path:
        return self._folder / f"{name}-{self._toolchain}-{_digest(contents)[:20]}{suffix}"

    def _all_torch_headers(self) -> list[str]:
        names = [name for unit in self._sources.torch for name in unit.sources]
        return sorted(self._sources.torch_headers(*names))

    def _make(self, scratch: Path, unit: Unit, header: Sequence[str] = ()) -> None:
        out = scratch / f"{unit.name}.o"
        *others, last = unit.sources
        included = [part for name in others for part in ("-include", name)]
        flags = [*torch_flags(), *unit.flags] if unit.needs_torch else unit.flags
        self._compiler.compile([*flags, *header, *included, "-c", last], out)
        self._sources.require_unchanged(unit.sources)  # else the object's key would be wrong
        _keep(out, self._object(unit))

    def _precompile(self, scratch: Path, text: str, header: Path) -> None:
        trusted.write(header, text.encode())
        out = scratch / "torch.gch"
        self._compiler.compile([*torch_flags(), "-x", "c++-header", str(header)], out)
        _keep(out, _precompiled(header))

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        # This build has the lock, so files that are already there belong to killed builds.
        for stale in self._folder.glob("tmp*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="tmp", dir=self._folder) as name:
            yield Path(name)

    def _prune(self) -> None:
        about = [(path, path.stat()) for path in self._folder.iterdir() if path.is_file()]
        total, now = 0, time.time()
        for path, status in sorted(about, key=lambda each: -each[1].st_mtime):
            total += status.st_size
            if total > _MAX_BYTES or now - status.st_mtime > _MAX_AGE:
                path.unlink(missing_ok=True)


def _run(jobs: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(lambda job: job(), jobs))


def _is_there(path: Path) -> bool:
    try:
        os.close(trusted.open_to_read(path))
    except FileNotFoundError:
        return False
    return True


def _keep(made: Path, target: Path) -> None:
    made.chmod(0o644)  # whatever the umask: an object that a group can write is not trusted
    made.replace(target)  # atomic: a later build sees the whole object or none


def _precompiled(header: Path) -> Path:
    return header.with_name(f"{header.name}.gch")  # where g++ looks for it


def _installation() -> str:
    """Names an installation of torch: g++ checks precompiled headers by file times, too."""
    return f"{torch.__file__} {os.stat(torch.__file__).st_mtime_ns}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
