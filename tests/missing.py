"""A plugin of pytest for machines without our packages: `pytest -p tests.missing`.

A test module that imports a package, or asks for the metadata of one, that is not installed is
skipped, with the name; plain runs fail on it.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

_OURS = {"symm_cp", "tests", "benchmarks"}


class _Module(pytest.Module):
    def _getobj(self) -> ModuleType:
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = error.__cause__
            if not isinstance(missing, ModuleNotFoundError) or _is_ours(missing.name):
                raise
            pytest.skip(f"{missing.name} is not installed", allow_module_level=True)


def _is_ours(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in _OURS


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> Generator[None, object, object]:
    yield
    return _Module.from_parent(parent, path=module_path)
