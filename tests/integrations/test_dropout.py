"""Models of transformers that train with dropout, and leave out layers.

Attention drops the same weights, and models the same layers, as on one rank. Hidden dropout and the
noise of routers are each rank's own: they repeat in checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, in_turns
from tests.integrations.common import (
    BALANCERS,
    Batch,
    Client,
    Result,
    WideTensors,
    assert_same,
    in_one_process,
    recomputing,
    under_context_parallel,
)
from tests.integrations.decoders import CLIENTS, STRANGERS
from tests.integrations.encoders import (
    BART,
    ENCODERS,
    SEQ2SEQ,
    masked_batch,
    on_shards,
    pair_batch,
    seen_batch,
)
from tests.integrations.test_compiled_encoders import compiled
from tests.integrations.test_decoders import LENGTH, batch_of

RATE, SEED = 0.1, 8
# Each family's name for the probability of attention's dropout.
FROM_CONFIG = {
    "seed-oss": {"attention_dropout": RATE, "residual_dropout": 0.0},
    "gpt2": {"attn_pdrop": RATE, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phimoe": {"attention_dropout": RATE, "hidden_dropout": 0.0, "router_jitter_noise": 0.0},
    "mixtral": {"attention_dropout": RATE, "router_jitter_noise": 0.0},
}
LAYERS_LEFT_OUT = {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}
OF_ENCODERS = {
    "bart": BART | {"dropout": 0.0, "attention_dropout": RATE} | LAYERS_LEFT_OUT,
    "mbart": BART | {"dropout": 0.0, "attention_dropout": RATE} | LAYERS_LEFT_OUT,
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": RATE},
    "electra": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": RATE},
}


def switched_on(model: nn.Module, rate: float = RATE) -> None:
    """Sets every probability of a model, whatever its configuration calls it."""
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = rate
        for name, value in list(vars(part).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, rate)


def training(*prepare: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Returns a function that prepares a model for training and then sets the seed."""

    def prepared(model: nn.Module) -> None:
        for each in prepare:
            each(model)
        model.train()
        torch.manual_seed(SEED)

    return prepared


def decodes(
    group: dist.ProcessGroup,
    client: Client,
    kind: str,
    layout: str,
    *prepare: Callable[[nn.Module], None],
) -> Result:
    torch.manual_seed(SEED)
    batch = batch_of(kind)
    balancer = BALANCERS[layout](LENGTH, group.size())
    before = training(*prepare)
    with WideTensors():
        return under_context_parallel(group, client, batch, balancer=balancer, prepare=before)


def encoder_batch(name: str, *, padding: bool = True) -> Batch:
    # Unequal parts: ranks draw for different numbers of positions.
    torch.manual_seed(SEED)
    if name in SEQ2SEQ:
        return pair_batch(27, 15, padding=padding)
    return masked_batch(27, padding=padding)


def encodes(
    group: dist.ProcessGroup,
    name: str,
    client: Client,
    layout: str,
    *prepare: Callable[[nn.Module], None],
) -> Result:
    return on_shards(group, client, encoder_batch(name), layout, prepare=training(*prepare))


def same_batch(kind: str) -> Batch:
    torch.manual_seed(SEED)
    return batch_of(kind)


def check_decoder(
    ranks: Ranks,
    client: Client,
    kind: str,
    places: tuple[tuple[int, str], ...],
    *prepare: Callable[[nn.Module], None],
) -> None:
    (alone,) = ranks.run(1, decodes, client, kind, "HeadTail", *prepare)
    batch = same_batch(kind)
    off = (in_one_process(client, batch).logits - alone.logits).abs().max()
    assert off > 0.02, "nothing was dropped"
    for world_size, layout in places:
        for spread in ranks.run(world_size, decodes, client, kind, layout, *prepare):
            assert_same(spread, alone, batch, client.tolerance)


def check_encoder(
    ranks: Ranks, name: str, client: Client, places: tuple[tuple[int, str], ...], *prepare
) -> None:
    (alone,) = ranks.run(1, encodes, name, client, "HeadTail", *prepare)
    batch = encoder_batch(name)
    off = (in_one_process(client, batch, shift=False).logits - alone.logits).abs().max()
    assert off > 0.02, "nothing was dropped"
    for world_size, layout in places:
        for spread in ranks.run(world_size, encodes, name, client, layout, *prepare):
            assert_same(spread, alone, seen_batch(batch), client.tolerance)


PLACES = ((2, "Sequential"), (4, "HeadTail"))


def configured(name: str) -> Client:
    return (CLIENTS | STRANGERS)[name].having(**FROM_CONFIG[name])


def test_seed_oss_and_bart(ranks: Ranks) -> None:
    check_decoder(ranks, configured("seed-oss"), "packed", ((2, "HeadTail"),))
    bart = SEQ2SEQ["bart"].having(**OF_ENCODERS["bart"])
    check_encoder(ranks, "bart", bart, ((2, "HeadTail"),))


@exhaustive
@pytest.mark.parametrize(
    ("name", "kind"), in_turns(FROM_CONFIG, ["no mask", "packed", "padded left", "padded right"])
)
def test_decoders_from_config(ranks: Ranks, name: str, kind: str) -> None:
    check_decoder(ranks, configured(name), kind, PLACES)


def check_repeated(alike: list[Result], again: list[Result], client: Client, batch: Batch) -> None:
    """All ranks' results, whose losses and gradients are sums over the ranks, are equal."""
    off = (in_one_process(client, batch, shift=False).logits - alike[0].logits).abs().max()
    assert off > 0.02, "nothing was dropped"
    for one, other in zip(again, alike, strict=True):
        assert_same(one, other, seen_batch(batch), client.tolerance)


@exhaustive
@pytest.mark.parametrize(("name", "kind"), in_turns(CLIENTS, ["packed", "padded left"]))
def test_all_probabilities_of_decoders(ranks: Ranks, name: str, kind: str) -> None:
    """Hidden dropout and the noise of routers repeat when activations are recomputed."""
    client, each = CLIENTS[name], (CLIENTS[name], kind, "HeadTail", switched_on)
    once, again = (ranks.run(2, decodes, *each, *more) for more in ((), (recomputing,)))
    check_repeated(once, again, client, same_batch(kind))


@exhaustive
@pytest.mark.parametrize("name", OF_ENCODERS)
def test_encoders_from_config(ranks: Ranks, name: str) -> None:
    client = (ENCODERS | SEQ2SEQ)[name].having(**OF_ENCODERS[name])
    check_encoder(ranks, name, client, PLACES)


@exhaustive
@pytest.mark.parametrize("name", ["bert", "bart"])
def test_all_probabilities_of_encoders(ranks: Ranks, name: str) -> None:
    client = (ENCODERS | SEQ2SEQ)[name]
    each = name, client, "HeadTail", switched_on
    once, again = (ranks.run(2, encodes, *each, *more) for more in ((), (recomputing,)))
    check_repeated(once, again, client, encoder_batch(name))


def compiles(layer: str, model: nn.Module) -> None:
    torch._dynamo.reset()
    compiled(layer)(model)


@exhaustive
@pytest.mark.parametrize("name", ["seed-oss", "gpt2"])
def test_recomputed_and_compiled(ranks: Ranks, name: str) -> None:
    layer = {"seed-oss": "SeedOssDecoderLayer", "gpt2": "GPT2Block"}[name]
    (alone,) = ranks.run(1, decodes, configured(name), "padded left", "HeadTail")
    batch = same_batch("padded left")
    for prepare in (recomputing, functools.partial(compiles, layer)):
        for spread in ranks.run(
            2, decodes, configured(name), "padded left", "HeadTail", prepare, timeout=600
        ):
            assert_same(spread, alone, batch, 1e-9)
