"""Facts about devices of any type besides CPUs, from torch's module for the type."""

from __future__ import annotations

from typing import Any

import torch


def _ask(device: torch.device, function: str, *arguments: int) -> Any:
    module = torch.get_device_module(device)
    if not hasattr(module, function):
        raise NotImplementedError(
            f"symm_cp: torch.{device.type} has no function {function}(), which ops on "
            f"{device.type!r} require"
        )
    return getattr(module, function)(*arguments)


def available() -> torch.device | None:
    """Returns the type of accelerator of this machine, or None.

    Without `check_available`, a CUDA build of torch names one on machines without a GPU, too.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def index_of(device: torch.device) -> int:
    """Returns the index of a device; the current device's index if `device` has none."""
    return int(_ask(device, "current_device")) if device.index is None else device.index


def indexed(device: torch.device) -> torch.device:
    """Adds the current device's index to a device without an index; leaves CPUs unchanged."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, index_of(device))


def count(device: torch.device) -> int:
    """Returns how many devices of its type there are."""
    return int(_ask(device, "device_count"))


def name_of(device: torch.device) -> str:
    """Returns the name of the device's model."""
    return str(_ask(device, "get_device_name", index_of(device)))


def uuid_of(device: torch.device) -> str:
    """Returns an identifier of the device that is unique across hosts."""
    return str(_ask(device, "get_device_properties", index_of(device)).uuid)


def reaches(device: torch.device, peer: int) -> bool:
    """Whether a device can map the memory of device `peer` of this process."""
    return bool(_ask(device, "can_device_access_peer", index_of(device), peer))
