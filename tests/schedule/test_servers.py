"""Predictions for servers with several sockets."""

from __future__ import annotations

import pytest

from symm_cp.schedule.servers import (
    SERVERS,
    Server,
    Spread,
    all_gather,
    all_reduce,
    decode,
    gather_matmul,
)

MIB = 1 << 20
#: Round figures: a core moves 10 GB/s, a socket's memory 100, a link 25; nothing else takes time.
ROUND = Server(
    "round", 2, 10, 1e12, 10e9, 100e9, 25e9, reached=1.0, signal_seconds=0.0, call_seconds=0.0
)


def test_what_a_rank_gets() -> None:
    two, four = Spread(ROUND, 2, 4), Spread(ROUND, 4, 10)
    assert (two.sockets, two.each, two.busy, two.rate, two.link) == (2, 1, 4, 40e9, 25e9)
    # Twice as many threads as cores: half of the socket's memory and link for each rank.
    assert (four.each, four.busy, four.rate, four.link) == (2, 5, 50e9, 12.5e9)
    assert [four.far(0, other) for other in range(4)] == [False, False, True, True]
    assert Spread(ROUND, 1, 4).sockets == 1
    with pytest.raises(ValueError, match="3 ranks must divide into 2 sockets"):
        Spread(ROUND, 3, 4)


def test_an_all_reduce_of_two_ranks_by_hand() -> None:
    """One piece: each rank publishes a half, adds two halves, pulls a half, copies its own."""
    half = 128 * 1024
    wanted = 2 * half / 40e9  # copy to the slot
    wanted += max(3 * half / 40e9, half / 25e9)  # sum into the slot
    wanted += 2 * half / 40e9 + max(2 * half / 40e9, half / 25e9)  # copies to the result
    assert all_reduce(Spread(ROUND, 2, 4), 2 * half) == pytest.approx(wanted)


def test_a_slow_link_makes_sums_by_socket_faster() -> None:
    """A link as fast as memory makes them slower, as they move more: see `kLeastOnSocket`."""
    slow, fast = (Server("", 2, 32, 1e12, 10e9, 400e9, link) for link in (20e9, 400e9))
    for ranks, server, faster in ((8, slow, True), (8, fast, False), (4, fast, False)):
        spread = Spread(server, ranks, 8)
        flat, by_socket = (all_reduce(spread, 8 * MIB, by_socket=way) for way in (False, True))
        assert (by_socket < flat) is faster


def test_an_all_gather_by_hand() -> None:
    """Each of four ranks publishes its bytes, and copies all ranks', half of them over the link."""
    spread, one = Spread(ROUND, 4, 4), 128 * 1024
    publish, copies = 2 * one / 40e9, 2 * 4 * one / 40e9
    assert all_gather(spread, one) == pytest.approx(publish + max(copies, 2 * one / 12.5e9))
    fetch = max(2 * one / 40e9, one / 12.5e9)
    by_socket = all_gather(spread, one, by_socket=True)
    assert by_socket == pytest.approx(publish + fetch + copies)


def test_gathers_by_socket_rarely_pay() -> None:
    """So the library has no gathers by socket; benchmarks/README.md has these figures."""

    def ratio(name: str, on_socket: int) -> float:
        spread = Spread(SERVERS[name], 2 * on_socket, 16)
        direct, by_socket = (all_gather(spread, 8 * MIB, by_socket=way) for way in (False, True))
        return round(by_socket / direct, 2)

    found = {name: [ratio(name, n) for n in (2, 4, 8)] for name in ("xeon6", "epyc9005", "grace")}
    assert found == {
        "xeon6": [1.41, 0.96, 0.82],
        "epyc9005": [1.39, 1.14, 1.02],
        "grace": [1.27, 1.14, 1.07],
    }


@pytest.mark.parametrize("server", SERVERS.values(), ids=list(SERVERS))
def test_predictions_of_servers_are_within_what_their_parts_allow(server: Server) -> None:
    for ranks in (2, 4):
        spread = Spread(server, ranks, 32)
        nbytes = 32 * MIB
        # Each rank reads its tensor and writes the result.
        least = 2 * nbytes / (spread.busy * server.core_rate)
        assert all_reduce(spread, nbytes) > least
        assert all_reduce(spread, 2 * nbytes) > 1.8 * all_reduce(spread, nbytes)
        shape = 4096 // ranks, 4096, 4096
        computing = 2.0 * 4096**3 / spread.flops
        assert (
            computing < gather_matmul(spread, *shape) < gather_matmul(spread, *shape, fused=False)
        )
        one, all_ranks = (decode(each, 8e9, 32, 4096) for each in (Spread(server, 1, 32), spread))
        # Two sockets read weights twice as fast as one; ranks of one socket share its memory.
        assert 0.9 * server.sockets < one / all_ranks <= server.sockets
