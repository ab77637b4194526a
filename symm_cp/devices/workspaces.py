"""The workspaces of groups on devices: made when a call needs one, and replaced by larger ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from symm_cp import wire
from symm_cp.devices.base import Device, DeviceWorkspace, Signals, Verdict
from symm_cp.devices.registry import device_for, spans_hosts
from symm_cp.hosts import hosts_of
from symm_cp.memory import Group, GroupLike, StateKey, resolve


@dataclass
class Workspaces:
    """A group's workspaces by (device, channel, for graphs, how it is signalled)."""

    current: dict[tuple[torch.device, str, bool, Signals], DeviceWorkspace] = field(
        default_factory=dict
    )
    #: Replaced, but captured graphs or unfinished streams still use them.
    retained: list[DeviceWorkspace] = field(default_factory=list)

    def clear(self) -> None:
        """Frees all of them."""
        self.current.clear()
        self.retained.clear()


_WORKSPACES = StateKey("workspaces on devices", Workspaces.clear)


def workspaces_of(group: Group) -> Workspaces:
    """Returns a group's workspaces on all devices. Not collective."""
    return group.state(_WORKSPACES, Workspaces)


def workspace(group: Group, device: Device, channel: str, slot_bytes: int) -> DeviceWorkspace:
    """Returns the group's workspace of a channel, with slots of at least `slot_bytes`.

    Collective when it has to be made or to grow; every rank must ask for the same size. Raises
    `RuntimeError` when that would be in the middle of a capture, or when the group's self-test
    found that calls cannot be captured.
    """
    capturing, verdict = device.capturing(), device.verdict(group)
    if capturing and not verdict.graphs:
        raise RuntimeError(
            f"symm_cp: calls of group {group.name!r} on {device} cannot be captured into a graph: "
            f"{verdict.reason}"
        )
    return _workspace(
        group, device, channel, slot_bytes, verdict, graph=capturing, capturing=capturing
    )


def _workspace(
    group: Group,
    device: Device,
    channel: str,
    slot_bytes: int,
    verdict: Verdict,
    *,
    graph: bool,
    capturing: bool,
) -> DeviceWorkspace:
    workspaces = workspaces_of(group)
    key = (device.torch_device, channel, graph, verdict.signals)
    present = workspaces.current.get(key)
    if present is not None and present.serves(slot_bytes):
        return present
    present_bytes = 0 if present is None else present.slot_bytes
    if capturing:
        raise RuntimeError(
            f"symm_cp: this call needs a workspace of {slot_bytes} bytes and there is one of "
            f"{present_bytes}; none can be made while a graph is captured: call "
            f"symm_cp.reserve(group, {slot_bytes}, device={str(device.torch_device)!r}) before"
        )
    if present is not None and (graph or present.given_up):
        workspaces.retained.append(present)
    larger = device.workspace(
        group, channel, max(slot_bytes, present_bytes), graph=graph, verdict=verdict
    )
    workspaces.current[key] = larger
    return larger


def give_up(group: Group) -> None:
    """After an error in the middle of a call: peers that wait for this rank stop waiting."""
    for present in workspaces_of(group).current.values():
        present.give_up()


def reserve_on(group: Group, device: Device, slot_bytes: int) -> None:
    """Sizes all workspaces on a device for calls of up to `slot_bytes`. Collective."""
    with group.lock, device.guard():
        verdict = device.verdict(group)
        for channel in wire.CHANNELS:
            for graph in (False, True) if device.captures and verdict.graphs else (False,):
                _workspace(
                    group, device, channel, slot_bytes, verdict, graph=graph, capturing=False
                )


def reserve(group: GroupLike, nbytes: int, *, device: torch.device | str = "cpu") -> None:
    """Sizes workspaces for ops whose shard takes up to `nbytes` bytes, so that none grows later.

    `device` is that of the ops' tensors. On CUDA it also makes the workspaces that ops take while a
    graph is captured, which cannot be made then. Collective: call it with the same size on every
    rank of the group. Raises `ValueError` for a negative size.
    """
    if nbytes < 0:
        raise ValueError(f"reserve: {nbytes=} must not be negative")
    torch_device, whole_group = torch.device(device), resolve(group)
    spread = None if spans_hosts(whole_group, torch_device) else hosts_of(whole_group, torch_device)
    local = whole_group if spread is None else spread.local
    if torch_device.type == "cpu":
        local.reserve(nbytes)
    else:
        reserve_on(local, device_for(local, torch_device), nbytes)
