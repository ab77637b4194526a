"""FSDP2's own streams beside our ops: the host is ahead of a whole training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import symm_cp
from symm_cp import fsdp
from symm_cp.testing import Ranks
from tests.cuda.ahead import Ahead
from tests.cuda.simulated import Recorded, SimulatedDevice, simulation
from tests.exhaustive import some


@contextlib.contextmanager
def own_streams(made: SimulatedDevice) -> Iterator[list[str]]:
    """Makes torch.cpu's streams and events, which FSDP2 uses, those of the simulated device.

    Inside, the host is ahead of this thread's ops. Returns where ops went: a stream's number each.
    """
    used: list[str] = []

    class Stream:
        def __init__(self, priority: int = 0, handle: int = 0) -> None:
            self.handle = handle or made.machine.stream(made.index)

        def wait_event(self, event: Event) -> None:
            with made.stream(self.handle):
                event.wait()

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(other.record_event())

        def record_event(self, event: Event | None = None) -> Event:
            return (event or Event()).record(self)

    class Event:
        def record(self, stream: Stream | None = None) -> Event:
            self.work = Recorded(made, stream.handle if stream else made.current_stream())
            return self

        def wait(self, stream: Stream | None = None) -> None:
            self.work.wait()

    def stream(chosen: Stream) -> contextlib.AbstractContextManager[int]:
        used.append(str(chosen.handle))
        return made.stream(chosen.handle)

    with (
        mock.patch.multiple(
            torch.cpu,
            Stream=Stream,
            Event=Event,
            stream=stream,
            current_stream=lambda: Stream(handle=made.current_stream()),
        ),
        Ahead(made, None),
    ):
        yield used


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = symm_cp.all_gather_matmul(x, self.up, group=self.group)
        return x + symm_cp.matmul_reduce_scatter(h.relu(), self.down, group=self.group)


def trained(group: dist.ProcessGroup, made: SimulatedDevice, *, ahead: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(group) for _ in range(3)))
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.use(model)
    x = [torch.randn(4, 16) + group.rank() for _ in range(4)]
    with own_streams(made) if ahead else contextlib.nullcontext([]) as used:
        for each in x:
            model(each).square().sum().backward()
    made.synchronize()
    streams = (1 if group.size() == 1 else 3) if ahead else 0  # a single rank gathers nothing
    assert len(set(used)) == streams, used
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def beside_ops(group: dist.ProcessGroup) -> None:
    with simulation(plan_at=1) as made:
        expected = trained(group, made, ahead=False)
    with simulation(plan_at=1, deferred=True, poison=True, delays_us=500) as made:
        found = trained(group, made, ahead=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
def test_fsdp2_has_streams_of_its_own(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, beside_ops)
