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
from symm_cp.devices.symmetric import is_whole, symmetric_addresses
from symm_cp.devices.workspaces import give_up, reserve, reserve_on, workspace, workspaces_of

__all__ = [
    "LANES",
    "Device",
    "DeviceWorkspace",
    "Mark",
    "Pending",
    "Signals",
    "Verdict",
    "choose",
    "device_for",
    "device_of",
    "events_needed",
    "give_up",
    "has_streams",
    "is_whole",
    "kind_for",
    "known",
    "replaced",
    "reserve",
    "reserve_on",
    "spans_hosts",
    "symmetric_addresses",
    "workspace",
    "workspaces_of",
]
