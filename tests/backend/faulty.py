"""Functions for `ranks.own` in which one rank dies, stops, is interrupted, disagrees or aborts."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from symm_cp.testing import say
from tests.backend.common import all_gather_single, fresh, shared
from tests.patience import patient

SHORT = datetime.timedelta(milliseconds=600)
Call = Callable[[dist.ProcessGroup], object]


def _lists(group: dist.ProcessGroup, elements: int) -> list[torch.Tensor]:
    return [torch.ones(elements) for _ in range(group.size())]


def _to_and_from_the_last(group: dist.ProcessGroup) -> None:
    # The last rank is the one that fails. The others must not wait for each other: a rank that has
    # been told of the failure sends nothing more, and its peers would wait until the time-out.
    size, rank = group.size(), group.rank()
    works = []
    for peer in range(size - 1) if rank == size - 1 else (size - 1,):
        works.append(dist.irecv(torch.ones(100_000), group=group, group_src=peer))
        works.append(dist.isend(torch.ones(100_000), group=group, group_dst=peer))
    for work in works:
        assert work is not None
        work.wait()


#: Calls of all kinds, small and in several pieces, at once and in the background.
CALLS: dict[str, Call] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(10), group=group),
    "large all_reduce": lambda group: dist.all_reduce(torch.ones(400_000), group=group),
    "background all_reduce": lambda group: dist.all_reduce(
        torch.ones(400_000), group=group, async_op=True
    ).wait(),
    "future of all_reduce": lambda group: (
        dist.all_reduce(torch.ones(10), group=group, async_op=True).get_future().wait()
    ),
    "broadcast": lambda group: dist.broadcast(torch.ones(10), group=group, group_src=0),
    "all_gather": lambda group: dist.all_gather(_lists(group, 10), torch.ones(10), group=group),
    "all_to_all": lambda group: dist.all_to_all(_lists(group, 9), _lists(group, 9), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter(
        torch.ones(70_000), _lists(group, 70_000), group=group
    ),
    "barrier": lambda group: dist.barrier(group=group),
    "recv": _to_and_from_the_last,
}


def until_told(call: Call, group: dist.ProcessGroup) -> tuple[str, float]:
    """Repeats a call until it fails; returns the text and time of the error."""
    while True:
        try:
            call(group)
        except RuntimeError as error:
            return str(error), time.monotonic()


def death(group: dist.ProcessGroup, name: str, *, first: bool) -> tuple[str, float]:
    """The last rank dies in a series of calls, or before any; the others go on without it."""
    ours, call = fresh(group), CALLS[name]
    dist.barrier(group)
    if group.rank() == group.size() - 1:
        if first:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    elif first:
        time.sleep(0.5)
    return _go_on(group, call, until_told(call, ours))


def _go_on(group: dist.ProcessGroup, call: Call, told: tuple[str, float]) -> tuple[str, float]:
    """All but the last rank make a group of their own, and use it."""
    ranks = dist.get_process_group_ranks(group)[:-1]
    others = dist.new_group(ranks, backend="symm_cp", use_local_synchronization=True)
    call(others)
    return told


def death_of_a_sender(group: dist.ProcessGroup, name: str, *, first: bool) -> tuple[str, float]:
    """The last rank sends to rank 0, then dies in a collective call; its message is lost.

    Rank 0 is told while it receives, and never joins the call; all other ranks have joined it.
    """
    ours, call = fresh(group, 10 * SHORT), CALLS[name]
    last, x = group.size() - 1, torch.ones(3)
    if not first:
        call(ours)
    # Seconds until the last rank has entered the call; it takes longer on a busy machine.
    until_there = torch.tensor(min(patient(0.3), 1.5))
    dist.broadcast(until_there, 0, group)
    if group.rank() == 0:
        time.sleep(2 * until_there.item())
        return _go_on(group, call, until_told(lambda group: dist.recv(x, last, group), ours))
    if group.rank() == last:
        dist.send(x, 0, ours)  # returns before rank 0 receives
        threading.Timer(until_there.item(), os.kill, (os.getpid(), signal.SIGKILL)).start()
    return _go_on(group, call, until_told(call, ours))


def stopped(group: dist.ProcessGroup, name: str) -> tuple[str, float, float]:
    """The last rank is stopped; the others wait until the group's time-out."""
    ours, call = fresh(group, SHORT), CALLS[name]
    call(ours)
    dist.barrier(group)
    if group.rank() == group.size() - 1:
        time.sleep(0.2)  # until the others have left the barrier
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.4)
    begin = time.monotonic()
    return *until_told(call, ours), begin


def interrupted(group: dist.ProcessGroup, name: str) -> str:
    """Interrupts rank 0 with Ctrl-C in a call that the other ranks have not made yet."""
    ours, call = fresh(group), CALLS[name]
    call(ours)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if group.rank() == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            call(ours)
            message = "not interrupted"
        except KeyboardInterrupt:
            message = "interrupted" if time.monotonic() - begin < 2 else "late"
        dist.barrier(group)
    else:
        dist.barrier(group)
        try:
            call(ours)
            message = "not told"
        except RuntimeError as error:
            message = str(error)
    dist.barrier(group)
    call(ours)
    return message


def interrupted_receive(group: dist.ProcessGroup) -> str:
    """Interrupts rank 0 with Ctrl-C while it waits for a message; the next message arrives."""
    ours, message = fresh(group), "not interrupted"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if group.rank() == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            dist.irecv(torch.ones(3), group=ours, group_src=1, tag=1).wait()
        except KeyboardInterrupt:
            message = "interrupted"
        x = torch.zeros(3)
        dist.recv(x, group=ours, group_src=1, tag=2)
        assert (x == 2).all()
    else:
        dist.send(torch.full((3,), 2.0), group=ours, group_dst=0, tag=2)
    dist.barrier(group)
    return message


def told(call: Callable[[], object]) -> str:
    """The type and text of the error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreement(group: dist.ProcessGroup) -> dict[str, str]:
    """Rank 0 makes a different call from the other ranks."""
    ours, first = shared(group), group.rank() == 0
    size = group.size()
    x, y = torch.ones(4), torch.ones(6 if first else 4)
    integers = torch.ones(4, dtype=torch.int32) if first else x
    op = dist.ReduceOp.MAX if first else dist.ReduceOp.SUM
    # Rank 0's split sizes do not match those of the other ranks.
    splits = [2] * size if first else [1] * size
    rows = torch.ones(sum(splits))
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: dist.all_reduce(y, group=ours),
        "shape in the background": lambda: dist.all_reduce(y, group=ours, async_op=True).wait(),
        "dtype": lambda: dist.all_reduce(integers, group=ours),
        "op": lambda: dist.all_reduce(x, op, group=ours),
        "root": lambda: dist.broadcast(x, group=ours, group_src=0 if first else 1),
        "call": lambda: dist.barrier(ours) if first else dist.all_reduce(x, group=ours),
        "splits": lambda: dist.all_to_all_single(rows, rows.clone(), splits, splits, group=ours),
    }
    messages = {}
    for name, call in calls.items():
        messages[name] = told(call)
        total = torch.ones(2)
        dist.all_reduce(total, group=ours)  # the group is as good as before
        assert (total == size).all(), name
    return messages


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """Rank 0 passes arguments that a collective refuses."""
    ours, first, size = shared(group), group.rank() == 0, group.size()
    x = torch.ones(4)
    expanded = torch.ones(1).expand(4) if first else x
    odd = torch.ones(size * 4 + (1 if first else 0))
    short = _lists(ours, 4)[1 if first else 0 :]
    float8 = x.to(torch.float8_e4m3fn) if first else x
    truths = x.bool() if first else x
    whole = torch.ones(size * 2)
    split = [1] * size if first else [2] * size
    wrong = torch.ones(3) if first else x
    lists = _lists(ours, 4)
    calls: dict[str, Callable[[], object]] = {
        "expanded": lambda: dist.all_reduce(expanded, group=ours),
        "elements": lambda: all_gather_single(odd, x, group=ours),
        "list": lambda: dist.all_gather(short, x, group=ours),
        "float8": lambda: dist.all_reduce(float8, group=ours),
        "avg": lambda: dist.all_reduce(truths, dist.ReduceOp.AVG, group=ours),
        "splits": lambda: dist.all_to_all_single(whole, whole.clone(), split, split, group=ours),
        "own part": lambda: dist.all_gather(lists, wrong, group=ours),
        "one of several": lambda: dist.all_reduce_coalesced([x, expanded, x], group=ours),
        "one of several, started": lambda: dist.all_reduce_coalesced(
            [x.clone(), expanded, x.clone()], group=ours, async_op=True
        ).wait(),
    }
    messages = {}
    for name, call in calls.items():
        messages[name] = told(call)
        total = torch.ones(2)
        dist.all_reduce(total, group=ours)
        dist.all_reduce(total, group=ours, async_op=True).wait()
        assert (total == size**2).all(), name
    return messages


def aborted(group: dist.ProcessGroup, name: str) -> tuple[str, float, str]:
    """Rank 0 aborts a group while another of its threads waits in a call."""
    ours, call = fresh(group), CALLS[name]
    call(ours)
    messages = []

    def wait() -> None:
        messages.append(told(lambda: call(ours)))

    if group.rank() == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        begin = time.monotonic()
        ours.abort()
        thread.join()
        seconds = time.monotonic() - begin
        result = messages[0], seconds, told(lambda: dist.all_reduce(torch.ones(1), group=ours))
    else:
        time.sleep(0.6)
        result = told(lambda: call(ours)), 0.0, ""
    dist.barrier(group)
    return result


def late_for_the_first_call(group: dist.ProcessGroup) -> tuple[str, float]:
    """Rank 0 waits for a rank that does not join a group's first call."""
    ours, begin, message = fresh(group, SHORT), time.monotonic(), ""
    if group.rank() == 0:
        message = told(lambda: dist.all_reduce(torch.ones(3), group=ours))
    seconds = time.monotonic() - begin
    dist.barrier(group)
    return message, seconds


def destroyed(group: dist.ProcessGroup) -> float:
    """Destroys groups with works in flight, some of which can never complete."""
    begin = time.monotonic()
    for elements in (10, 300_000):
        ours = fresh(group)
        dist.all_reduce(torch.ones(elements), group=ours)
        kept = [dist.all_reduce(torch.ones(elements), group=ours, async_op=True) for _ in range(3)]
        kept.append(dist.irecv(torch.ones(5), group=ours, group_src=(group.rank() + 1) % 2))
        futures = [work.get_future() for work in kept]
        dist.destroy_process_group(ours)
        del kept[::2]
        del futures
    return time.monotonic() - begin


def late_for_barrier(group: dist.ProcessGroup) -> str:
    ours = fresh(group)
    ours.monitored_barrier(datetime.timedelta(seconds=20))
    if group.rank() == 1:
        dist.barrier(group)
        return told(lambda: ours.monitored_barrier(SHORT))
    message = told(lambda: ours.monitored_barrier(SHORT, True))
    dist.barrier(group)
    return message


def first_barrier(group: dist.ProcessGroup) -> tuple[list[str], float]:
    """Rank 0 alone calls a monitored barrier with a short time-out, then with one of zero."""
    ours, begin, messages = fresh(group), time.monotonic(), []
    if group.rank() == 0:
        messages.append(told(lambda: ours.monitored_barrier(SHORT, True)))
    seconds = time.monotonic() - begin
    if group.rank() == 0:
        messages.append(told(lambda: ours.monitored_barrier(datetime.timedelta(0))))
    dist.barrier(group)
    return messages, seconds


def time_outs(group: dist.ProcessGroup) -> list[float]:
    """Seconds that rank 0 waits: by the group's time-out, a changed one, and the call's own."""
    seconds = []

    def measure(call: Callable[[], object], ours: dist.ProcessGroup) -> None:
        dist.barrier(ours)
        if group.rank() == 0:
            begin = time.monotonic()
            assert "DistBackendError" in told(call)
            seconds.append(time.monotonic() - begin)
        dist.barrier(group)
        if group.rank() != 0:
            told(call)  # rank 0 has given up this call

    first, second, third = (fresh(group, SHORT) for _ in range(3))
    measure(lambda: dist.all_reduce(torch.ones(3), group=first), first)
    second.set_timeout(2 * SHORT)
    measure(lambda: dist.all_reduce(torch.ones(3), group=second), second)
    options = dist.AllreduceOptions()
    options.timeout = SHORT / 2
    measure(lambda: third.allreduce([torch.ones(3)], options).wait(), third)
    return seconds


def missing(group: dist.ProcessGroup) -> str:
    """Rank 1 does not take part in making a group."""
    if group.rank() == 1:
        dist.barrier(group)
        return ""
    message = told(lambda: fresh(group, SHORT))
    dist.barrier(group)
    return message


def forked(group: dist.ProcessGroup) -> str:
    """A forked process uses the group of its parent."""
    ours = fresh(group)
    dist.all_reduce(torch.ones(1), group=ours)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, told(lambda: dist.all_reduce(torch.ones(1), group=ours)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    message = os.read(reading, 1000).decode()
    dist.all_reduce(torch.ones(1), group=ours)
    say("done")
    return message
