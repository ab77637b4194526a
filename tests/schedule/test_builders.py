"""The shape of what the builders write."""

import pickle

import pytest

from symm_cp.schedule import (
    CHANNELS,
    Compute,
    Copy,
    Pattern,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
    accesses,
    all_gather,
    all_gather_and_consume,
    all_ranks,
    all_to_all,
    consume_and_reduce_scatter,
    one_shot_all_reduce,
    peers,
    produce_and_reduce_scatter,
    reduce_scatter,
    two_shot_all_reduce,
)

PATTERNS = [(channel, pattern) for channel in CHANNELS for pattern in CHANNELS[channel]]
LANES = {"sync": "compute", "async": "copy"}


def steps_of(schedule: Schedule) -> tuple[Step, ...]:
    (steps,) = schedule.lanes.values()
    return steps


def consume(index: int, shard: Region, chunk: int | None) -> Compute:
    return Compute("consume", index, (shard,), (Region(0, "output", chunk),))


def test_peers_start_after_oneself_and_wrap() -> None:
    assert peers(2, 4) == (3, 0, 1)
    assert peers(0, 1) == ()


def test_all_gather_and_consume() -> None:
    assert steps_of(all_gather_and_consume(0, 2)) == (
        Copy(Region(0, "input"), Region(0, "slot")),
        Signal(1, "ready"),
        consume(0, Region(0, "input"), 0),
        Wait(1, "ready"),
        consume(1, Region(1, "slot"), 1),
    )


def test_all_gather_and_consume_in_place_gather_accumulate() -> None:
    schedule = all_gather_and_consume(0, 2, in_place=True, gather=True, accumulate=True)
    assert steps_of(schedule) == (
        Signal(1, "ready"),
        Copy(Region(0, "symmetric"), Region(0, "gathered", 0)),
        consume(0, Region(0, "symmetric"), None),
        Wait(1, "ready"),
        Copy(Region(1, "symmetric"), Region(0, "gathered", 1)),
        consume(1, Region(1, "symmetric"), None),
        Signal(1, "done"),
        Wait(1, "done"),
    )


def test_all_gather_and_consume_one_slot() -> None:
    assert steps_of(all_gather_and_consume(0, 2, slots=1)) == (
        Wait(1, "done", lag=1),
        Copy(Region(0, "input"), Region(0, "slot")),
        Signal(1, "ready"),
        consume(0, Region(0, "input"), 0),
        Wait(1, "ready"),
        consume(1, Region(1, "slot"), 1),
        Signal(1, "done"),
    )


def test_produce_and_reduce_scatter() -> None:
    output = Region(1, "output")
    assert steps_of(produce_and_reduce_scatter(1, 3)) == (
        Compute("produce", 2, (), (Region(1, "slot", 2),)),
        Signal(2, "ready"),
        Compute("produce", 0, (), (Region(1, "slot", 0),)),
        Signal(0, "ready"),
        Compute("produce", 1, (), (output,)),
        Wait(2, "ready"),
        Wait(0, "ready"),
        Compute("reduce", 1, (Region(0, "slot", 1), output, Region(2, "slot", 1)), (output,)),
    )


def test_consume_and_reduce_scatter() -> None:
    output, own = Region(0, "output"), Region(0, "input")
    assert steps_of(consume_and_reduce_scatter(0, 3)) == (
        Copy(own, Region(0, "slot", 3)),
        Signal(1, "ready"),
        Signal(2, "ready"),
        Compute("consume", 0, (own,), (output,)),
        Wait(1, "ready"),
        Compute("consume", 1, (Region(1, "slot", 3),), (Region(0, "slot", 1),)),
        Signal(1, "reduced"),
        Wait(2, "ready"),
        Compute("consume", 2, (Region(2, "slot", 3),), (Region(0, "slot", 2),)),
        Signal(2, "reduced"),
        Wait(1, "reduced"),
        Wait(2, "reduced"),
        Compute("reduce", 0, (output, Region(1, "slot", 0), Region(2, "slot", 0)), (output,)),
    )


def test_consume_and_reduce_scatter_in_a_ring_uses_two_places_in_turn() -> None:
    steps = steps_of(consume_and_reduce_scatter(0, 4, ring=True))
    written = [
        write.chunk
        for step in steps
        if isinstance(step, Compute) and step.kernel == "consume" and step.index != 0
        for write in step.writes
    ]
    assert written == [0, 1, 0]
    assert [step.index for step in steps if isinstance(step, Compute) and step.kernel == "add"] == [
        3,
        2,
        1,
    ]
    # Before the third partial sum overwrites the first one, its reader has taken it.
    third = steps.index(Compute("consume", 3, (Region(3, "slot", 4),), (Region(0, "slot", 0),)))
    assert steps[third - 1] == Wait(1, "taken")


@pytest.mark.parametrize("staged", [False, True])
def test_all_gather(staged: bool) -> None:
    source = Region(0, "staging" if staged else "input")
    assert steps_of(all_gather(0, 2, staged=staged)) == (
        Copy(source, Region(0, "slot")),
        Signal(1, "ready"),
        Copy(Region(0, "slot"), Region(0, "output", 0)),
        Wait(1, "ready"),
        Copy(Region(1, "slot"), Region(0, "output", 1)),
    )


def test_all_gather_in_place() -> None:
    assert steps_of(all_gather(0, 2, in_place=True)) == (
        Signal(1, "ready"),
        Copy(Region(0, "symmetric"), Region(0, "output", 0)),
        Wait(1, "ready"),
        Copy(Region(1, "symmetric"), Region(0, "output", 1)),
        Signal(1, "done"),
        Wait(1, "done"),
    )


@pytest.mark.parametrize("staged", [False, True])
def test_reduce_scatter(staged: bool) -> None:
    assert steps_of(reduce_scatter(1, 2, staged=staged)) == (
        Copy(Region(1, "staging" if staged else "input"), Region(1, "slot")),
        Signal(0, "ready"),
        Wait(0, "ready"),
        Compute("reduce", 1, (Region(0, "slot", 1), Region(1, "slot", 1)), (Region(1, "output"),)),
    )


def test_reduce_scatter_in_place() -> None:
    parts = (Region(0, "symmetric", 1), Region(1, "symmetric", 1))
    assert steps_of(reduce_scatter(1, 2, in_place=True)) == (
        Signal(0, "ready"),
        Wait(0, "ready"),
        Compute("reduce", 1, parts, (Region(1, "output"),)),
        Signal(0, "done"),
        Wait(0, "done"),
    )


def test_one_shot_all_reduce() -> None:
    parts = (Region(0, "symmetric"), Region(1, "symmetric"))
    assert steps_of(one_shot_all_reduce(0, 2)) == (
        Signal(1, "ready"),
        Wait(1, "ready"),
        Compute("reduce", 0, parts, (Region(0, "output"),)),
        Signal(1, "done"),
        Wait(1, "done"),
    )
    assert steps_of(one_shot_all_reduce(0, 2, in_place=False)) == (
        Copy(Region(0, "input"), Region(0, "slot")),
        Signal(1, "ready"),
        Wait(1, "ready"),
        Compute("reduce", 0, (Region(0, "slot"), Region(1, "slot")), (Region(0, "output"),)),
    )


def test_two_shot_all_reduce() -> None:
    parts = (Region(0, "symmetric", 0), Region(1, "symmetric", 0))
    steps = (
        Signal(1, "ready"),
        Wait(1, "ready"),
        Compute("reduce", 0, parts, (Region(0, "slot"),)),
        Signal(1, "reduced"),
        Copy(Region(0, "slot"), Region(0, "symmetric", 0)),
        Wait(1, "reduced"),
        Copy(Region(1, "slot"), Region(0, "symmetric", 1)),
    )
    assert steps_of(two_shot_all_reduce(0, 2)) == steps
    # One slot: no wait for "done", since "ready" already says it; but another op may wait for it.
    assert steps_of(two_shot_all_reduce(0, 2, slots=1)) == (*steps, Signal(1, "done"))


def test_all_to_all() -> None:
    assert steps_of(all_to_all(0, 2)) == (
        Copy(Region(0, "input", 1), Region(0, "slot", 1)),
        Signal(1, "ready"),
        Copy(Region(0, "input", 0), Region(0, "output", 0)),
        Wait(1, "ready"),
        Copy(Region(1, "slot", 0), Region(0, "output", 1)),
    )
    assert steps_of(all_to_all(0, 2, in_place=True)) == (
        Signal(1, "ready"),
        Copy(Region(0, "symmetric", 0), Region(0, "output", 0)),
        Wait(1, "ready"),
        Copy(Region(1, "symmetric", 0), Region(0, "output", 1)),
        Signal(1, "done"),
        Wait(1, "done"),
    )


@pytest.mark.parametrize(("channel", "pattern"), PATTERNS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_lane_name_and_place(channel: str, pattern: Pattern, world_size: int) -> None:
    for rank, schedule in enumerate(pattern.schedules(world_size)):
        assert list(schedule.lanes) == [LANES[channel]]
        assert schedule.name == pattern.builder.__name__
        assert (schedule.rank, schedule.world_size, schedule.slots) == (rank, world_size, 2)


@pytest.mark.parametrize(("channel", "pattern"), PATTERNS, ids=str)
@pytest.mark.parametrize("slots", [1, 2])
def test_one_rank_needs_nobody(channel: str, pattern: Pattern, slots: int) -> None:
    (schedule,) = pattern.schedules(1, slots)
    assert not [step for step in steps_of(schedule) if isinstance(step, Signal | Wait)]
    written = [write.buffer for step in steps_of(schedule) for write in accesses(step)[1]]
    # In place, one rank's sum over all ranks is there already.
    assert "output" in written or schedule.name == "two_shot_all_reduce"


@pytest.mark.parametrize(("channel", "pattern"), PATTERNS, ids=str)
def test_every_wait_visits_peers_in_order(channel: str, pattern: Pattern) -> None:
    for schedule in pattern.schedules(5):
        waits = [step for step in steps_of(schedule) if isinstance(step, Wait)]
        if dict(pattern.options).get("ring"):
            continue  # partial sums come from the ranks behind
        kinds = {(wait.flag, wait.lag) for wait in waits}
        orders = [tuple(w.source for w in waits if (w.flag, w.lag) == kind) for kind in kinds]
        assert orders
        assert all(order == peers(schedule.rank, 5) for order in orders)


@pytest.mark.parametrize(("channel", "pattern"), PATTERNS, ids=str)
def test_reductions_read_in_rank_order(channel: str, pattern: Pattern) -> None:
    for schedule in pattern.schedules(5):
        for step in steps_of(schedule):
            if isinstance(step, Compute) and step.kernel == "reduce":
                assert [region.rank for region in step.reads] == [0, 1, 2, 3, 4]


def test_schedules_are_cached_hashable_and_survive_pickling() -> None:
    schedule = all_gather(1, 3, in_place=True)
    assert schedule is all_gather(1, 3, in_place=True)
    twin = pickle.loads(pickle.dumps(schedule))
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert schedule != all_gather(1, 3)
    assert schedule.lanes["copy"]
    assert "compute" not in schedule.lanes
    with pytest.raises(TypeError):
        schedule.lanes["copy"] = ()  # type: ignore[index]


def test_all_ranks_passes_the_options_on() -> None:
    assert all_ranks(all_to_all, 3, in_place=True, slots=1) == tuple(
        all_to_all(rank, 3, in_place=True, slots=1) for rank in range(3)
    )


@pytest.mark.parametrize(("channel", "pattern"), PATTERNS, ids=str)
def test_bad_places_are_refused(channel: str, pattern: Pattern) -> None:
    build, options = pattern.builder, dict(pattern.options)
    with pytest.raises(ValueError, match=rf"{build.__name__}: world_size=0 must be at least 1"):
        build(0, 0, **options)
    with pytest.raises(ValueError, match=r"rank=4 must be in 0\.\.3 for world_size=4"):
        build(4, 4, **options)
    with pytest.raises(ValueError, match=r"rank=-1 must be in 0\.\.3"):
        build(-1, 4, **options)
    with pytest.raises(ValueError, match=r"slots=0 must be at least 1"):
        build(0, 4, slots=0, **options)


@pytest.mark.parametrize("build", [all_gather, reduce_scatter])
def test_staged_in_place_is_refused(build: type) -> None:
    with pytest.raises(ValueError, match=r"in_place=True and staged=True exclude each other"):
        build(0, 2, in_place=True, staged=True)


@pytest.mark.parametrize(
    "step",
    [
        Signal(2, "ready"),
        Wait(2, "ready"),
        Copy(Region(0, "input"), Region(2, "slot")),
        Compute("consume", 0, (Region(2, "slot"),), ()),
    ],
    ids=str,
)
def test_steps_that_name_a_rank_out_of_range_are_refused(step: Step) -> None:
    message = r"odd: step 0 of lane 'compute', .* names rank 2, which must be in 0\.\.1"
    with pytest.raises(ValueError, match=message):
        Schedule("odd", 0, 2, {"compute": (step,)}, 2)


def test_negative_lag_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lag=-1 must be >= 0"):
        Schedule("odd", 0, 2, {"compute": (Wait(1, "ready", lag=-1),)}, 2)
