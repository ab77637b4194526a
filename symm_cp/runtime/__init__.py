"""Runtimes: each runs schedules on one kind of machine; `api.Runtime` says what they offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from symm_cp.devices import spans_hosts
from symm_cp.hosts import hosts_of
from symm_cp.memory import Group
from symm_cp.runtime.api import Runtime
from symm_cp.runtime.cpu import CpuRuntime
from symm_cp.runtime.hosts import HostsRuntime
from symm_cp.runtime.streams import StreamRuntime

_streams = StreamRuntime()
_runtimes: dict[str, Runtime] = {"cpu": CpuRuntime()}
_over_hosts: dict[str, Runtime] = {}


def of(tensor: torch.Tensor, group: Group) -> Runtime:
    """Returns the runtime for the device of a tensor and the ranks of a group."""
    device = tensor.device
    inner = _runtimes.get(device.type, _streams)
    if spans_hosts(group, device) or hosts_of(group, device) is None:
        return inner
    return _over_hosts.setdefault(device.type, HostsRuntime(inner))


@contextmanager
def replaced(kind: str, by: Runtime) -> Iterator[None]:
    """Uses another runtime for tensors on devices of a kind, inside. For tests."""
    before = _runtimes.get(kind)
    _runtimes[kind] = by
    _over_hosts.pop(kind, None)
    try:
        yield
    finally:
        _over_hosts.pop(kind, None)
        if before is None:
            del _runtimes[kind]
        else:
            _runtimes[kind] = before
