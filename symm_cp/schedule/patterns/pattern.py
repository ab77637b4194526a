"""Patterns: each has a name, a channel, and the variants that may run.

W stands for the world size. A rank visits its peers in the order rank+1, rank+2, ... (mod W), so
that the ranks never all read from the same peer at once.

Forms
    ``direct``  one lane; kernels and copies read peers' memory where it lies (CPU). The lane is
                ``"compute"``, the calling thread; in the background it is ``"copy"``.
    ``staged``  up to four lanes: ``"copy"`` (a stream of its own, run by copy engines)
                exchanges signals and pulls peers' memory ahead of its use; ``"compute"`` (the
                caller's stream) runs kernels on memory of its own rank, and in the background
                copies the input to private memory; with option ``lanes`` every second kernel runs
                on ``"compute2"`` (a stream of its own); ``"signal"`` (a stream of its own) signals
                peers when kernels have written their data. The runtime starts the lanes of a call
                when the caller's stream has reached the call, so the input is complete and private
                memory may be used again. Lane ``"signal"`` begins with a wait for an own flag of
                lane ``"compute"``.

Why signals have a lane
    On GPUs a signal is a copy of 4 bytes, and a copy engine carries out one copy after the other. A
    signal may therefore wait for a large pull of the copy lane. In lane ``"compute"`` it would
    delay the next kernel. So that lane only raises an own flag (an event) behind the kernel, and
    lane ``"signal"`` waits for the flag and signals the peer. Lane ``"signal"`` waits for nothing
    else, and no lane waits for it within the call. (At the end of a call the caller's stream waits
    for all lanes; by then the pulls of the call have ended.)

Issue order
    A builder lists the steps of all lanes in the order in which the host hands them out, and the
    lanes follow from that list. ``check_issue_order`` proves that all ranks make progress even if
    all their steps share one queue. Three rules achieve it: steps that peers wait for go out first;
    a rank waits for a peer only after its own kernels and signals of that turn; and a step that
    waits for an own flag comes after the step that raises it (a stream cannot wait for an event
    that has not been recorded).

Why two slots need one signal per peer and call
    Every pattern keeps one promise: *in each call each rank signals each peer, and waits for each
    peer's signal of this call, before it ends.* Now take rank r, which writes its slot in call c
    and again in call c+2. A peer p reads it in call c. In call c+1, thus after that read, p
    signals r, whatever the pattern of that call is, and r waits for it before call c+1 ends. So
    when r reaches call c+2, p has finished reading. The ready-signal of one call does the work of
    the done-signal of the call before. A new pattern on the same channel must keep the promise,
    or ``check`` of the mixes fails: a rank that skips a peer's shard (causal attention, say) still
    waits for its signal.

Pieces
    A looped form goes through the slot in pieces. The slot of a call has two halves, and piece p
    uses half p % 2. A flag is raised to a piece of the call, and in each piece each rank signals
    each peer and waits for the same piece of each peer. So the argument of the two slots holds for
    the two halves: a rank that writes piece p+2 has waited for its peers' signals of piece p+1, and
    they have read piece p before those. It holds for any number of pieces, since piece p+2 depends
    on the two pieces before it only. Ranks may differ in how many pieces they have data for: each
    announces its number, and all go on to the largest.

Flags between ranks
    The writer is the same lane in all patterns of a channel and form, as given here.

    ``"ready"``    the data that the peer reads has been written. Signalled to each peer once per
                   call. Writer: copy; in direct form the only lane.
    ``"ready in place"``  the same, where a staged variant reads in place. If only some ranks do
                   that, their waits time out, and no rank reads wrong data. (In
                   direct form the ranks compare records.)
    ``"partial"``  the partial sum for the peer has been written. Signalled to each peer once per
                   call by the patterns that produce partial sums. Writer: signal; in direct
                   form the only lane.
    ``"reduced"``  all-reduces in two shots only: this rank's chunk has been reduced, so its reads
                   of the peer's memory have ended. Writer: signal; in direct form the only lane.
    ``"taken"``    ring only: the peer's partial sum has been read, so the peer may overwrite it
                   within the call. Writer: copy.
    ``"done"``     this rank has read the peer's memory. Signalled in two cases. *In place*: the
                   caller may overwrite the symmetric tensor once the call has returned, so the call
                   ends by waiting for it. *One slot*: the next call overwrites the data that this
                   one reads, so the next writer waits for it with ``lag=1``. Writer: copy; in
                   direct form the only lane.

    In staged form with one slot, each flag is signalled exactly as often as it is awaited, so a
    runtime may have the waiter reset the flag instead of comparing epochs: a graph has no epoch, as
    each replay runs the same commands. In place there are always two slots.

The background in staged form
    The caller's stream must not wait for peers in a call whose result it has not waited for,
    however many such calls there are. So the compute lane only copies the input to private memory
    of the call: the output, or the memory for the parts of the sum. The copy lane does all else:
    it copies from there to the slot, signals and pulls, in the order of the calls.

Flags to oneself (staged form; a runtime may turn them into events)
    ``"begun"``                         the caller's writes to its symmetric tensor are complete,
                                        and the slot may be written (writer: compute)
    ``"made<i>"``, ``"made"``           the i-th kernel's part of the slot, or the part of all
                                        kernels, has been written (compute)
    ``"published"``                     the contents of the slot have been written (compute)
    ``"copied"``                        in the background: the input has been copied to private
                                        memory, and is no longer needed (compute)
    ``"pulled<i>"``, ``"collected<i>"`` the i-th shard, or partial sum, has arrived (copy)
    ``"pulled"``                        all shards have arrived (copy)
    ``"collected"``                     all partial sums for this rank have arrived (copy)
    ``"summed"``                        the slot holds the sum of this rank's chunk (compute)
    ``"offered"``                       before a kernel that polls: the slot has been written and
                                        signalled to the peers (copy)
    ``"arrived<i>"``                    the i-th shard has arrived; a running kernel polls it (copy)
    ``"counted<i>"``                    the partial sum for the i-th peer has been written; a kernel
                                        that still runs raises it (compute)
    ``"consumed<i>"``, ``"added<i>"``   the i-th shard, or partial sum, has been used (compute)
    ``"ended"``                         the copy lane has nothing left that kernels wait for (copy)
    ``"compute2 made<i>"``, ``"compute2 ended"``  the same for lane ``"compute2"`` (compute2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from typing import Literal, TypeAlias

from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait, check_place

Channel: TypeAlias = Literal["sync", "async"]
FormName: TypeAlias = Literal["direct", "staged"]
#: The steps of all lanes of a rank, each with its lane, in the order in which they are handed out.
IssueOrder: TypeAlias = tuple[tuple[str, Step], ...]
#: The names of the options that are switched on.
Options: TypeAlias = frozenset[str]


@cache
def peers(rank: int, world_size: int) -> tuple[int, ...]:
    """The other ranks in the order in which ``rank`` visits them."""
    return tuple((rank + distance) % world_size for distance in range(1, world_size))


class Draft:
    """The steps of one rank in one call, while a builder lists them in issue order."""

    def __init__(self, rank: int, world_size: int, slots: int) -> None:
        self.rank, self.world_size, self.slots = rank, world_size, slots
        #: The current piece of a loop; None elsewhere.
        self.piece: int | None = None
        self.peers = peers(rank, world_size)
        self.order: list[tuple[str, Step]] = []

    def add(self, lane: str, *steps: Step) -> None:
        """Hands out steps of a lane."""
        self.order += [(lane, step) for step in steps]

    def compute(self, *steps: Step) -> None:
        """Hands out steps of lane ``"compute"``."""
        self.add("compute", *steps)

    def copy(self, *steps: Step) -> None:
        """Hands out steps of lane ``"copy"``."""
        self.add("copy", *steps)

    def compute_lane(self, number: int, options: Options) -> str:
        """The lane of a call's kernel ``number``: with ``lanes`` the two take turns."""
        return "compute2" if "lanes" in options and number % 2 else "compute"

    def signal_beside(self, event: str, flag: str, *to: int, lane: str = "compute") -> None:
        """Signals peers from lane ``"signal"`` when ``lane``, which goes on, gets here.

        ``event`` is the own flag that lane ``"signal"`` waits for; other lanes may, too.
        """
        if lane != "compute":
            event = f"{lane} {event}"
        self.add(lane, Signal(self.rank, event))
        self.add("signal", Wait(self.rank, event), *(self.signal(peer, flag) for peer in to))

    def join_compute2(self) -> None:
        """Makes lane ``"compute"`` wait for the kernels of lane ``"compute2"``."""
        self.add("compute2", Signal(self.rank, "compute2 ended"))
        self.compute(Wait(self.rank, "compute2 ended"))

    def own(self, buffer: str, chunk: int | None = None) -> Region:
        """Memory of this rank."""
        return self.of(self.rank, buffer, chunk)

    def of(self, rank: int, buffer: str, chunk: int | None = None) -> Region:
        """Memory of a rank; in a loop, the current piece (in the slot, its half)."""
        if self.piece is None:
            return Region(rank, buffer, chunk)
        return Region(rank, buffer, chunk, self.piece % 2 if buffer == "slot" else self.piece)

    def source(self, options: Options) -> Region:
        """The own input: a symmetric tensor if peers read it in place."""
        return self.own("symmetric" if "in_place" in options else "input")

    def shard(self, peer: int, options: Options) -> Region:
        """The place where a peer's input is read: its slot, or in place its tensor."""
        return self.of(peer, "symmetric" if "in_place" in options else "slot")

    def signals(self, flag: str) -> list[Step]:
        """A signal to each peer."""
        return [self.signal(peer, flag) for peer in self.peers]

    def signal(self, peer: int, flag: str) -> Signal:
        """A signal to a peer, of this piece."""
        return Signal(peer, flag, self.piece or 0)

    def wait(self, peer: int, flag: str) -> Wait:
        """A wait for a peer's signal of this call, and piece."""
        return Wait(peer, flag, piece=self.piece or 0)

    def waits(self, flag: str) -> list[Step]:
        """A wait for each peer."""
        return [self.wait(peer, flag) for peer in self.peers]

    def claim_slot(self) -> list[Step]:
        """The waits before the slot is written."""
        # With one slot any peer may still be reading the data of the last call: that call may have
        # had another pattern, in which any peer read any chunk.
        return [Wait(peer, "done", lag=1) for peer in self.peers] if self.slots == 1 else []

    def publish(self, source: Region, chunks: Iterable[int | None] = (None,)) -> list[Step]:
        """Copies chunks of the buffer of ``source`` (default: all) to the slot and signals.

        Does not copy if peers read ``source`` in place.
        """
        if source.buffer == "symmetric":
            return self.signals("ready")
        copies = [Copy(self.own(source.buffer, each), self.own("slot", each)) for each in chunks]
        return [*self.claim_slot(), *copies, *self.signals("ready")]

    def publish_and_reduce(
        self,
        lane: str,
        source: Region,
        kernel: Compute,
        chunks: Iterable[int | None] = (None,),
    ) -> None:
        """Publishes ``source``, awaits all peers' sources, runs the kernel that reads them all."""
        self.add(lane, *self.publish(source, chunks), *self.waits("ready"), kernel)
        if source.buffer == "symmetric":
            # The caller may overwrite its tensor once all peers have read it.
            self.add(lane, *self.signals("done"), *self.waits("done"))

    def begin_staged(self, source: Region) -> None:
        """Publishes from the copy lane; in place, once the caller's stream has written it."""
        if source.buffer == "symmetric":
            self.compute(Signal(self.rank, "begun"))
            self.copy(Wait(self.rank, "begun"))
        self.copy(*self.publish(source))

    def publish_in_background(self, private: Region) -> None:
        """Copies the input to private memory; then the copy lane fills the slot, and signals."""
        self.compute(Copy(self.own("input"), private), Signal(self.rank, "copied"))
        slot = [Copy(private, self.own("slot"))] if self.peers else []
        self.copy(Wait(self.rank, "copied"), *self.claim_slot(), *slot, *self.signals("ready"))

    def release(self, *peers: int, in_place: bool = False) -> list[Step]:
        """Signals that the memory of peers has been read, if they wait for that."""
        return [self.signal(p, "done") for p in peers] if in_place or self.slots == 1 else []

    def end_copies(self) -> None:
        """Makes lane ``"compute"`` wait for the pulls; then releases the peers' memory."""
        self.copy(Signal(self.rank, "ended"), *self.release(*self.peers))
        self.compute(Wait(self.rank, "ended"))


#: Lists the steps of a rank.
Builder: TypeAlias = Callable[[Draft, Options], None]


@dataclass(frozen=True)
class Form:
    """How a pattern runs on one kind of machine: its builder and the options that may be combined.

    With ``one_slot`` its variants also run on one slot, except variants that read in place or have
    an option of ``two_slots``. With ``looped`` the builder lists the steps of one piece, and is
    called for each piece of a call.
    """

    build: Builder
    combinations: tuple[Options, ...] = (frozenset(),)
    one_slot: bool = False
    two_slots: tuple[str, ...] = ()
    looped: bool = False


#: Lists the steps of a rank on a lane.
LaneBuilder: TypeAlias = Callable[[Draft, Options, str], None]


@dataclass(frozen=True)
class OnLane:
    """A builder for any lane, bound to one lane."""

    build: LaneBuilder
    lane: str

    def __call__(self, draft: Draft, options: Options) -> None:
        """Lists the steps of a rank."""
        self.build(draft, options, self.lane)


def loop(build: LaneBuilder, lane: str, combinations: tuple[Options, ...]) -> Form:
    """The direct form of an exchange on a lane; ``build`` lists the steps of a piece."""
    return Form(OnLane(build, lane), combinations, looped=True)


def subsets(*options: str) -> tuple[Options, ...]:
    """All combinations of options."""
    sizes = range(len(options) + 1)
    return tuple(map(frozenset, chain.from_iterable(combinations(options, n) for n in sizes)))


@dataclass(frozen=True)
class Variant:
    """A pattern in one form with one combination of options: all that a runtime may lower."""

    name: str
    channel: Channel
    form: FormName
    options: Options
    min_slots: int
    build: Builder
    looped: bool = False

    def schedule(self, rank: int, world_size: int, slots: int = 2, pieces: int = 1) -> Schedule:
        """The schedule of a rank, for a call of ``pieces`` pieces.

        Raises ``ValueError`` if rank, world size, number of slots or of pieces are out of range.
        """
        return _schedule(self, rank, world_size, slots, pieces)

    def schedules(self, world_size: int, slots: int = 2, pieces: int = 1) -> tuple[Schedule, ...]:
        """The schedules of all ranks."""
        return tuple(self.schedule(rank, world_size, slots, pieces) for rank in range(world_size))

    def issue_order(
        self, rank: int, world_size: int, slots: int = 2, pieces: int = 1
    ) -> IssueOrder:
        """The steps of all lanes of a rank, in the order in which the host hands them out.

        Raises ``ValueError`` if rank, world size, number of slots or of pieces are out of range.
        """
        return _issue_order(self, rank, world_size, slots, pieces)

    def issue_orders(
        self, world_size: int, slots: int = 2, pieces: int = 1
    ) -> tuple[IssueOrder, ...]:
        """The issue orders of all ranks."""
        ranks = range(world_size)
        return tuple(self.issue_order(rank, world_size, slots, pieces) for rank in ranks)

    def __str__(self) -> str:
        return f"{self.name}.{self.form}({', '.join(sorted(self.options))})"


@cache
def _issue_order(
    variant: Variant, rank: int, world_size: int, slots: int, pieces: int
) -> IssueOrder:
    check_place(str(variant), rank, world_size, slots)
    if slots < variant.min_slots:
        raise ValueError(f"{variant}: {slots=} must be at least {variant.min_slots}")
    if pieces < 1 or (pieces > 1 and not variant.looped):
        raise ValueError(f"{variant}: {pieces=} must be {'at least ' if variant.looped else ''}1")
    draft = Draft(rank, world_size, slots)
    for piece in range(pieces if variant.looped else 1):
        draft.piece = piece if variant.looped else None
        variant.build(draft, variant.options)
    if variant.form == "staged" and "in_place" in variant.options:
        return tuple((lane, _ready_in_place(step)) for lane, step in draft.order)
    return tuple(draft.order)


def _ready_in_place(step: Step) -> Step:
    if isinstance(step, Signal | Wait) and step.flag == "ready":
        return replace(step, flag="ready in place")
    return step


@cache
def _schedule(variant: Variant, rank: int, world_size: int, slots: int, pieces: int) -> Schedule:
    lanes: dict[str, list[Step]] = {}
    for lane, step in _issue_order(variant, rank, world_size, slots, pieces):
        lanes.setdefault(lane, []).append(step)
    named = {lane: tuple(steps) for lane, steps in lanes.items()}
    caller = "copy" if variant.channel == "async" else "compute"
    return Schedule(str(variant), rank, world_size, named, slots, caller)


class Pattern:
    """A communication pattern: a channel, and its variants for each kind of machine.

    All variants of one channel and form may follow one another on one workspace.
    """

    def __init__(
        self, name: str, channel: Channel, *, direct: Form | None = None, staged: Form | None = None
    ) -> None:
        self.name, self.channel = name, channel
        self._variants: dict[FormName, dict[Options, Variant]] = {
            "direct": self._declare("direct", direct),
            "staged": self._declare("staged", staged),
        }

    def _declare(self, name: FormName, form: Form | None) -> dict[Options, Variant]:
        if form is None:
            return {}
        found = {}
        for options in form.combinations:
            needs_two = options & {"in_place", *form.two_slots}
            min_slots = 1 if form.one_slot and not needs_two else 2
            found[options] = Variant(
                self.name,
                self.channel,
                name,
                options,
                min_slots,
                form.build,
                form.looped,
            )
        return found

    def direct(self, **options: bool) -> Variant:
        """The variant that reads peers' memory in place.

        Raises ``ValueError`` for a combination of options that is not registered.
        """
        return self._variant("direct", options)

    def staged(self, **options: bool) -> Variant:
        """The variant in which copy engines pull peers' memory ahead of its use.

        Raises ``ValueError`` for a combination of options that is not registered.
        """
        return self._variant("staged", options)

    def variants(self, form: FormName) -> tuple[Variant, ...]:
        """All variants of a form."""
        return tuple(self._variants[form].values())

    def _variant(self, form: FormName, options: Mapping[str, bool]) -> Variant:
        variants = self._variants[form]
        variant = variants.get(frozenset(name for name, chosen in options.items() if chosen))
        unknown = sorted(options.keys() - _union(variants))
        if variant is None or unknown:
            chosen = ", ".join(f"{name}={value}" for name, value in options.items())
            registered = "; ".join(map(str, variants.values())) or f"no {form} form"
            raise ValueError(
                f"{self.name}: {form}({chosen}) is not registered; registered: {registered}"
            )
        return variant

    def __repr__(self) -> str:
        return self.name


def exchange(
    name: str,
    build: LaneBuilder,
    combinations: tuple[Options, ...] = (frozenset(),),
    *,
    staged: Form | None = None,
) -> tuple[Pattern, Pattern]:
    """The patterns NAME in the calling thread, and BACKGROUND_NAME in lane ``"copy"``."""
    return (
        Pattern(name, "sync", direct=loop(build, "compute", combinations)),
        Pattern(
            f"BACKGROUND_{name}", "async", direct=loop(build, "copy", combinations), staged=staged
        ),
    )


def _union(sets: Iterable[Options]) -> Options:
    return frozenset().union(*sets)
