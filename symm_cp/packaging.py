"""Extends setuptools' commands for wheel and source distribution beyond what settings can express.

pyproject.toml names the classes; setuptools loads this file alone, without the package.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist


class Wheel(bdist_wheel):
    """A wheel for Linux, the only system that the package runs on, and for any Python."""

    plat_name: str | None

    def finalize_options(self) -> None:
        """Sets the wheel's platform tag; without compiled modules setuptools would set "any"."""
        self.plat_name = self.plat_name or f"linux_{platform.machine()}"
        super().finalize_options()


class Source(sdist):
    """A source distribution of the installed files, without the tests.

    Setuptools would add the files of tests/ whose names begin with "test", but neither the folders
    nor the modules that these need.
    """

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Makes the folder that setuptools packs."""
        kept = [name for name in files if Path(name).parts[0] != "tests"]
        super().make_release_tree(base_dir, kept)
        for listed in Path(base_dir).glob("*.egg-info/SOURCES.txt"):
            lines = [line for line in listed.read_text().splitlines() if line in kept]
            listed.unlink()  # it may be a link to the one in the checkout
            listed.write_text("\n".join([*lines, ""]))
