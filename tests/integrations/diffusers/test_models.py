"""Transformers of diffusers over ranks, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, pairs

NAMES = (
    *("flux", "flux2", "wan", "wan by position", "wan from image", "chronoedit"),
    *("qwen", "qwen with padding", "ltx", "minimax"),
)


def checks(
    group: dist.ProcessGroup, names: tuple[str, ...], degrees: dict[str, Any], **how: Any
) -> None:
    # Imported by the ranks: diffusers takes seconds.
    from tests.integrations.diffusers.common import CLIENTS, check_client, mesh_of_pairs

    mesh = None if ranks_of(degrees) == group.size() else mesh_of_pairs(degrees)
    for name in names:
        check_client(CLIENTS[name], degrees, mesh=mesh, **how)


def ranks_of(degrees: dict[str, Any]) -> int:
    return degrees.get("ring_degree", 1) * degrees.get("ulysses_degree", 1)


DEGREES = {
    "ulysses 2": {"ulysses_degree": 2},
    "ring 2 and ulysses 2": {"ring_degree": 2, "ulysses_degree": 2},
}


@exhaustive
@pytest.mark.parametrize(("way", "name", "world_size"), pairs(("ring", "ulysses"), NAMES, (2, 4)))
def test_one_way(ranks: Ranks, way: str, name: str, world_size: int) -> None:
    ranks.run(4, checks, (name,), {f"{way}_degree": world_size})


# The numbers of ranks divide neither 9 positions of text nor 15 of image.
@exhaustive
@pytest.mark.parametrize(("way", "name", "world_size"), pairs(("ring", "ulysses"), NAMES, (4, 2)))
def test_any_length(ranks: Ranks, way: str, name: str, world_size: int) -> None:
    degrees = {f"{way}_degree": world_size, f"{way}_anything": True}
    ranks.run(4, checks, (name,), degrees, lengths=(9, 15))


@exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_both_ways(ranks: Ranks, name: str) -> None:
    ranks.run(4, checks, (name,), DEGREES["ring 2 and ulysses 2"])


@exhaustive
def test_heads_that_ranks_do_not_divide(ranks: Ranks) -> None:
    ranks.run(4, checks, ("flux of 3 heads",), DEGREES["ulysses 2"])


def infers(group: dist.ProcessGroup, degrees: dict[str, Any], **how: Any) -> None:
    from tests.integrations.diffusers.common import CLIENTS, check_inference

    check_inference(CLIENTS["helios"], degrees, **how)


@exhaustive
@pytest.mark.parametrize(
    ("degrees", "lengths"),
    [
        (DEGREES["ring 2 and ulysses 2"], (8, 16)),
        ({"ring_degree": 2, "ring_anything": True}, (9, 15)),
    ],
)
def test_inference_only(ranks: Ranks, degrees: dict[str, Any], lengths: tuple[int, int]) -> None:
    """The model has 40 layers, as many as its plan names."""
    ranks.run(ranks_of(degrees), infers, degrees, lengths=lengths)
