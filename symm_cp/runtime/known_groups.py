"""Makes groups known to C++, whose kernels look them up by name (csrc/channel/groups.h)."""

from __future__ import annotations

import ctypes
import threading

import torch

from symm_cp import native
from symm_cp.group.hosts import hosts_of
from symm_cp.group.memory import resolve

_CPU = torch.device("cpu")


def _find(name: bytes) -> int:
    """Collective at the first call for a group, as it is an op's first call."""
    library = native.load()
    try:
        group = resolve(name.decode())
        try:
            together = hosts_of(group, _CPU) is None
        except NotImplementedError:
            together = False  # the op says why
        library.symm_cp_set_on_one_host(group.handle, together)
        library.symm_cp_group_known(group.handle)
    except BaseException as error:
        library.symm_cp_explain(str(error).encode())
        if not isinstance(error, Exception):
            # Ctrl-C: raised as soon as Python runs again in this thread, as C++ cannot pass it on.
            thread = ctypes.c_ulong(threading.get_ident())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(type(error)))
        return -1
    return 0


_callback = native.FindGroup(_find)  # C++ calls it as long as the process lives


def register() -> None:
    """Lets C++ ask for groups that it does not know yet."""
    native.load().symm_cp_on_unknown_group(_callback)
