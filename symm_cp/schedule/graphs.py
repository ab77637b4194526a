"""The edges of captured graphs, and the proof that they let every rank finish.

A captured graph keeps the order within each lane and the edges that events make, and nothing else
of the order in which its steps were handed out: a driver may start independent steps in any order,
even in one queue for all lanes. If it starts a wait for a peer first, a rank may never reach a
signal that the peer waits for.

`graph_order` adds the edges that are missing: each wait for a peer comes after all signals to peers
that were handed out before it. `check_graph` takes the worst case of all orders that the edges
allow: *a signal goes out only when every wait of its rank that does not come after it has ended*.
Whatever a driver does, a signal depends on some of these waits and on nothing else that could wait
for a peer; so if all signals go out in that replay, they do on every driver (`issue_order.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from symm_cp.schedule.check import CheckReport
from symm_cp.schedule.issue_order import Flag, Item, common_size, deadlock
from symm_cp.schedule.patterns import Channel, IssueOrder, Variant
from symm_cp.schedule.steps import Epoch, Signal, Step, Wait, awaited

_CALLER = "compute"  # the lane that is the caller's stream, for all channels
_NEVER: Epoch = (0, 0)
#: By lane, the place of the last step that comes before the step with this clock.
_Clock: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A step of a graph; its lane first waits for the signals at places ``behind`` of the order."""

    lane: str
    step: Step
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphOrder:
    """An issue order with a graph's edges; at its end the caller's lane awaits ``end_behind``."""

    steps: tuple[Ordered, ...]
    end_behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call as its ranks capture it: ``orders[r]`` is the order of rank r."""

    channel: Channel
    orders: tuple[GraphOrder, ...]

    @classmethod
    def of(cls, variant: Variant, world_size: int) -> GraphCall:
        """The call of a variant, on one slot as in all graphs."""
        orders = variant.issue_orders(world_size, 1)
        return cls(variant.channel, tuple(graph_order(o, rank) for rank, o in enumerate(orders)))


class _Clocks:
    def __init__(self) -> None:
        self.lanes: dict[str, _Clock] = {}

    def join(self, lane: str, other: _Clock) -> None:
        """Makes the lane wait for the step with this clock."""
        clock = self.lanes.setdefault(lane, {})
        for name, place in other.items():
            clock[name] = max(place, clock.get(name, -1))

    def reached(self, lane: str, other: str) -> int:
        """The last place of another lane that a lane comes after."""
        return self.lanes.get(lane, {}).get(other, -1)

    def take(self, lane: str, place: int) -> _Clock:
        """Advances the lane to its next step and returns that step's clock."""
        self.join(lane, {lane: place})
        return dict(self.lanes[lane])


def graph_order(order: IssueOrder, rank: int) -> GraphOrder:
    """Adds the edges by which each wait for a peer comes after all earlier signals to peers.

    At its end the caller's lane also comes after signals of other lanes, unless they depend on
    waits for this call of a peer that it does not come after anyway. So later captured steps come
    after these signals, too, and wait for peers' earlier calls at most.
    """
    clocks, steps = _Clocks(), []
    own: dict[str, _Clock] = {}  # of signals to oneself, by flag
    signals: dict[int, _Clock] = {}  # to peers, by place
    waits: list[int] = []  # for peers' signals of this call
    for place, (lane, step) in enumerate(order):
        behind: list[int] = []
        if isinstance(step, Wait) and step.source == rank:
            clocks.join(lane, own[step.flag])
        elif isinstance(step, Wait):
            last = {order[signal][0]: signal for signal in signals}
            for other, signal in last.items():
                if other != lane and signal > clocks.reached(lane, other):
                    behind.append(signal)
                    clocks.join(lane, signals[signal])
            if not step.lag:
                waits.append(place)
        clock = clocks.take(lane, place)
        if isinstance(step, Signal) and step.to == rank:
            own[step.flag] = clock
        elif isinstance(step, Signal):
            signals[place] = clock
        steps.append(Ordered(lane, step, tuple(behind)))

    def is_free(clock: _Clock) -> bool:
        before = (wait for wait in waits if wait <= clock.get(order[wait][0], -1))
        return all(wait <= clocks.reached(_CALLER, order[wait][0]) for wait in before)

    free = {
        order[place][0]: place
        for place, clock in signals.items()
        if place > clocks.reached(_CALLER, order[place][0]) and is_free(clock)
    }
    return GraphOrder(tuple(steps), tuple(free.values()))


@dataclass
class _Rank:
    """The steps of one rank; a set of steps is a number with a bit for each."""

    items: list[Item] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # by step: it and all steps before it
    lanes: dict[tuple[str, str], int] = field(default_factory=dict)  # by lane: all before its next
    signals: list[int] = field(default_factory=list)  # to peers
    waits: list[int] = field(default_factory=list)  # for peers

    def capture(
        self, channel: Channel, epoch: int, number: int, order: GraphOrder, rank: int
    ) -> None:
        """Adds a call."""

        def key(lane: str) -> tuple[str, str]:
            return ("", lane) if lane == _CALLER else (channel, lane)

        first, lanes = len(self.items), {held.lane for held in order.steps} | {_CALLER}
        own: dict[str, int] = {}
        begin = self.lanes.get(key(_CALLER), 0)
        for lane in lanes:
            self.lanes[key(lane)] = self.lanes.get(key(lane), 0) | begin
        for at, held in enumerate(order.steps):
            place, step = key(held.lane), held.step
            index = len(self.items)
            self.items.append(Item(channel, epoch, number, at, held.lane, step))
            for signal in held.behind:
                self.lanes[place] |= self.before[first + signal]
            if isinstance(step, Wait):
                if step.source == rank:
                    self.lanes[place] |= own[step.flag]
                else:
                    self.waits.append(index)
            self.lanes[place] |= 1 << index
            self.before.append(self.lanes[place])
            if isinstance(step, Signal):
                if step.to == rank:
                    own[step.flag] = self.before[index]
                else:
                    self.signals.append(index)
        for signal in order.end_behind:
            self.lanes[key(_CALLER)] |= self.before[first + signal]
        if channel == "sync":
            for lane in lanes:
                self.lanes[key(_CALLER)] |= self.lanes[key(lane)]


def check_graph(calls: Sequence[GraphCall]) -> CheckReport:
    """Proves that all ranks finish a graph of these calls in any order that its edges allow.

    Raises ``ValueError`` if there is no call, or if calls differ in their number of ranks.
    """
    world_size = common_size([len(call.orders) for call in calls])
    ranks = [_Rank() for _ in range(world_size)]
    epochs: dict[Channel, int] = {}
    for number, call in enumerate(calls):
        epoch = epochs[call.channel] = epochs.get(call.channel, 0) + 1
        for rank, order in enumerate(call.orders):
            ranks[rank].capture(call.channel, epoch, number, order, rank)
    raised: dict[Flag, Epoch] = {}

    def flag_of(rank: int, item: Item) -> Flag:
        assert isinstance(item.step, Wait)
        return item.channel, item.step.flag, item.step.source, rank

    def ended(rank: int, wait: int) -> bool:
        item = ranks[rank].items[wait]
        assert isinstance(item.step, Wait)
        return raised.get(flag_of(rank, item), _NEVER) >= awaited(item.epoch, item.step)

    left = {(rank, signal) for rank, steps in enumerate(ranks) for signal in steps.signals}
    progress = True
    while left and progress:
        progress = False
        for rank, signal in sorted(left):
            steps = ranks[rank]
            if all(ended(rank, w) for w in steps.waits if not steps.before[w] >> signal & 1):
                item = steps.items[signal]
                assert isinstance(item.step, Signal)
                flag = (item.channel, item.step.flag, rank, item.step.to)
                raised[flag] = max(raised.get(flag, _NEVER), (item.epoch, item.step.piece))
                left.discard((rank, signal))
                progress = True
    stuck = [
        deadlock(rank, steps.items[wait], raised)
        for rank, steps in enumerate(ranks)
        for wait in steps.waits
        if not ended(rank, wait)
    ]
    return CheckReport(tuple(stuck), len(calls), world_size)
