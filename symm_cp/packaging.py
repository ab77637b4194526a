"""How wheel and source distribution are made: setuptools' commands with what settings cannot say.

pyproject.toml names them; setuptools loads this file alone, without the package.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist


class Wheel(bdist_wheel):
    """A wheel for Linux, on which alone the package runs, and for any Python."""

    plat_name: str | None

    def finalize_options(self) -> None:
        """Sets the platform of the wheel's tag; without compiled modules setuptools says any."""
        self.plat_name = self.plat_name or f"linux_{platform.machine()}"
        super().finalize_options()


class Source(sdist):
    """A source distribution of the installed files, without the tests.

    Setuptools would add the files of tests/ whose names begin with test, but neither the folders
    nor the modules that they need.
    """

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Makes the folder that is packed."""
        kept = [name for name in files if Path(name).parts[0] != "tests"]
        super().make_release_tree(base_dir, kept)
        for listed in Path(base_dir).glob("*.egg-info/SOURCES.txt"):
            lines = [line for line in listed.read_text().splitlines() if line in kept]
            listed.unlink()  # it may be a link to the one in the checkout
            listed.write_text("\n".join([*lines, ""]))
