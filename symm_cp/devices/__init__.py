"""Devices with streams: one file for each kind, a registry, and the workspaces of groups on them.

`symm_cp.devices.nvshmem` is imported only when asked for.
"""

from __future__ import annotations

from symm_cp.devices.base import (
    LANES,
    Device,
    DeviceWorkspace,
    Mark,
    Pending,
    Signals,
    Verdict,
    events_needed,
)
from symm_cp.devices.in_place import InPlace, found_in_place, read_in_place
from symm_cp.devices.registry import (
    choose,
    device_for,
    device_of,
    has_streams,
    kind_for,
    known,
    replaced,
    spans_hosts,
)
from symm_cp.devices.workspaces import (
    give_up,
    give_up_on,
    hold,
    reserve,
    reserve_on,
    workspace,
    workspaces_of,
)

__all__ = [
    "LANES",
    "Device",
    "DeviceWorkspace",
    "InPlace",
    "Mark",
    "Pending",
    "Signals",
    "Verdict",
    "choose",
    "device_for",
    "device_of",
    "events_needed",
    "found_in_place",
    "give_up",
    "give_up_on",
    "has_streams",
    "hold",
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
