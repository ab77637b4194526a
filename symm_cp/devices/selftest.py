"""What a group's ranks may use on a device."""

from __future__ import annotations

from symm_cp import env
from symm_cp.devices.base import Device, Signals, Verdict
from symm_cp.memory import Group


def verdict(group: Group, device: Device) -> Verdict:
    """Returns what a group's ranks may use on a device. Collective at the first call."""
    chosen = env.signals()
    return Verdict(Signals.STREAM if chosen is None else Signals(chosen))
