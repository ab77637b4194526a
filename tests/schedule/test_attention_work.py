"""Predicted times of attention by each method against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from symm_cp.schedule import CAUSAL, NO_MASK, Mask, head_tail, sequential
from symm_cp.schedule.attention_work import AttentionWork
from symm_cp.schedule.machine import MACHINES, TYPICAL_CPU, Curve, Machine

#: A multiplication or addition takes a second; moving bytes takes no time.
COMPUTING = Machine(
    "computing", 1.0, 0.0, 1e30, 1e30, attention_reached=1.0, kernel_seconds=0.0, signal_seconds=0.0
)
#: Copying a byte takes a second, wherever it goes; kernels take no time.
MOVING = Machine(
    "moving", 1e30, 0.0, 2.0, 1.0, link_reached=1.0, kernel_seconds=0.0, signal_seconds=0.0,
    curves={"reduce": Curve((1.0,), (1e-30,))},
)  # fmt: skip


def work(length: int, ranks: int, heads: int = 4, mask: Mask = CAUSAL) -> AttentionWork:
    layout = head_tail(length, ranks)
    return AttentionWork(2, heads, heads, 3, 5, "float32", 4, layout, layout, (mask,))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_kernels(ranks: int) -> None:
    """Each pair of query and key takes two products, of E and V features; ranks share the pairs."""
    length = 16 * ranks
    operations = 2 * 2 * 4 * (3 + 5) * length * (length + 1) / 2 / ranks
    for backward, factor in ((False, 1.0), (True, 2.5)):
        given = replace(work(length, ranks), backward=backward)
        for method, seconds in given.seconds(COMPUTING).items():
            assert seconds == pytest.approx(factor * operations), method


def test_ranks_that_compute_more_than_others() -> None:
    """Rank 1 of 2 has three quarters of a causal mask's pairs, or two of three heads."""
    plain = work(32, 2, heads=6)
    spread = replace(plain, queries=sequential(32, 2), keys=sequential(32, 2))
    even = plain.seconds(COMPUTING)
    assert spread.seconds(COMPUTING)["ulysses"] == pytest.approx(even["ulysses"])
    pairs = 16 * 16 + 16 * 17 / 2
    assert spread.seconds(COMPUTING)["allgather"] == pytest.approx(2 * 2 * 6 * 8 * pairs)
    odd = work(32, 2, heads=3).seconds(COMPUTING)
    assert odd["ulysses"] / odd["allgather"] == pytest.approx(4 / 3)


def test_samples_with_masks_of_their_own() -> None:
    one = replace(work(32, 2), batch=1)
    both = replace(work(32, 2), masks=(CAUSAL, NO_MASK))
    for method, seconds in both.seconds(COMPUTING).items():
        apart = [replace(one, masks=(mask,)).seconds(COMPUTING)[method] for mask in both.masks]
        assert seconds == pytest.approx(sum(apart))


def test_what_moves_forward() -> None:
    """Gathering copies keys to the slot; an exchange copies all to it or the result, then pulls."""
    given = work(32, 2)
    rows, of_keys = 2 * 16 * 4, 4 * (3 + 5)
    assert given.seconds(MOVING)["allgather"] == pytest.approx(rows * of_keys)
    heads = rows * (4 * (3 + 3 + 5) + 4 * 5)  # of queries, keys and values; of results
    assert given.seconds(MOVING)["ulysses"] == pytest.approx(heads + heads / 2)


def test_key_heads_that_ranks_share() -> None:
    """Two ranks both get a single key head; of two key heads each rank gets one."""
    shared = [replace(work(32, 2), kv_heads=kv).seconds(MOVING)["ulysses"] for kv in (1, 2, 4)]
    rows = 2 * 16 * 4
    assert shared[2] - shared[1] == pytest.approx(1.5 * rows * 2 * (3 + 5))
    assert shared[0] == pytest.approx(shared[1])


def test_what_moves_backward() -> None:
    """Queries, keys, values, results and their gradients are sent; three gradients come back."""
    given = replace(work(32, 2), backward=True)
    rows = 2 * 16 * 4
    there, back = 4 * (3 + 3 + 5) + 2 * 4 * 5, 4 * (3 + 3 + 5)
    assert given.seconds(MOVING)["ulysses"] == pytest.approx(1.5 * rows * (there + back))


def test_calls_hosts_and_too_few_heads() -> None:
    given = work(64, 4)
    fixed = replace(COMPUTING, calls={"all_gather_attention": 1e9, "ulysses_attention": 2e9})
    before, after = given.seconds(COMPUTING), given.seconds(fixed)
    assert after == pytest.approx({name: before[name] + fixed.calls[call] for name, call in
                                   (("allgather", "all_gather_attention"),
                                    ("ulysses", "ulysses_attention"))})  # fmt: skip
    assert set(work(64, 8, heads=6).seconds(COMPUTING)) == {"allgather"}
    slow = replace(TYPICAL_CPU, network=1.0)
    near, far = given.seconds(slow), given.seconds(slow, hosts=2)
    # Half of the keys, of one rank in turn, and half of the elements that a rank exchanges.
    assert far["allgather"] == pytest.approx(2 * 16 * 4 * (3 + 5) * 4)
    assert far["ulysses"] - near["ulysses"] == pytest.approx(2 * 16 * 4 * (6 + 5 + 5) * 4 / 2)


def test_staged_kernels_hide_transfers() -> None:
    given = replace(work(64, 4), kv_heads=1)
    kernels = given.seconds(COMPUTING)["allgather"]
    machine = replace(COMPUTING, nvlink=1.0, link_reached=1.0)
    assert given.seconds(machine, device="cuda")["allgather"] <= 1.01 * kernels


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_kernels_on_streams(ranks: int, *, backward: bool) -> None:
    """Both ways compute the same pairs."""
    given = replace(work(16 * ranks, ranks), backward=backward)
    seconds = given.seconds_on_streams(COMPUTING, on_device=True)
    assert seconds["together"] == pytest.approx(seconds["pipeline"])
    assert seconds["pipeline"] == pytest.approx(
        given.seconds(COMPUTING, device="cuda")["allgather"]
    )


def test_all_peers_at_once_hide_transfers_behind_own_keys_only() -> None:
    plain = work(64, 4, mask=NO_MASK)
    machine = replace(COMPUTING, nvlink=0.25, link_reached=1.0)
    shard = 2 * 4 * 16 * (3 + 5) * 4 / 0.25  # seconds of its transfer
    kernel = 2 * 2 * 4 * (3 + 5) * 16 * 16  # seconds of a rank's keys
    seconds = plain.seconds_on_streams(machine, on_device=True)
    assert shard < kernel < 3 * shard
    assert seconds["pipeline"] == pytest.approx(4 * kernel)
    assert seconds["together"] == pytest.approx(3 * shard + 3 * kernel)


def test_what_the_page_on_devices_says_of_eight_gpus() -> None:
    layout = head_tail(32768, 8)
    llama = AttentionWork(1, 32, 8, 128, 128, "bfloat16", 2, layout, layout, (CAUSAL,))
    seconds = llama.seconds_on_streams(MACHINES["h100"])
    assert {way: round(each * 1e3, 2) for way, each in seconds.items()} == {
        "pipeline": 2.22,
        "together": 1.9,
    }
    # For short sequences, the host's time counts.
    short = replace(llama, queries=head_tail(2048, 8), keys=head_tail(2048, 8), backward=True)
    whole, device = (short.seconds_on_streams(MACHINES["h100"], on_device=d) for d in (False, True))
    assert whole["together"] < 0.7 * whole["pipeline"]
    assert device["together"] > device["pipeline"]
