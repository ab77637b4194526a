"""Proof that the order in which hosts hand steps out lets every rank finish.

A host hands out the steps of all lanes in one order, the issue order. Lanes are streams, but
streams are not always independent: a device may map all of them to one hardware queue, and the
first launch of a kernel or an allocation may block the host until everything handed out before has
run. A wait for a peer then also holds up the kernels of other lanes, and ranks that hold each other
up deadlock.

The replay takes the worst case: each rank has *one queue for all lanes of all channels, and a step
runs only when every step handed out before it has completed*.

Why that covers every machine
    Whatever a driver does, a step depends on its flag and on some of the steps that its rank has
    handed out before: steps of its lane, steps in front of it in a hardware queue, and steps that
    blocked the host. In the replay it depends on all of them, so the replay has each dependency of
    the machine. Flags only grow and no step branches on data, so a step that completes
    with more dependencies completes with fewer: if every step completes in the replay, then, by
    induction over the order in which the replay completes them, every step completes on the
    machine. For the same reason it does not matter which queue the replay advances first.

    A wait for an own flag that is handed out before the signal never ends in one queue, so the
    replay rejects that order, too. (A stream cannot wait for an event that has not been recorded.)

Assumptions of the proof
    * All ranks make their calls in the same order, both channels taken together.
    * Each rank has a queue of its own: ranks that share a device take turns on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from symm_cp.schedule.check import CheckReport, Deadlock, Site, parts
from symm_cp.schedule.patterns import Channel, IssueOrder, Variant
from symm_cp.schedule.steps import Copy, Epoch, Signal, Step, Wait, awaited

Flag: TypeAlias = tuple[Channel, str, int, int]  # channel, name, writer rank, receiver rank
_NEVER: Epoch = (0, 0)


@dataclass(frozen=True, slots=True)
class IssuedCall:
    """A call as its ranks hand it out: ``orders[r]`` is the issue order of rank r."""

    channel: Channel
    orders: tuple[IssueOrder, ...]

    @classmethod
    def of(cls, variant: Variant, world_size: int, slots: int = 2) -> IssuedCall:
        """The call of a variant."""
        return cls(variant.channel, variant.issue_orders(world_size, slots))


class Item(NamedTuple):
    """A step of a call, as the proofs replay it."""

    channel: Channel
    epoch: int
    call: int
    at: int  # in the issue order
    lane: str
    step: Step


def check_issue_order(calls: Sequence[IssuedCall]) -> CheckReport:
    """Proves that all ranks complete ``calls``, handed out in this order, or reports who is stuck.

    Each channel numbers its calls separately, as it has a workspace of its own.
    Raises ``ValueError`` if there is no call, or if calls differ in their number of ranks.
    """
    world_size = common_size([len(call.orders) for call in calls])
    queues = [deque(_queue(calls, rank)) for rank in range(world_size)]
    raised: dict[Flag, Epoch] = {}
    waiting: dict[Flag, int] = {}  # the receiver of a flag: no other rank waits for it
    ready = deque(range(world_size))
    while ready:
        rank = ready.popleft()
        queue = queues[rank]
        while queue:
            item = queue[0]
            if isinstance(item.step, Wait):
                flag = (item.channel, item.step.flag, item.step.source, rank)
                if raised.get(flag, _NEVER) < awaited(item.epoch, item.step):
                    waiting[flag] = rank
                    break
            elif isinstance(item.step, Signal):
                flag = (item.channel, item.step.flag, rank, item.step.to)
                raised[flag] = item.epoch, item.step.piece
                if flag in waiting:
                    ready.append(waiting.pop(flag))
            queue.popleft()
    stuck = tuple(deadlock(rank, queue[0], raised) for rank, queue in enumerate(queues) if queue)
    return CheckReport(stuck, len(calls), world_size)


def common_size(sizes: Sequence[int]) -> int:
    """Returns the number of ranks of all calls; raises ``ValueError`` if there is no such one."""
    if len(set(sizes)) != 1 or 0 in sizes:
        raise ValueError(
            f"calls must be one or more, all on the same number of ranks; got {sorted(set(sizes))}"
        )
    return sizes[0]


def _queue(calls: Sequence[IssuedCall], rank: int) -> Iterator[Item]:
    epochs: dict[Channel, int] = {}
    for number, call in enumerate(calls):
        epoch = epochs[call.channel] = epochs.get(call.channel, 0) + 1
        for index, (lane, step) in enumerate(call.orders[rank]):
            if isinstance(step, Copy):
                continue  # depends on nothing but its place in the queue
            for part in parts(step, rank):
                yield Item(call.channel, epoch, number, index, lane, part)


def deadlock(rank: int, item: Item, raised: dict[Flag, Epoch]) -> Deadlock:
    """Reports a wait that does not end, with the last signal of its flag."""
    step = item.step
    assert isinstance(step, Wait)
    site = Site(rank, item.lane, item.call, item.at, str(step))
    seen = raised.get((item.channel, step.flag, step.source, rank), _NEVER)
    return Deadlock(site, step.flag, step.source, awaited(item.epoch, step), seen)
