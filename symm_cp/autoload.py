"""Registers the backend's name with torch.distributed while torch is imported, nothing else.

torch calls the entry points "torch.backends" at the end of its own import, in every program of the
environment, so this must be quick (a millisecond or two): it leaves no module of `symm_cp` behind,
and a later `import symm_cp` starts afresh. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns them off.
"""

from __future__ import annotations

import sys
from typing import Any

_NAME = "symm_cp"


def register() -> None:
    """Registers the backend by its name; the first group that uses it imports `symm_cp`."""
    package = sys.modules[_NAME]
    if package._everything:
        return  # it is being imported, and registers the backend itself
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
    import torch.distributed as dist

    if sys.platform == "linux" and dist.is_available():
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, of_backend: Any) -> Any:
    from symm_cp import backend

    return backend.create_from(options, of_backend)
