"""Load balancers for sequences of several lengths, such as an encoder's and its decoder's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from symm_cp.context_parallel.load_balancers import HeadTail, LoadBalancer

#: How sequences are spread: one load balancer, or a mapping from the length of each whole sequence
#: to its load balancer.
BalancersByLength = LoadBalancer | Mapping[int, LoadBalancer]
#: Or a function of the number of positions that this rank holds.
Balancers = BalancersByLength | Callable[[int], LoadBalancer]


def check_balancer(op: str, balancer: LoadBalancer, length: int, world_size: int) -> None:
    """Raises unless a load balancer fits this length and number of ranks."""
    if not isinstance(balancer, LoadBalancer):
        raise TypeError(
            f"{op}: the load_balancer of {length} positions is a {type(balancer).__name__}, must "
            "be a LoadBalancer"
        )
    if (balancer.seq_length, balancer.world_size) != (length, world_size):
        raise ValueError(
            f"{op}: {balancer} does not fit a sequence of {length} positions on {world_size} ranks"
        )


def known_balancers(
    op: str, load_balancer: Balancers | None, world_size: int
) -> tuple[LoadBalancer, ...]:
    """Returns the load balancers, in the order of their lengths; none for a function or None.

    Raises `ValueError` if a rank has equally many rows of two sequences: their parts would be
    indistinguishable.
    """
    if isinstance(load_balancer, LoadBalancer):
        return (load_balancer,)
    if load_balancer is None or not isinstance(load_balancer, Mapping):
        if load_balancer is not None and not callable(load_balancer):
            raise TypeError(
                f"{op}: load_balancer is a {type(load_balancer).__name__}, must be a LoadBalancer, "
                "a mapping of lengths to LoadBalancers, or a function that returns one"
            )
        return ()
    if not load_balancer:
        raise ValueError(f"{op}: load_balancer is an empty mapping")
    for length, balancer in load_balancer.items():
        check_balancer(op, balancer, length, world_size)
    balancers = tuple(load_balancer[length] for length in sorted(load_balancer))
    for one, other in itertools.combinations(balancers, 2):
        for rank in range(world_size):
            if (held := one.rows(rank)) == other.rows(rank):
                raise ValueError(
                    f"{op}: rank {rank} has {held} rows of {one} and of {other}, so it "
                    f"cannot tell their parts apart: pad the sequence of {one.seq_length} positions"
                    f" to {other.seq_length}"
                )
    return balancers


def balancer_for(
    op: str, load_balancer: Balancers | None, length: int, world_size: int
) -> LoadBalancer:
    """Returns the load balancer of a whole sequence, head-tail by default; refuses functions."""
    if isinstance(load_balancer, Mapping):
        if length not in load_balancer:
            raise ValueError(
                f"{op}: load_balancer has lengths {sorted(load_balancer)}, none of {length} "
                "positions"
            )
        return load_balancer[length]
    if load_balancer is not None and not isinstance(load_balancer, LoadBalancer):
        raise TypeError(
            f"{op}: load_balancer is a {type(load_balancer).__name__}, must be a LoadBalancer or a "
            "mapping of lengths to LoadBalancers to cut whole sequences"
        )
    balancer = load_balancer or HeadTail(length, world_size)
    check_balancer(op, balancer, length, world_size)
    return balancer
