"""Runtimes: each runs schedules on one kind of machine; `api.Runtime` says what they offer."""

from __future__ import annotations

import torch

from symm_cp.devices import has_streams, spans_hosts
from symm_cp.group.hosts import hosts_of
from symm_cp.group.memory import Group
from symm_cp.runtime.api import BackgroundRuntime, Runtime
from symm_cp.runtime.cpu import CpuRuntime, boxes_of
from symm_cp.runtime.hosts import HostsRuntime
from symm_cp.runtime.streams import StreamRuntime

__all__ = ["background_of", "boxes_of", "of"]

_cpu: Runtime = CpuRuntime()
_streams = StreamRuntime()
_cpu_over_hosts = HostsRuntime(_cpu)
_streams_over_hosts = HostsRuntime(_streams)


def of(tensor: torch.Tensor, group: Group) -> Runtime:
    """Returns the runtime for the device of a tensor and the ranks of a group."""
    device = tensor.device
    on_streams = has_streams(device)
    if (on_streams and spans_hosts(group, device)) or hosts_of(group, device) is None:
        return _streams if on_streams else _cpu
    return _streams_over_hosts if on_streams else _cpu_over_hosts


def background_of(tensor: torch.Tensor, group: Group) -> BackgroundRuntime:
    """Returns what runs collectives in the background where that is not native."""
    found = of(tensor, group)
    assert isinstance(found, StreamRuntime | HostsRuntime), found
    return found
