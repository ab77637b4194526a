"""Encoders and encoder-decoders of transformers: small configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.common import (
    BALANCERS,
    IGNORED,
    VOCABULARY,
    Batch,
    Client,
    Result,
    assert_same,
    in_one_process,
    under_context_parallel,
)

MASKED = "ForMaskedLM"
GENERATES = "ForConditionalGeneration"
BART = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    # Few buckets: distances at these lengths use all of them, and many share the last one.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
MODERN = {f"{name}_token_id": 1 for name in ("cls", "sep")}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
TOKENS = "ForTokenClassification"

ENCODERS = {
    "bert": Client("Bert", head=MASKED, call={}),
    "modernbert": Client(
        "ModernBert",
        {**MODERN, "num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 10},
        head=MASKED,
        call={},
    ),
    "roberta": Client("Roberta", head=MASKED, call={}),
    "camembert": Client("Camembert", head=MASKED, call={}),
    "ernie": Client("Ernie", head=MASKED, call={}),
    "xlm-roberta": Client("XLMRoberta", head=MASKED, call={}),
    "distilbert": Client(
        "DistilBert",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        head=MASKED,
        call={},
    ),
    "electra": Client("Electra", {"embedding_size": 16}, head=MASKED, call={}),
    "albert": Client("Albert", {"embedding_size": 16}, head=MASKED, call={}),
    "bert-tokens": Client(
        "Bert", {"num_labels": VOCABULARY}, head="ForTokenClassification", call={}
    ),
}
SEQ2SEQ = {
    "t5": Client("T5", T5, head=GENERATES),
    "mt5": Client("MT5", T5, head=GENERATES),
    "umt5": Client("UMT5", T5, head=GENERATES),
    "bart": Client("Bart", BART, head=GENERATES),
    "mbart": Client("MBart", BART, head=GENERATES),
    "marian": Client("Marian", {**BART, "decoder_start_token_id": 0}, head="MTModel"),
    "pegasus": Client("Pegasus", BART, head=GENERATES),
}
WHISPER = Client(
    "Whisper",
    {
        **BART,
        "num_mel_bins": 6,
        "max_source_positions": 40,
        "max_target_positions": 64,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": None,
    },
    head=GENERATES,
)


def masked_batch(length: int, *, padding: bool, samples: int = 2) -> Batch:
    """A whole batch of an encoder: a fifth of the tokens are labels, of two types."""
    ids = torch.randint(3, VOCABULARY, (samples, length))
    mask = torch.ones_like(ids)
    if padding:
        for sample in range(samples):
            mask[sample, length - (sample + 1) * length // (2 * samples + 1) :] = 0
    ids[mask == 0] = 0
    labels = ids.masked_fill((torch.rand(ids.shape) > 0.3) | (mask == 0), IGNORED)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def pair_batch(source: int, target: int, *, padding: bool) -> Batch:
    """A whole batch of an encoder and a decoder, of different lengths."""
    one, other = (masked_batch(length, padding=padding) for length in (source, target))
    return {
        "input_ids": one["input_ids"],
        "attention_mask": one["attention_mask"],
        "decoder_input_ids": other["input_ids"],
        "decoder_attention_mask": other["attention_mask"],
        "labels": other["labels"],
    }


def on_shards(
    group: dist.ProcessGroup, client: Client, batch: Batch, layout: str, **how: Any
) -> Result:
    """Runs a client on this rank's part of a whole batch of one or two lengths."""
    lengths = {tensor.shape[1] for tensor in batch.values()}
    by = {length: BALANCERS[layout](length, group.size()) for length in lengths}
    how = {"implementation": "sdpa", "shift": None, **how}
    return under_context_parallel(group, client, batch, balancer=by, **how)


def seen_batch(batch: Batch) -> Batch:
    """Returns the mask of the positions whose logits are compared."""
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return {} if mask is None else {"attention_mask": mask}


def check_encoder(
    group: dist.ProcessGroup, client: Client, batch: Batch, layout: str, **how: Any
) -> None:
    """Raises `AssertionError` unless a client computes on shards what it does in one process."""
    expected = in_one_process(client, batch, shift=False)
    actual = on_shards(group, client, batch, layout, **how)
    assert_same(actual, expected, seen_batch(batch), client.tolerance)
