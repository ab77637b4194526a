"""Devices with streams; work on CPU tensors alone needs nothing in this folder.

Each kind of device is a file that registers itself and is imported here (`gpu.py`: CUDA), except
`symm_cp.cuda.nvshmem`, which is imported on request. `streams.py` is the runtime of all kinds.
"""

from __future__ import annotations

from symm_cp.cuda import gpu as _gpu  # noqa: F401 - registers itself
from symm_cp.cuda import streams as _streams  # noqa: F401 - registers itself
from symm_cp.cuda.base import Device, DeviceWorkspace, Pending, Verdict
from symm_cp.cuda.in_place import found_in_place, read_in_place
from symm_cp.cuda.registry import (
    choose,
    device_for,
    device_of,
    has_streams,
    kernels_count,
    kind_for,
    known,
    replaced,
    spans_hosts,
)
from symm_cp.cuda.workspaces import reserve, reserve_on, workspace, workspaces_of

__all__ = [
    "Device",
    "DeviceWorkspace",
    "Pending",
    "Verdict",
    "choose",
    "device_for",
    "device_of",
    "found_in_place",
    "has_streams",
    "kernels_count",
    "kind_for",
    "known",
    "read_in_place",
    "replaced",
    "reserve",
    "reserve_on",
    "spans_hosts",
    "workspace",
    "workspaces_of",
]
