"""``check`` finds the known errors of wrong schedules."""

import re
from dataclasses import replace

import pytest

from symm_cp.schedule import (
    CheckReport,
    Compute,
    Copy,
    Deadlock,
    Race,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
    check,
    patterns,
)
from symm_cp.schedule.check import CALLER, ForeignAccess, Starvation, TwoWriters, UninitialisedRead
from tests.schedule.calls import PLACES, Place

INPUT, OUTPUT = Region(0, "input"), Region(0, "output")


def schedule(rank: int, *steps: Step, world_size: int = 2, slots: int = 2) -> Schedule:
    return Schedule("by hand", rank, world_size, {"compute": steps}, slots)


def kinds(report: CheckReport) -> set[type]:
    return {type(problem) for problem in report.problems}


def read_peer(rank: int, *between: Step, buffer: str = "slot", slots: int = 2) -> Schedule:
    """Publish in the slot and read the peer's, with ``between`` in between."""
    return schedule(
        rank,
        Copy(Region(rank, "input"), Region(rank, "slot")),
        *between,
        Copy(Region(1 - rank, buffer), Region(rank, "output")),
        slots=slots,
    )


def exchange(rank: int) -> tuple[Step, Step]:
    return Signal(1 - rank, "ready"), Wait(1 - rank, "ready")


def test_a_race_names_both_steps() -> None:
    report = check([[read_peer(0), read_peer(1, *exchange(1)[:1])]])
    races = [problem for problem in report.problems if isinstance(problem, Race)]
    assert not report.ok
    sites = {
        (site.rank, site.lane, site.call, site.index, site.access)
        for site in (races[0].first, races[0].second)
    }
    assert sites in (
        {(0, "compute", 0, 1, "reads"), (1, "compute", 0, 0, "writes")},
        {(1, "compute", 0, 2, "reads"), (0, "compute", 0, 0, "writes")},
    )
    assert "race: nothing orders [rank" in str(report)
    assert "reads slot of rank" in str(report)


def test_ready_signals_make_the_same_exchange_right() -> None:
    assert check([[read_peer(rank, *exchange(rank)) for rank in (0, 1)]] * 4).ok


def test_a_cycle_of_waits_is_a_deadlock_of_every_rank_in_it() -> None:
    calls = [[schedule(rank, *reversed(exchange(rank))) for rank in (0, 1)]] * 2
    report = check(calls)
    assert kinds(report) == {Deadlock}
    stuck = {
        (problem.site.rank, problem.site.index, problem.flag, problem.source, problem.needed)
        for problem in report.problems
        if isinstance(problem, Deadlock)
    }
    assert stuck == {(0, 0, "ready", 1, (1, 0)), (1, 0, "ready", 0, (1, 0))}
    assert "needs flag 'ready' of rank 1 to reach 1, but it stays at 0" in str(report)


def test_a_missing_later_signal_is_a_deadlock_at_that_call() -> None:
    silent = [schedule(0, Wait(1, "ready")), schedule(1)]
    good = [schedule(0, Wait(1, "ready")), schedule(1, Signal(0, "ready"))]
    (problem,) = check([good, good, silent]).problems
    assert isinstance(problem, Deadlock)
    assert (problem.site.call, problem.needed, problem.seen) == (2, (3, 0), (2, 0))


def test_a_wait_joins_only_the_earliest_signal_that_satisfies_it() -> None:
    """The lagging wait may be satisfied by call 0's signal, which does not cover call 1's read."""
    reader = [schedule(1, Copy(Region(0, "symmetric"), Region(1, "output")), Signal(0, "done"))]
    for lag, ok in ((0, True), (1, False)):
        owner = schedule(0, Signal(1, "ready"), Wait(1, "done", lag=lag))
        other = schedule(1, Wait(0, "ready"), *reader[0].lanes["compute"])
        assert check([[owner, other]] * 2).ok is ok


def test_two_lanes_that_write_one_flag() -> None:
    both = Schedule("both", 0, 2, {"compute": (Signal(1, "f"),), "copy": (Signal(1, "f"),)}, 2)
    (problem,) = check([[both, schedule(1)]] * 2).problems
    assert isinstance(problem, TwoWriters)
    assert (problem.flag, problem.to) == ("f", 1)
    assert {problem.first.lane, problem.second.lane} == {"compute", "copy"}


def test_a_flag_nobody_waits_for_is_no_problem() -> None:
    assert check([[schedule(0, Signal(1, "unheard")), schedule(1)]] * 2).ok


def test_flags_of_one_name_to_several_receivers_are_several_flags() -> None:
    lanes = {"compute": (Signal(1, "f"),), "copy": (Signal(0, "f"),)}
    assert check([[Schedule("both", 0, 2, lanes, 2), schedule(1)]]).ok


def test_reading_a_slot_that_nobody_wrote_in_that_call() -> None:
    write = Copy(INPUT, Region(0, "slot"))
    read = Copy(Region(0, "slot"), OUTPUT)
    calls = [
        [schedule(0, write, read, world_size=1, slots=1)],
        [schedule(0, read, world_size=1, slots=1)],
    ]
    (problem,) = check(calls).problems
    assert isinstance(problem, UninitialisedRead)
    assert (problem.site.call, problem.site.index) == (1, 0)
    assert problem.site.region == Region(0, "slot")


def test_reading_all_needs_all_chunks_written() -> None:
    read = Copy(Region(0, "slot"), OUTPUT)
    writes = [Copy(INPUT, Region(0, "slot", chunk)) for chunk in (0, 1)]
    assert check([[schedule(0, *writes, read), schedule(1)]]).ok
    assert kinds(check([[schedule(0, writes[0], read), schedule(1)]])) == {UninitialisedRead}


def test_private_buffers_are_out_of_reach() -> None:
    report = check([[read_peer(rank, *exchange(rank), buffer="input") for rank in (0, 1)]])
    assert kinds(report) == {ForeignAccess}
    assert "input of rank 1" in str(report)


def test_chunks_tell_apart_within_a_call_only() -> None:
    """Another call may cut the slot differently, so its chunk 1 may be this call's chunk 0."""
    write = [schedule(0, Copy(INPUT, Region(0, "slot", 0))), schedule(1)]
    read = [schedule(0), schedule(1, Copy(Region(0, "slot", 1), Region(1, "output")))]
    both = [write[0], read[1]]
    assert kinds(check([both])) == {UninitialisedRead}
    idle = [schedule(0), schedule(1)]
    assert Race not in kinds(check([write, read]))  # two slots: other memory
    assert Race in kinds(check([write, idle, read]))


def test_the_caller_overwrites_the_symmetric_tensor_after_the_call() -> None:
    def hasty(rank: int) -> Schedule:
        full = patterns.ALL_REDUCE.direct(in_place=True).schedule(rank, 2)
        return schedule(rank, *full.lanes["compute"][:-1])  # without the wait for "done"

    report = check([[hasty(0), hasty(1)]])
    assert kinds(report) == {Race}
    race = report.problems[0]
    assert isinstance(race, Race)
    assert CALLER in (race.first.index, race.second.index)
    assert "the caller writes symmetric of rank" in str(race)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_shot_without_the_slot_would_need_another_exchange(world_size: int) -> None:
    """The pattern goes through the slot, else peers would still read the tensor at return."""
    in_place = patterns.TWO_SHOT_ALL_REDUCE.direct(in_place=True)

    def direct(rank: int) -> Schedule:
        own = Region(rank, "symmetric", rank)
        steps: list[Step] = []
        for step in in_place.schedule(rank, world_size).lanes["compute"]:
            if isinstance(step, Compute):
                step = Compute(step.kernel, step.index, step.reads, (own,))
            elif isinstance(step, Copy):
                if step.src.rank == rank:
                    continue
                step = Copy(Region(step.src.rank, "symmetric", step.src.rank), step.dst)
            steps.append(step)
        return schedule(rank, *steps, world_size=world_size)

    assert kinds(check([[direct(rank) for rank in range(world_size)]])) == {Race}


ONE_SLOT = [place for place in PLACES if place.workspace.slots == 1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("place", ONE_SLOT, ids=str)
def test_one_slot_is_unsafe_without_waits_for_done(place: Place, world_size: int) -> None:
    def as_if_one_slot(full: Schedule) -> Schedule:
        return Schedule(full.name, full.rank, full.world_size, full.lanes, slots=1)

    assert check([place.variant.schedules(world_size, slots=1)] * 4).ok
    stripped = [as_if_one_slot(full) for full in place.variant.schedules(world_size, slots=2)]
    assert kinds(check([stripped] * 4)) == {Race}


def prefetch(rank: int, *, handed_over: bool) -> Schedule:
    """A copy lane pulls the peer's shard, the compute lane consumes it (as on CUDA)."""
    peer = 1 - rank
    pulled = Region(rank, "pulled", peer)
    copy: list[Step] = [
        Copy(Region(rank, "input"), Region(rank, "slot")),
        Signal(peer, "ready"),
        Wait(peer, "ready"),
        Copy(Region(peer, "slot"), pulled),
    ]
    compute: list[Step] = [Compute("consume", peer, (pulled,), (Region(rank, "output"),))]
    if handed_over:
        copy.append(Signal(rank, "arrived"))
        compute.insert(0, Wait(rank, "arrived"))
    lanes = {"compute": tuple(compute), "copy": tuple(copy)}
    return Schedule("prefetch", rank, 2, lanes, 2)


def test_a_signal_to_oneself_orders_two_lanes() -> None:
    assert check([[prefetch(rank, handed_over=True) for rank in (0, 1)]] * 4).ok
    report = check([[prefetch(rank, handed_over=False) for rank in (0, 1)]] * 4)
    assert Race in kinds(report) or UninitialisedRead in kinds(report)


def polling(rank: int, awaits: tuple[tuple[str, Region], ...], *reads: Region) -> Schedule:
    """Like `prefetch`, with a polling kernel, which also reads its own input from the start."""
    publish, signal, *pull = prefetch(rank, handed_over=True).lanes["copy"]
    copy = (publish, signal, Signal(rank, "offered"), *pull)
    kernel = Compute(
        "poll", rank, (Region(rank, "input"), *reads), (Region(rank, "output"),), awaits
    )
    lanes = {"compute": (Wait(rank, "offered"), kernel), "copy": copy}
    return Schedule("polling", rank, 2, lanes, 2)


def test_a_kernel_that_polls_reads_what_it_polled_for() -> None:
    def call(flag: str) -> list[Schedule]:
        return [polling(rank, ((flag, Region(rank, "pulled", 1 - rank)),)) for rank in (0, 1)]

    assert check([call("arrived")] * 3).ok
    report = check([call("another")] * 3)
    assert kinds(report) == {Deadlock}
    assert "Compute('poll', 0)" not in str(report)
    assert "Wait('another' from rank 0)" in str(report)
    unasked = [polling(rank, (), Region(rank, "pulled", 1 - rank)) for rank in (0, 1)]
    report = check([unasked] * 3)
    assert Race in kinds(report) or UninitialisedRead in kinds(report)


@pytest.mark.parametrize("missing", ["copy", "signal"])
def test_a_kernel_that_polls_starts_when_the_peers_have_what_they_wait_for(missing: str) -> None:
    """The kernel may take the multiprocessor that a local copy or a signal needs."""

    def early(rank: int) -> Schedule:
        right = polling(rank, (("arrived", Region(rank, "pulled", 1 - rank)),))
        publish, signal, offered, *pull = right.lanes["copy"]
        first = [offered, publish, signal] if missing == "copy" else [publish, offered, signal]
        return replace(right, lanes={**right.lanes, "copy": (*first, *pull)})

    report = check([[early(rank) for rank in (0, 1)]] * 3)
    assert kinds(report) == {Starvation}
    text = "Copy(input of rank 0 -> slot of rank 0)" if missing == "copy" else "Signal('ready'"
    assert text in str(report)
    assert "before [rank 0, lane 'compute', call 0, step 1: Compute('poll', 0)], which" in str(
        report
    )


def test_a_report_says_what_was_checked() -> None:
    report = check([patterns.ALL_GATHER_AND_CONSUME.staged().schedules(3)] * 5)
    assert (report.ok, report.calls, report.world_size) == (True, 5, 3)
    assert str(report) == "5 calls on 3 ranks: no problem"


def test_schedules_that_do_not_fit_together_are_refused() -> None:
    good = patterns.ALL_GATHER_AND_CONSUME.staged().schedules(2)
    with pytest.raises(ValueError, match="at least one call of at least one rank"):
        check([])
    with pytest.raises(ValueError, match=r"calls\[1\] has 1 schedules, .* world_size=2 ranks"):
        check([good, good[:1]])
    with pytest.raises(ValueError, match=r"calls\[0\]\[0\] .* has .*=\(1, 2, 2\), must have \(0"):
        check([good[::-1]])
    with pytest.raises(ValueError, match=r"=\(0, 2, 1\), must have \(0, 2, 2\)"):
        check([good, patterns.ALL_GATHER_AND_CONSUME.staged().schedules(2, slots=1)])


def test_a_report_of_too_few_calls_says_how_many_it_takes() -> None:
    good = [read_peer(rank, *exchange(rank)) for rank in (0, 1)]
    for calls in (1, 2, 3):
        report = check([good] * calls)
        assert report.ok
        assert re.search(
            rf"^{calls} calls? on .* no problem within .* slots \+ 2 = 4 calls", str(report)
        )
    assert str(check([good] * 4)) == "4 calls on 2 ranks: no problem"
