"""Calls that fail on a rank, and the calls after them."""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import wait_tensor

import symm_cp
from symm_cp import runtime
from symm_cp.group import memory
from symm_cp.runtime import cpu
from symm_cp.runtime.calls import GatherCall
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some
from tests.patience import patient

OPS = torch.ops.symm_mem
SIZES = pytest.mark.parametrize("world_size", [2, 3, 4])


def fresh(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(list(range(group.size())))


def works(group: dist.ProcessGroup) -> None:
    x = torch.full((50,), group.rank() + 1.0)
    total = OPS.one_shot_all_reduce(x, "sum", group.group_name)
    assert torch.equal(total, torch.full((50,), sum(range(1, group.size() + 1)) * 1.0))


@SIZES
@pytest.mark.ranks
def test_arguments_that_one_rank_refuses(group: dist.ProcessGroup, world_size: int) -> None:
    """A refusal is reported to peers at once, in the first call and later; all stay in step."""
    own, x = fresh(group), torch.ones(4, 6)
    for _ in range(3):
        begin, bad = time.monotonic(), own.rank() == 0
        error = ValueError if bad else RuntimeError
        with pytest.raises(error, match=r"weights\[0\] of shape \[5, 4\] needs 6 rows") as caught:
            symm_cp.all_gather_matmul(x, torch.ones(5 if bad else 6, 4), group=own)
        assert bad or "ValueError on rank 0" in str(caught.value)
        assert time.monotonic() - begin < patient(2)
        works(own)


def refused_twice(group: dist.ProcessGroup) -> None:
    """A rank that is late for a group's first call is told why its peer refused that call."""
    own, x = fresh(group), torch.ones(4, 6)
    late = own.rank() == 0
    if late:
        dist.barrier(group)
    for rows in (5, 7):
        error = RuntimeError if late else ValueError
        with pytest.raises(error, match=rf"weights\[0\] of shape \[{rows}, 4\] needs 6 rows"):
            symm_cp.all_gather_matmul(x, torch.ones(6 if late else rows, 4), group=own)
    if not late:
        dist.barrier(group)
    works(own)


def test_refusals_of_several_calls(ranks: Ranks) -> None:
    ranks.run(2, refused_twice)


def test_refusals_of_several_calls_before_anybody_has_called(ranks: Ranks) -> None:
    """In new processes nobody waits to learn which hosts the others are on."""
    with ranks.own(2, refused_twice) as running:
        assert [outcome.failure for outcome in running.outcomes()] == ["", ""]


@pytest.mark.ranks(2)
def test_other_calls_after_a_refusal(group: dist.ProcessGroup) -> None:
    """Rank 1 refuses a call like one that worked, then makes a different call from rank 0."""
    own = fresh(group)
    works(own)
    x, name = torch.ones(50), own.group_name
    with pytest.raises((ValueError, RuntimeError), match="reduce_op"):
        OPS.one_shot_all_reduce(x, "nothing" if own.rank() == 1 else "sum", name)
    with pytest.raises(RuntimeError, match="ranks disagree"):
        OPS.one_shot_all_reduce(torch.ones(50 + own.rank()), "sum", name)
    works(own)


LATE = "(timed out after|within the timeout of|within) 300 ms"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.ranks(2)
def test_a_call_that_only_one_rank_made(group: dist.ProcessGroup, first: bool) -> None:
    """Rank 1 makes a call that rank 0 does not make; it times out, and the group refuses calls."""
    own = fresh(group)
    if not first:
        works(own)
    dist.barrier(group)
    x = torch.ones(50)
    if own.rank() == 1:
        memory.resolve(own).set_timeout(300)
        with pytest.raises(RuntimeError, match=LATE):
            OPS.one_shot_all_reduce(100 * x, "sum", own.group_name)
        memory.resolve(own).set_timeout(60_000)
    dist.barrier(group)
    if own.rank() == 0:  # not the data of the call that timed out
        with pytest.raises(RuntimeError, match=f"rank 1.*{LATE}"):
            OPS.one_shot_all_reduce(x, "sum", own.group_name)
    anew = "has timed out .* Make the group anew"
    for _ in range(3):
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=anew):
            OPS.one_shot_all_reduce(x, "sum", own.group_name)
        with pytest.raises(RuntimeError, match=anew):
            wait_tensor(OPS._low_contention_all_gather(x, own.group_name))
        with pytest.raises(RuntimeError, match=anew):
            symm_cp.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 4), group=own)
        assert time.monotonic() - begin < patient(2)
        if own.rank() == 1:  # as a rank that is further on: calls are not paired
            time.sleep(0.1)
    works(fresh(group))


def missed_before_hosts_are_known(group: dist.ProcessGroup) -> None:
    """Rank 1 waits in vain for rank 0 to write to the store on which host it is."""
    own = dist.new_group([0, 1], backend="gloo", timeout=datetime.timedelta(seconds=1))
    os.environ["SYMM_CP_HOST"] = own.group_name
    x = torch.ones(2)
    if own.rank() == 1:
        with pytest.raises(RuntimeError, match=r"rank 0 .* wrote nothing to the store within 1 s"):
            OPS.one_shot_all_reduce(x, "sum", own.group_name)
    dist.barrier(group)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"rank 0 .* wrote nothing to the store within 1 s"):
            OPS.one_shot_all_reduce(x, "sum", own.group_name)


def test_the_first_call_that_only_one_rank_made(ranks: Ranks) -> None:
    with ranks.own(2, missed_before_hosts_are_known) as running:
        assert [outcome.failure for outcome in running.outcomes()] == ["", ""]


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    """The call inside is interrupted after 0.3 seconds, and raises at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, send).start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - sent[0] < patient(0.2)
    signal.signal(signal.SIGINT, before)


def interrupted_twice(own: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    for _ in range(2):
        if own.rank() == 0:
            with ctrl_c():
                symm_cp.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group=own)
            dist.barrier(group)
        else:
            dist.barrier(group)
            with pytest.raises(RuntimeError, match=r"rank 0 failed: .*(interrupted|Keyboard)"):
                symm_cp.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group=own)
        works(own)


@pytest.mark.parametrize("new_host", [False, True], ids=["known host", "new host"])
@pytest.mark.ranks(2)
def test_ctrl_c(group: dist.ProcessGroup, new_host: bool) -> None:
    """Ctrl-C ends a wait in the first call and in a later one."""
    own = fresh(group)
    if new_host:  # so no rank knows yet which hosts the others are on
        os.environ["SYMM_CP_HOST"] = own.group_name
    try:
        interrupted_twice(own, group)
    finally:
        os.environ.pop("SYMM_CP_HOST", None)


@SIZES
@pytest.mark.ranks
def test_ctrl_c_in_a_kernel(group: dist.ProcessGroup, world_size: int) -> None:
    """Peers that wait for a rank's kernel hear of its Ctrl-C."""
    own = fresh(group)
    works(own)
    state, shard = memory.resolve(own), torch.ones(50)

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        if own.rank() == 0:
            raise KeyboardInterrupt

    for _ in range(3):
        failure = KeyboardInterrupt if own.rank() == 0 else RuntimeError
        text = "" if own.rank() == 0 else "KeyboardInterrupt on rank 0"
        with mock.patch.object(cpu, "GATHERED_BYTES", 0), pytest.raises(failure, match=text):
            runtime.run(GatherCall(state, [shard], consume, b"interrupted"))
        works(own)


@pytest.mark.ranks(2)
def test_ctrl_c_in_transfers(group: dist.ProcessGroup) -> None:
    """Interrupted waits end at once, for earlier transfers, too; these go on in the background."""
    own = fresh(group)
    works(own)  # the ranks know each other's hosts
    rank, name = own.rank(), own.group_name
    expected = torch.arange(2.0).repeat_interleave(50)

    def start() -> torch.Tensor:
        return OPS._low_contention_all_gather(torch.full((50,), float(rank)), name)

    for _ in range(3):  # the first transfer needs a workspace, and wakes the engine
        if rank == 0:
            pending = [start(), start()]
            with ctrl_c():
                wait_tensor(pending[1])
            del pending
            again = [torch.full((50,), -1.0) for _ in range(9)]  # not the transfers' memory
            dist.barrier(group)
        else:
            dist.barrier(group)
            for gathered in [start(), start()]:
                with contextlib.suppress(RuntimeError):  # that rank 0 was interrupted
                    assert torch.equal(wait_tensor(gathered), expected)
        assert torch.equal(wait_tensor(start()), expected)
        works(own)
        assert rank != 0 or all(torch.equal(each, again[0]) for each in again)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.ranks
def test_first_uses_in_any_order(group: dist.ProcessGroup, world_size: int) -> None:
    """Asynchronous ops of two groups, which rank 0 first uses in the opposite order."""
    for elements in (1 << 10, 1 << 18, 1 << 19):  # small ones, large ones, and growth
        groups = [fresh(group), fresh(group)]
        x = torch.full((elements,), float(group.rank()))
        order = groups if group.rank() == 0 else groups[::-1]
        pending = [OPS._low_contention_all_gather(x, own.group_name) for own in order]
        for gathered in map(wait_tensor, pending):
            parts = gathered.view(group.size(), elements)
            assert parts[:, 0].tolist() == list(range(group.size()))


@pytest.mark.parametrize("pause", some(1.0, of=[0.01, 0.1, 1.0, 3.0]))
@pytest.mark.ranks(2)
def test_threads_whose_first_calls_are_far_apart(group: dist.ProcessGroup, pause: float) -> None:
    """Each thread uses its own channel; the channel used first differs between the ranks."""
    own = dist.new_group(list(range(group.size())), backend="symm_cp")
    x, errors = torch.full((50,), 1.0), []

    def first_calls(one_shot: bool) -> None:
        try:
            if one_shot == (own.rank() == 0):
                time.sleep(pause)
            if one_shot:
                works(own)
            else:
                dist.all_reduce(x, group=own)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=first_calls, args=(each,)) for each in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(x, torch.full((50,), float(group.size())))
    works(own)


@pytest.mark.ranks(2)
def test_threads_that_share_a_group(group: dist.ProcessGroup) -> None:
    """As when a checkpoint is saved in the background over the group of training."""
    own, x = dist.new_group(list(range(group.size())), backend="symm_cp"), torch.ones(3)
    thread = threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": own})
    thread.start()
    thread.join()
    dist.all_reduce(x, group=own)
    call = partial(dist.broadcast, src=0) if own.rank() == 0 else dist.all_reduce
    advice = r"another thread of (this rank|rank \d) uses the group: give it one of its own"
    with pytest.raises(RuntimeError, match=rf"ranks disagree: .*{advice}"):
        call(x, group=own)


def in_other_channels(group: dist.ProcessGroup) -> float:
    own, x = dist.new_group(list(range(group.size())), backend="symm_cp"), torch.ones(50)
    call = partial(works, own) if own.rank() == 0 else partial(dist.all_reduce, x, group=own)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks disagree: .* calls all_reduce"):
        call()
    return time.monotonic() - begin


@exhaustive
def test_first_calls_that_disagree_are_told_later(ranks: Ranks) -> None:
    for seconds in ranks.run(2, in_other_channels):
        assert 5 < seconds < patient(15)


@pytest.mark.ranks(2)
def test_a_forked_child_is_no_rank(group: dist.ProcessGroup) -> None:
    own = fresh(group)
    works(own)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            OPS.one_shot_all_reduce(torch.ones(50), "sum", own.group_name)
            said = "no error"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    message = os.read(read, 4096).decode()
    said = "RuntimeError: one_shot_all_reduce float32[50] sum: this process was forked from rank"
    assert f"{said} {own.rank()}" in message
    os.close(read)
    os.close(write)
    works(own)


@pytest.mark.ranks(2)
def test_too_few_file_descriptors(group: dist.ProcessGroup) -> None:
    own = fresh(group)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if own.rank() == 1:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
    begin = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"more file descriptors.*ulimit -n"):
            OPS.one_shot_all_reduce(torch.ones(50), "sum", own.group_name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert time.monotonic() - begin < patient(2)
    dist.barrier(group)
    works(own)
