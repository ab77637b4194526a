"""Which kinds of device there are, and which device serves a group's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from symm_cp import accelerators, native
from symm_cp.cuda.base import Device
from symm_cp.group.hosts import apart_of, checks, in_test_mode
from symm_cp.group.memory import Group, StateKey

#: The kinds of device by the type of torch devices.
kinds: dict[str, type[Device]] = {}

_devices: dict[torch.device, Device] = {}

#: The device for all of a group's tensors of its type, such as NVSHMEM's for CUDA.
_CHOSEN: StateKey[Device] = StateKey("device")


def register(kind: type[Device]) -> type[Device]:
    """Class decorator: registers a kind of device for tensors on its torch devices."""
    kinds[kind.torch_type] = kind
    return kind


def known() -> tuple[type[Device], ...]:
    """Returns the kinds of device that ops run on, besides CPUs."""
    return tuple(kinds.values())


def kind_for(device: torch.device) -> type[Device] | None:
    """Returns the kind of device that serves tensors on a torch device; None: the CPU runtime."""
    return kinds.get(device.type)


def has_streams(device: torch.device) -> bool:
    """Whether tensors on a torch device are served by a `Device`, not by the CPU runtime."""
    return device.type in kinds


def device_of(device: torch.device) -> Device:
    """Returns the `Device` of a torch device; raises `NotImplementedError` for an unknown kind."""
    made = _devices.get(device)
    if made is None:
        kind = kinds.get(device.type)
        if kind is None:
            raise NotImplementedError(
                f"symm_cp: tensors on {device.type!r} are not supported, only on CPU and "
                f"{', '.join(map(repr, kinds))}"
            )
        if device.index is None:
            return device_of(accelerators.indexed(device))
        made = _devices.setdefault(device, kind(device))
    return made


def _chosen(group: Group, device: torch.device) -> Device | None:
    chosen = group.find(_CHOSEN)
    return chosen if chosen is not None and chosen.torch_type == device.type else None


def device_for(group: Group, device: torch.device) -> Device:
    """Returns the `Device` on which a group's ops on tensors of a torch device run."""
    return _chosen(group, device) or device_of(device)


def spans_hosts(group: Group, device: torch.device) -> bool:
    """Whether a group's ops on a torch device reach other hosts by themselves."""
    chosen = _chosen(group, device)
    return chosen is not None and chosen.spans_hosts


def kernels_count(group: Group, device: torch.device) -> bool:
    """Whether kernels and streams can wait for each other in a call of a group, here and now.

    False in a graph, where a call's number cannot change. Collective at the first call.
    """
    if not has_streams(device):
        return False
    serving = device_of(device)
    if not serving.polls() or in_test_mode() or apart_of(group, device) is not None:
        return False
    with serving.guard():
        return not serving.capturing() and serving.verdict(group).passed


def _why_not_together(group: Group, device: torch.device) -> str | None:
    """Returns the reason of the self-test's verdict why a group's ranks work apart, if any."""
    if not has_streams(device):
        return None
    verdict = device_for(group, device).verdict(group)
    return "" if verdict.passed else verdict.reason or "streams cannot signal"


checks.append(_why_not_together)


def choose(group: Group, device: Device | None) -> None:
    """Sets the device for a group's tensors of its type; None: each tensor's own device."""
    native.drop_plans()
    if device is None:
        group.drop(_CHOSEN)
    else:
        group.put(_CHOSEN, device)


@contextmanager
def replaced(torch_device: torch.device, by: Device) -> Iterator[None]:
    """Uses another device for tensors on a torch device, CPU included. For tests."""
    kind, made = kinds.get(torch_device.type), _devices.get(torch_device)
    kinds[torch_device.type], _devices[torch_device] = type(by), by
    serve_cpu = native.load().symm_cp_serve_cpu
    serve_cpu("cpu" not in kinds)
    native.drop_plans()
    try:
        yield
    finally:
        del kinds[torch_device.type], _devices[torch_device]
        if kind is not None:
            kinds[torch_device.type] = kind
        if made is not None:
            _devices[torch_device] = made
        native.drop_plans()
        serve_cpu("cpu" not in kinds)
