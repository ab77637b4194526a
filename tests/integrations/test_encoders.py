"""Encoders and encoder-decoders of transformers: as in one process, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive, in_turns, pairs
from tests.integrations.common import (
    BALANCERS,
    Client,
    Result,
    assert_same,
    in_one_process,
    summed_grads,
    target_loss,
)
from tests.integrations.encoders import (
    ENCODERS,
    SEQ2SEQ,
    WHISPER,
    check_encoder,
    masked_batch,
    pair_batch,
    seen_batch,
)

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
@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [*pairs(ENCODERS, (2, 4), LAYOUTS), ("bert", 1, "HeadTail"), ("modernbert", 1, "HeadTail")],
)
def test_encoders(ranks: Ranks, name: str, world_size: int, layout: str) -> None:
    ranks.run(world_size, encodes, name, [layout], 24)


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
@pytest.mark.ranks(2)
def test_caches_do_no_harm(group: dist.ProcessGroup) -> None:
    """A model in training makes a cache for itself unless it is told not to."""
    batch = pair_batch(24, 16, padding=True)
    for name in ("t5", "bart"):
        check_encoder(group, replace(SEQ2SEQ[name], call={}), batch, "HeadTail")


LENGTHS = [(24, 16), (16, 24), (16, 16), (27, 13)]  # of the encoder's and the decoder's sequence


@exhaustive
@pytest.mark.parametrize(
    ("name", "world_size", "layout", "lengths"),
    [
        *pairs(["t5", "bart"], (2, 4), LAYOUTS, LENGTHS),
        *(
            (name, *how)
            for name, how in in_turns(
                [name for name in SEQ2SEQ if name not in ("t5", "bart")],
                [(2, "HeadTail", LENGTHS[0]), (3, "Sequential", LENGTHS[1])],
            )
        ),
        ("t5", 1, "HeadTail", LENGTHS[0]),
    ],
)
def test_encoders_with_decoders(
    ranks: Ranks, name: str, world_size: int, layout: str, lengths: tuple[int, int]
) -> None:
    ranks.run(world_size, translates, name, [layout], [lengths])


def transcribes(
    group: dist.ProcessGroup,
    layout: str,
    padding: bool,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """Runs Whisper's encoder on whole inputs, shards its outputs, and compares all gradients."""
    mesh, W, client = mesh_of(group), group.size(), WHISPER
    features = torch.randn(2, 6, 80, dtype=torch.float64)
    other = masked_batch(24, padding=padding)
    batch = {"decoder_input_ids": other["input_ids"], "labels": other["labels"]}
    if padding:
        batch["decoder_attention_mask"] = other["attention_mask"]
    expected = in_one_process(client, {**batch, "input_features": features}, shift=False)

    model = client.make("sdpa")
    by = {length: BALANCERS[layout](length, W) for length in (24, 40)}
    batch["encoder_outputs"] = model.get_encoder()(features)
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, model=model, load_balancer=by)
    labels = local.pop("labels")
    with symm_cp.context_parallel(mesh, model=model, load_balancer=by):
        prepare(model)
        logits = model(**local, **client.call).logits
        loss = reduce_loss(target_loss(logits, labels))
    loss.backward()  # no activation is recomputed: outside, as the encoder ran
    whole = symm_cp.context_parallel_unshard(mesh, [logits.detach()], [1], by[24])[0]
    actual = Result(loss.detach(), whole, summed_grads(group, model))
    assert_same(actual, expected, seen_batch(batch), client.tolerance)
    if W > 1:
        with (
            pytest.raises(NotImplementedError, match="WhisperEncoder has input 'input_features'"),
            symm_cp.context_parallel(mesh, model=model, load_balancer=by),
        ):
            model(input_features=features, decoder_input_ids=local["decoder_input_ids"])
        del local["decoder_position_ids"]
        with (
            pytest.raises(NotImplementedError, match="WhisperDecoder was called without position"),
            symm_cp.context_parallel(mesh, model=model, load_balancer=by),
        ):
            model(**local, **client.call)


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "layout", "padding"),
    [*pairs((2, 4), LAYOUTS, (False, True)), (1, "HeadTail", True)],
)
def test_whisper(ranks: Ranks, world_size: int, layout: str, padding: bool) -> None:
    ranks.run(world_size, transcribes, layout, padding)


# Refused clients, and a pattern of each refusal's message; test_decoders.py has unknown families.
REFUSED: list[tuple[Client, str]] = [
    (Client("Bert", head="ForSequenceClassification"), "BertForSequenceClassification: it reads"),
    (Client("Bert", head="ForQuestionAnswering"), "start_positions: the loss has a softmax"),
    (Client("Bert", head="Model"), "BertModel has a pooled result .*add_pooling_layer=False"),
    (Client("CLIP", head="TextModel", config="TextConfig"), "CLIPText.* has a pooled result"),
    (Client("ViT", head="Model"), "ViTModel has input 'pixel_values'"),
]


@exhaustive
@pytest.mark.parametrize("index", range(len(REFUSED)))
@pytest.mark.ranks(2)
def test_what_is_not_supported_is_refused_by_name(group: dist.ProcessGroup, index: int) -> None:
    client, message = REFUSED[index]
    by = symm_cp.HeadTail(8 * group.size(), group.size())
    model = client.make("eager")
    ids = torch.randint(3, 61, (2, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
    if client.name == "ViT":
        batch = {"pixel_values": torch.zeros(1, 3, 224, 224, dtype=torch.float64)}
    if client.head == "ForQuestionAnswering":
        batch.update(start_positions=ids[:, 0], end_positions=ids[:, 1])
    with (
        pytest.raises(NotImplementedError, match=message),
        symm_cp.context_parallel(
            mesh_of(group), model=model, load_balancer=by, on_unfused="ignore"
        ),
    ):
        model(**batch)
    assert model.config._attn_implementation == "eager"


@pytest.mark.ranks(2)
def test_decoders_need_their_inputs(group: dist.ProcessGroup) -> None:
    model = SEQ2SEQ["t5"].make("sdpa")
    ids = torch.randint(3, 61, (2, 8))
    by = symm_cp.HeadTail(8 * group.size(), group.size())
    with (
        pytest.raises(NotImplementedError, match="T5ForConditionalGeneration was called without d"),
        symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=by),
    ):
        model(input_ids=ids, labels=ids)
    expected = SEQ2SEQ["t5"].make("eager")(input_ids=ids, decoder_input_ids=ids).logits
    outside = model(input_ids=ids, decoder_input_ids=ids).logits  # restored
    torch.testing.assert_close(outside, expected, rtol=1e-5, atol=1e-5)
    assert all("compute_bias" not in vars(part) for part in model.modules())


@exhaustive
@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.ranks(2)
def test_the_models_loss_with_checkpointing(group: dist.ProcessGroup, name: str) -> None:
    """Trains with the model's own loss and recomputed activations."""
    mesh, W, client = mesh_of(group), group.size(), SEQ2SEQ[name]
    batch = pair_batch(8 * W, 4 * W, padding=True)
    dense, model = (client.make(kind) for kind in ("eager", "sdpa"))
    for each in (dense, model):
        each.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model, dense):
        each.config.dropout = each.config.dropout_rate = 0.0
        for part in each.modules():
            if hasattr(part, "dropout") and isinstance(part.dropout, float):
                part.dropout = 0.0
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    expected = dense(**batch).loss
    expected.backward()
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, model=model)
    with symm_cp.context_parallel(mesh, model=model, load_balancer=reduce_loss.load_balancer):
        loss = reduce_loss(model(**local).loss)
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    grads = summed_grads(group, model)
    for key, parameter in dense.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-3, atol=1e-4, msg=key)


@exhaustive
@pytest.mark.ranks(2)
def test_t5_allocates_no_matrix_of_positions(group: dist.ProcessGroup) -> None:
    """No tensor is as large as the square of a part's length."""
    mesh, length = mesh_of(group), 512 * group.size()
    batch = pair_batch(length, length, padding=True)
    client = SEQ2SEQ["t5"]
    model = client.make("sdpa")
    local, _ = symm_cp.shard_batch(mesh, batch, model=model)
    local.pop("labels")
    largest = 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for made in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(made, torch.Tensor):
                    largest = max(largest, made.untyped_storage().nbytes() // made.itemsize)
            return result

    with symm_cp.context_parallel(mesh, model=model), Watching():
        model(**local, **client.call)
    assert largest < 512 * 512, largest
