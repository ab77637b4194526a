"""A workspace on trial: small, on streams of its own, with contents that are verified.

Nothing here waits for the device without a limit. Where a stream waits for a number that does not
come, another stream writes it to this rank's own flags.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

import torch

from symm_cp.cuda.base import TRIAL, Device, DeviceWorkspace, Verdict
from symm_cp.group.memory import Group
from symm_cp.native import wire
from symm_cp.runtime.lowering import LANES
from symm_cp.schedule.patterns import peers

#: The bytes that each rank puts into its slot, and the number of copies for them: several, to test
#: batches.
SLOT_BYTES, PARTS = 16384, 4
#: Calls in a row: the third one uses the slot of the first one again.
ROUNDS = 3

_INPUT, _STAGING = 0, 1  # operands
_BEGIN, _END, _MADE = 0, 1, 2  # events
_NAME = b"self-test"
_PAUSE = 0.0002  # seconds between polls of a stream
_COMPUTE, _COPY, _SIGNAL = (LANES.index(lane) for lane in ("compute", "copy", "signal"))


def contents(rank: int, turn: int) -> torch.Tensor:
    """The bytes that rank `rank` puts into its slot in call `turn`, on the host."""
    return ((torch.arange(SLOT_BYTES) * (2 * turn + 3) + 17 * rank + 101 * turn) % 251).to(
        torch.uint8
    )


class Trial:
    """A workspace on trial, and the streams of all lanes."""

    def __init__(self, group: Group, device: Device, *, graph: bool = False) -> None:
        self.device, self.graph = device, graph
        self.rank, self.world_size = group.rank, group.world_size
        self.peers = peers(group.rank, group.world_size)
        self.given_up = False
        # Allocate all memory before anything waits: allocating may wait for all streams.
        self.input = torch.empty(ROUNDS * SLOT_BYTES, dtype=torch.uint8, device=device.torch_device)
        places = ROUNDS * self.world_size * SLOT_BYTES
        self.staging = torch.zeros(places, dtype=torch.uint8, device=device.torch_device)
        self.found = self._on_host(places)
        self.refill = self._on_host(ROUNDS * SLOT_BYTES)
        self.space: DeviceWorkspace = device.workspace(
            group, TRIAL, SLOT_BYTES, graph=graph, verdict=Verdict()
        )
        self.header = self._on_host(self.space.header_bytes)
        self.lanes = [device.borrow_stream() for _ in LANES]
        self.aside = device.borrow_stream()

    def _on_host(self, nbytes: int) -> torch.Tensor:
        pinned = self.device.torch_type != "cpu"
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def close(self) -> None:
        """Gives the streams back, when all have ended."""
        for stream in (*self.lanes, self.aside):
            self.device.return_stream(stream)

    # Work for the streams.

    def issue(self, commands: Sequence[wire.Command], epoch: int) -> None:
        """Puts commands on the streams, as calls do."""
        self._check_given_up()
        self.space.issue(
            (wire.Command * len(commands))(*commands),
            (ctypes.c_void_p * 2)(self.input.data_ptr(), self.staging.data_ptr()),
            (ctypes.c_void_p * len(LANES))(*self.lanes),
            epoch,
            capturing=self.graph,
            call_name=_NAME,
        )

    def put(self, turns: Sequence[int]) -> None:
        """Puts the contents of calls into the input; the compute lane must have ended."""
        for row, turn in zip(self.refill.view(ROUNDS, -1), turns, strict=False):
            row.copy_(contents(self.rank, turn))
        self._check_given_up()
        compute = self.lanes[_COMPUTE]
        self.device.launch_on(compute, lambda: self.input.copy_(self.refill, non_blocking=True))

    def write_own_flag(self, epoch: int) -> None:
        """Writes a number to a flag in this rank's own memory."""
        flag = wire.DEVICE_FLAGS.index("arrived")
        self.issue([_command(wire.Kind.ARRIVED, peer=0, flag=flag)], epoch)

    def fork(self) -> list[wire.Command]:
        """Has the copy lane follow the compute lane."""
        return self._follow(_COPY, _COMPUTE, _BEGIN)

    def join(self) -> list[wire.Command]:
        """Has the compute lane follow the copy lane, which has waited for all peers."""
        return self._follow(_COMPUTE, _COPY, _END)

    def _follow(self, lane: int, other: int, event: int) -> list[wire.Command]:
        return [
            _command(wire.Kind.RECORD, other, event=event),
            _command(wire.Kind.WAIT_EVENT, lane, event=event),
        ]

    def fill(self, place: int) -> list[wire.Command]:
        """Copies a part of the input to this rank's slot."""
        operand = wire.Place(wire.Buffer.OPERAND, _INPUT, -1, place * SLOT_BYTES)
        return self._copies(wire.Place(wire.Buffer.SLOT, self.rank, -1, 0), operand)

    def pull(self, place: int) -> list[wire.Command]:
        """Copies the slots of all ranks to a part of the staging memory."""
        commands = []
        for rank in range(self.world_size):
            offset = (place * self.world_size + rank) * SLOT_BYTES
            to = wire.Place(wire.Buffer.OPERAND, _STAGING, -1, offset)
            commands += self._copies(to, wire.Place(wire.Buffer.SLOT, rank, -1, 0))
        return commands

    def _copies(self, to: wire.Place, source: wire.Place) -> list[wire.Command]:
        nbytes = SLOT_BYTES // PARTS

        def part_of(place: wire.Place, part: int) -> wire.Place:
            return wire.Place(place.buffer, place.index, -1, place.offset + part * nbytes)

        return [
            _command(
                wire.Kind.COPY,
                to=part_of(to, part),
                source=part_of(source, part),
                bytes=nbytes,
                rows=1,
                remote=int(source.buffer == wire.Buffer.SLOT and source.index != self.rank),
            )
            for part in range(PARTS)
        ]

    def exchange(self, kind: wire.Kind, flag: str, epoch: int, lane: int = _COPY) -> None:
        """Signals each peer, or waits for the signal of each."""
        number = wire.DEVICE_FLAGS.index(flag)
        self.issue([_command(kind, lane, peer=peer, flag=number) for peer in self.peers], epoch)

    def call(self, epoch: int, place: int) -> None:
        """Issues an all-gather of a part of the input, as real calls do.

        Lane "signal" signals as well, as in calls whose kernels write partial sums.
        """
        self.issue(self.fork(), epoch)
        if self.graph:
            self.exchange(wire.Kind.WAIT, "done", epoch)
        self.issue([*self.fill(place), *self._follow(_SIGNAL, _COPY, _MADE)], epoch)
        self.exchange(wire.Kind.SIGNAL, "ready", epoch)
        self.exchange(wire.Kind.SIGNAL, "partial", epoch, _SIGNAL)
        # A graph could start the waits first, in one queue for all lanes (schedule/graphs.py).
        self.issue(self._follow(_COPY, _SIGNAL, _MADE), epoch)
        self.exchange(wire.Kind.WAIT, "ready", epoch)
        self.exchange(wire.Kind.WAIT, "partial", epoch)
        self.issue(self.pull(place), epoch)
        if self.graph:
            self.exchange(wire.Kind.SIGNAL, "done", epoch)
        self.issue(self.join(), epoch)

    def _check_given_up(self) -> None:
        if self.given_up:
            raise RuntimeError("symm_cp: the self-test has abandoned this step")

    # Results.

    def ended(self, limit: float) -> bool:
        """Whether the lanes end within a number of seconds."""
        return self._ends(self.lanes, limit)

    def _ends(self, streams: Sequence[int], limit: float) -> bool:
        deadline = time.monotonic() + limit
        while not all(self.device.ended(stream) for stream in streams):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def own_flag(self, limit: float) -> int:
        """Returns the flag that `write_own_flag` writes; -1 if it cannot be read."""
        self._read(self.header, self.space.memory[: self.space.header_bytes])
        if not self._ends([self.aside], limit):
            return -1
        flag = wire.DEVICE_FLAGS.index("arrived")
        offset = wire.flag_offset(flag, 0, self.world_size)
        return int(self.header[offset : offset + 4].view(torch.int32))

    def _read(self, host: torch.Tensor, memory: torch.Tensor) -> None:
        self.device.launch_on(self.aside, lambda: host.copy_(memory, non_blocking=True))

    def missing(self, limit: float) -> str:
        """Names the ranks whose signals are missing, as far as the flags show."""
        late = []
        self._read(self.header, self.space.memory[: self.space.header_bytes])
        if not self.graph and self._ends([self.aside], limit):
            first = wire.flag_offset(wire.DEVICE_FLAGS.index("ready"), 0, self.world_size)
            words = self.header[first:].view(torch.int32)[:: wire.FLAG_BYTES // 4]
            seen = {peer: int(words[peer]) for peer in sorted(self.peers)}
            # Others may be late because they wait for these.
            last = min(seen.values())
            late = [peer for peer in seen if seen[peer] == last < ROUNDS]
        return f"signals of ranks {late} did not arrive" if late else "copies did not end"

    def wrong(self, turns: Mapping[int, int], limit: float) -> str:
        """Compares the pulled bytes with the contents of calls; describes the first difference."""
        self._read(self.found, self.staging)
        if not self._ends([self.aside], limit):
            return f"copies to the host did not end within {limit:g} s"
        places = self.found.view(ROUNDS, self.world_size, SLOT_BYTES)
        for place, turn in turns.items():
            for rank in range(self.world_size):
                count = int((places[place, rank] != contents(rank, turn)).sum())
                if count:
                    return f"{count} of {SLOT_BYTES} bytes from rank {rank} are wrong"
        return ""

    def release(self, limit: float) -> bool:
        """Ends the waits of the lanes by writing the awaited numbers; returns whether it succeeds.

        Waits in graphs await 1 and reset it, so it writes again until all have ended.
        """
        if self.ended(0):
            return True
        deadline = time.monotonic() + limit
        self.header.view(torch.int32).fill_(1 if self.graph else ROUNDS)
        while time.monotonic() < deadline:
            self.device.launch_on(self.aside, self._write_own_flags)
            if not self._ends([self.aside], limit / 2):
                return False
            if self._ends(self.lanes, 10 * _PAUSE):
                return True
        return False

    def clear(self, limit: float) -> bool:
        """Clears this rank's flags, when no rank signals; returns whether that ended in time."""
        self.header.zero_()
        self.device.launch_on(self.aside, self._write_own_flags)
        return self._ends([self.aside], limit)

    def _write_own_flags(self) -> None:
        self.space.memory[: len(self.header)].copy_(self.header, non_blocking=True)


def _command(kind: wire.Kind, lane: int = _COPY, **fields: object) -> wire.Command:
    return wire.Command(kind=kind, lane=lane, **fields)
