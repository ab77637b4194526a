"""What schedules consist of: regions, steps and lanes.

A schedule is plain data. A pattern (``patterns/``) provides it, ``check`` proves it free of races
and deadlocks, and a runtime binds its regions to memory and executes it. There are no tensors,
sizes or pointers here: the runtime handles uneven shards, and a step on empty memory is
still a step, because the signals around it must happen.

Calls
    Ops that share a workspace are numbered 0, 1, 2, ... on every rank, in the same order. Call
    ``c`` uses workspace slot ``c % slots`` and its *epoch* is ``c + 1`` (flags start at 0).

Buffers
    ========================  ====================================================================
    ``"slot"``                the workspace slot of the call; every rank can read every rank's
    ``"symmetric"``           the user's persistent symmetric tensor; every rank can read every
                              rank's; its owner may overwrite it as soon as the call has returned
    ``"input"``               filled by the caller, private to the rank, fresh in each call
    ``"output"``, any other   private to the rank, fresh in each call, holds nothing at first
    ========================  ====================================================================

Flags
    A flag lives at the rank that waits for it. Its identity is (name, writer rank, receiver rank).
    One lane writes it, and it only grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

#: Buffers that other ranks may access; all others are private to their rank.
SHARED_BUFFERS = frozenset({"slot", "symmetric"})
#: Buffers that the caller fills before the call.
GIVEN_BUFFERS = frozenset({"input", "symmetric"})


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a rank: one chunk of a buffer, or all of it (``chunk=None``).

    Different chunks of a buffer do not overlap within a call. From call to call the caller may cut
    the same memory differently, so chunk numbers of two calls say nothing about each other. In a
    loop over pieces, ``piece`` says which piece of the chunk; a slot has two halves, 0 and 1.
    Different pieces do not overlap within a call either.
    """

    rank: int
    buffer: str
    chunk: int | None = None
    piece: int | None = None

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f"[{self.chunk}]"
        piece = "" if self.piece is None else f" ({self.piece})"
        return f"{self.buffer}{chunk}{piece} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``src`` to ``dst``."""

    src: Region
    dst: Region

    def __str__(self) -> str:
        return f"Copy({self.src} -> {self.dst})"


@dataclass(frozen=True, slots=True)
class Signal:
    """Raise the flag ``flag`` at rank ``to`` to the epoch of this call, and a piece of it.

    A lane that sees the new value also sees every write of this lane before it (release). A signal
    to one's own rank orders two lanes of the rank.
    """

    to: int
    flag: str
    piece: int = 0

    def __str__(self) -> str:
        piece = f", piece {self.piece}" if self.piece else ""
        return f"Signal({self.flag!r} to rank {self.to}{piece})"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the flag ``flag`` that rank ``source`` writes here is >= epoch - ``lag``.

    In a loop over pieces: until it has been raised to that piece of the call, or later.

    Later steps of this lane see every write that the writer had made before that signal (acquire).
    With ``lag=1`` the signal of the previous call is enough, and call 0 does not wait.
    """

    source: int
    flag: str
    lag: int = 0
    piece: int = 0

    def __str__(self) -> str:
        lag = f", lag {self.lag}" if self.lag else ""
        piece = f", piece {self.piece}" if self.piece else ""
        return f"Wait({self.flag!r} from rank {self.source}{lag}{piece})"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run kernel ``kernel`` for shard or chunk ``index``; it reads and writes just these regions.

    A region in both ``reads`` and ``writes`` is updated in place. ``awaits`` pairs flags to oneself
    with further regions: the running kernel polls the flag, and reads the region only after that.
    ``raises`` pairs flags to oneself with regions that the kernel also writes: it raises each
    flag when it has written the region, in any order. A kernel has one or the other.
    """

    kernel: str
    index: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    awaits: tuple[tuple[str, Region], ...] = ()
    raises: tuple[tuple[str, Region], ...] = ()

    def __str__(self) -> str:
        return f"Compute({self.kernel!r}, {self.index})"


Step: TypeAlias = Copy | Signal | Wait | Compute


@dataclass(frozen=True, slots=True, eq=False)
class Lanes(Mapping[str, tuple[Step, ...]]):
    """An immutable, hashable mapping from lane name to its steps, in the order of creation."""

    pairs: tuple[tuple[str, tuple[Step, ...]], ...]

    def __getitem__(self, name: str) -> tuple[Step, ...]:
        for key, steps in self.pairs:
            if key == name:
                return steps
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self.pairs))


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does in one call: its lanes, each an ordered list of steps.

    ``lanes`` may be any mapping; a schedule keeps an immutable copy, so it is hashable. Lanes are
    named ``"compute"`` (the calling thread, or the current stream), ``"copy"`` (a copy engine), and
    on streams ``"signal"`` (signals while kernels run) and ``"compute2"`` (every second kernel of
    some calls). A lane continues from call to call in program order; lanes of a call do not start
    or end together, only flags order them. ``slots`` is the number of slots of the workspace. The
    caller may write its symmetric tensor after the steps of lane ``caller``: the calling thread's
    lane, or in the background the lane whose end the caller waits for first.

    Raises ``ValueError`` if a step names a rank outside ``range(world_size)``.
    """

    name: str
    rank: int
    world_size: int
    lanes: Mapping[str, tuple[Step, ...]]
    slots: int
    caller: str = "compute"

    def __post_init__(self) -> None:
        check_place(self.name, self.rank, self.world_size, self.slots)
        lanes = Lanes(tuple((name, tuple(steps)) for name, steps in self.lanes.items()))
        # A frozen dataclass can set its own field only like this.
        object.__setattr__(self, "lanes", lanes)
        for lane, steps in lanes.items():
            for index, step in enumerate(steps):
                self._check_step(lane, index, step)

    def _check_step(self, lane: str, index: int, step: Step) -> None:
        if isinstance(step, Signal):
            ranks = [step.to]
        elif isinstance(step, Wait):
            ranks = [step.source]
            if step.lag < 0:
                raise ValueError(
                    f"{self.name}: step {index} of lane {lane!r}: lag={step.lag} must be >= 0"
                )
        else:
            reads, writes = accesses(step)
            ranks = [region.rank for region in (*reads, *writes)]
        for rank in ranks:
            if not 0 <= rank < self.world_size:
                raise ValueError(
                    f"{self.name}: step {index} of lane {lane!r}, {step}, names rank {rank}, "
                    f"which must be in 0..{self.world_size - 1}"
                )


#: The value of a flag: the number of a call, from 1, and a piece of it.
Epoch: TypeAlias = tuple[int, int]


def awaited(call: int, step: Wait) -> Epoch:
    """The value that a wait in that call needs."""
    return call - step.lag, step.piece


def epoch_text(epoch: Epoch) -> str:
    """An epoch as text: the call, and its piece unless it is the first."""
    call, piece = epoch
    return f"{call}, piece {piece}" if piece else str(call)


def accesses(step: Step) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """The regions that a step reads, and the regions that it writes."""
    if isinstance(step, Copy):
        return (step.src,), (step.dst,)
    if isinstance(step, Compute):
        reads = (*step.reads, *(region for _, region in step.awaits))
        return reads, (*step.writes, *(region for _, region in step.raises))
    return (), ()


def check_place(name: str, rank: int, world_size: int, slots: int) -> None:
    """Raise ``ValueError`` unless ``rank``, ``world_size`` and ``slots`` make sense together."""
    if world_size < 1:
        raise ValueError(f"{name}: {world_size=} must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"{name}: {rank=} must be in 0..{world_size - 1} for {world_size=}")
    if slots < 1:
        raise ValueError(f"{name}: {slots=} must be at least 1")
