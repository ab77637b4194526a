"""Layers of encoders and of their decoders under `torch.compile` within a context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.integrations.encoders import (
    ENCODERS,
    SEQ2SEQ,
    check_encoder,
    masked_batch,
    pair_batch,
)
from tests.integrations.test_compiled import at_most
from tests.integrations.test_encoders import transcribes

#: The classes of layers to compile, by model.
LAYERS = {
    "modernbert": ("ModernBertEncoderLayer",),
    "t5": ("T5Block",),
    "bart": ("BartEncoderLayer", "BartDecoderLayer"),
}
#: The fewest layers with one of each kind: ModernBERT's attend globally, then locally.
FEW = {
    "modernbert": {"num_hidden_layers": 2},
    "t5": {},  # only the first one has position biases
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
}


def compiled(*names: str) -> Callable[[nn.Module], None]:
    """Prepares a model: each layer of these classes is compiled, without a graph break."""

    def prepare(model: nn.Module) -> None:
        layers = [part for part in model.modules() if type(part).__name__ in names]
        assert {type(layer).__name__ for layer in layers} == set(names)
        for layer in layers:
            layer.compile(fullgraph=True, backend="aot_eager")

    return prepare


def layers_of_encoder(group: dist.ProcessGroup, name: str, layout: str, padding: bool) -> None:
    torch._dynamo.reset()
    client = (ENCODERS | SEQ2SEQ)[name].having(**FEW[name])
    batch = masked_batch(24, padding=padding)
    if name in SEQ2SEQ:
        batch = pair_batch(24, 16, padding=padding)
    with at_most(6):
        check_encoder(group, client, batch, layout, prepare=compiled(*LAYERS[name]))


@exhaustive
@pytest.mark.parametrize(
    ("name", "layout", "padding"),
    [
        ("modernbert", "Sequential", True),
        ("t5", "HeadTail", True),
        ("bart", "HeadTail", True),
    ],
)
def test_layers(ranks: Ranks, name: str, layout: str, padding: bool) -> None:
    ranks.run(2, layers_of_encoder, name, layout, padding, timeout=600)


def layers_of_whisper(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    with at_most(6):
        transcribes(group, "HeadTail", True, compiled("WhisperDecoderLayer"))


@exhaustive
def test_whispers_decoder(ranks: Ranks) -> None:
    ranks.run(2, layers_of_whisper, timeout=600)
