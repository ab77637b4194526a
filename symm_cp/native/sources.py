"""The C++ sources: what each file includes, and which are compiled together.

A changed file affects the units that include it, directly or through other files. Conditions around
an include are not evaluated: the include counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from symm_cp.native.errors import BuildError

#: Optimization of the folders with arithmetic, and with code that each call runs; files that need
#: no torch compile in two thirds of the time at -O1, as all others are.
_OPTIMIZED = {"attention": "-O3", "channel": "-O2", "exchange": "-O3", "messages": "-O2"}
#: Torch's headers take 4 to 5 s of each compilation, and a source mostly less than 1 s, so sources
#: that need them are compiled this many at a time. Alone they would take 250 s of processor time
#: instead of 75; all together, each change would take 25 s instead of 8.
_TOGETHER = 6
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_TORCH = ("ATen/", "c10/", "torch/")
#: Includes of this header mark files that need Python's headers; they form a library of their own.
_GLUE = "base/glue.h"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Unit:
    """Sources that are compiled together to one object, called `name`."""

    name: str
    sources: tuple[str, ...]
    needs_torch: bool
    flags: tuple[str, ...] = ()


def source_dir() -> Path:
    """Returns the folder of the C++ sources: in the installed package, else beside it."""
    for candidate in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (candidate / "c_api.cpp").is_file():
            return candidate
    raise BuildError(f"the C++ sources are missing: looked in {_PACKAGE} and beside it")


class Sources:
    """The sources in a folder; files are named by their paths relative to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = (path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
        self.contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        self._included: dict[str, tuple[set[str], set[str]]] = {}

    def includes(self, name: str) -> tuple[set[str], set[str]]:
        """Returns the files in the folder, and the headers elsewhere, that a file includes."""
        if name not in self._included:
            own: set[str] = set()
            other: set[str] = set()
            for quoted, angled in _INCLUDE.findall(self.contents[name].decode(errors="replace")):
                beside = (PurePosixPath(name).parent / quoted).as_posix()  # where compilers look
                own.update({beside, quoted} & self.contents.keys() if quoted else ())
                other.update((angled,) if angled else ())
            self._included[name] = own, other
        return self._included[name]

    def closure(self, *names: str) -> list[str]:
        """Returns the files and all that they include in the folder, at any depth, sorted."""
        reached, pending = set(names), list(names)
        while pending:
            fresh = self.includes(pending.pop())[0] - reached
            reached |= fresh
            pending += fresh
        return sorted(reached)

    def needs_torch(self, name: str) -> bool:
        """Whether a file, or a file that it includes, includes a header of torch."""
        headers = set().union(*(self.includes(each)[1] for each in self.closure(name)))
        return any(header.startswith(_TORCH) for header in headers)

    @cached_property
    def plain(self) -> list[Unit]:
        """The units that need no torch headers: one for each source."""
        return [_alone(name) for name in self._compiled if not self.needs_torch(name)]

    @cached_property
    def torch(self) -> list[Unit]:
        """The units that include torch's headers; each has the sources of several ops."""
        return _together("torch", [name for name in self._compiled if self.needs_torch(name)])

    @cached_property
    def glue(self) -> list[Unit]:
        """The units of the library that needs Python's headers, too."""
        return _together("glue", [name for name in sorted(self.contents) if self._is_glue(name)])

    def digest(self, names: Iterable[str]) -> str:
        """Returns a hash of names and contents of files."""
        digest = hashlib.sha256()
        for name in names:
            digest.update(name.encode() + b"\0" + hashlib.sha256(self.contents[name]).digest())
        return digest.hexdigest()

    @cached_property
    def all_digest(self) -> str:
        """A hash of all files."""
        return self.digest(sorted(self.contents))

    def require_unchanged(self, names: Iterable[str]) -> None:
        """Raises `BuildError` if files, or files that they include, changed after being read."""
        for name in self.closure(*names):
            if (self.folder / name).read_bytes() != self.contents[name]:
                raise BuildError(
                    f"{self.folder / name} changed while the native part of symm_cp was built; "
                    "build it again: symm-cp build"
                )

    def _is_glue(self, name: str) -> bool:
        return name.endswith(".cpp") and _GLUE in self.includes(name)[0]

    @property
    def _compiled(self) -> list[str]:
        cpp = (name for name in self.contents if name.endswith(".cpp"))
        return sorted(name for name in cpp if not self._is_glue(name))


def _alone(name: str) -> Unit:
    level = _OPTIMIZED.get(name.split("/")[0])
    flags = () if level is None else (level,)
    return Unit(name.removesuffix(".cpp").replace("/", "_"), (name,), False, flags)


def _together(kind: str, names: list[str]) -> list[Unit]:
    """Returns units of `_TOGETHER` sources; those of backend/ include other headers."""
    backend = [name for name in names if name.startswith("backend/")]
    found = []
    for place, sources in (("backend", backend), ("ops", sorted({*names} - {*backend}))):
        for first in range(0, len(sources), _TOGETHER):
            chunk = tuple(sources[first : first + _TOGETHER])
            found.append(Unit(f"{kind}_{place}_{first // _TOGETHER}", chunk, needs_torch=True))
    return found
