"""Encoders and encoder-decoders of transformers: as in one process, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.exhaustive import exhaustive
from tests.integrations.common import BALANCERS
from tests.integrations.encoders import ENCODERS, SEQ2SEQ, check_encoder, masked_batch, pair_batch
from tests.pool import Ranks

LAYOUTS = list(BALANCERS)


def encodes(group: dist.ProcessGroup, name: str, layouts: list[str], length: int) -> None:
    for layout in layouts:
        for padding in (True, False):
            batch = masked_batch(length, padding=padding)
            if name == "bert":
                types = (torch.arange(length) > length // 3).long()
                batch["token_type_ids"] = types.expand(2, -1).contiguous()
            check_encoder(group, ENCODERS[name], batch, layout)


def test_bert(ranks: Ranks) -> None:
    ranks.run(2, encodes, "bert", ["HeadTail"], 24)


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(ranks: Ranks, world_size: int, name: str) -> None:
    ranks.run(world_size, encodes, name, LAYOUTS, 24)


@exhaustive
@pytest.mark.parametrize("name", ["bert", "modernbert", "roberta"])
def test_lengths_that_ranks_do_not_divide(ranks: Ranks, name: str) -> None:
    ranks.run(4, encodes, name, LAYOUTS, 27)


def translates(
    group: dist.ProcessGroup, name: str, layouts: list[str], lengths: list[tuple[int, int]]
) -> None:
    for layout in layouts:
        for source, target in lengths:
            for padding in (True, False):
                batch = pair_batch(source, target, padding=padding)
                check_encoder(group, SEQ2SEQ[name], batch, layout)


def test_t5(ranks: Ranks) -> None:
    ranks.run(2, translates, "t5", ["HeadTail"], [(24, 16)])


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoders_with_decoders(ranks: Ranks, world_size: int, name: str) -> None:
    lengths = [(24, 16), (16, 24), (16, 16), (27, 13)]
    ranks.run(world_size, translates, name, LAYOUTS, lengths[: 4 if name == "t5" else 2])
