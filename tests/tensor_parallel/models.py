"""Small models of transformers, with random weights, for the tests of plans and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 67  # no world size but 1 divides it

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# "eager" computes in float64, too.
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}

#: By name: the prefix of the classes of transformers, and options of the config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tied llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "sliding_window": 5}),
    "gemma3": ("Gemma3Text", {"tie_word_embeddings": True, "sliding_window": 5}),
    "mixtral": ("Mixtral", _EXPERTS),
    # Its eager experts cannot index experts of other ranks.
    "gpt_oss": (
        "GptOss",
        {**_EXPERTS, "experts_implementation": "grouped_mm", "sliding_window": 5},
    ),
    "phi3": ("Phi3", {}),
}


def config_of(family: str, **changes: Any) -> Any:
    import transformers

    prefix, options = FAMILIES[family]
    return getattr(transformers, f"{prefix}Config")(**{**_SIZES, **options, **changes})


def built(family: str, **changes: Any) -> nn.Module:
    """A model as transformers builds it, in float64 if it can be."""
    import transformers

    kind = FAMILIES[family][0].removesuffix("Text")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_of(family, **changes))
    return model.to(torch.float32 if family == "gpt_oss" else torch.float64)


def model_of(family: str, **changes: Any) -> nn.Module:
    """A model with random weights."""
    with torch.random.fork_rng(), torch.no_grad():  # one rank may be alone in making a model
        model = built(family, **changes)
        for parameter in model.parameters():  # norms and biases, too, get random values
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def save(family: str, folder: str, **changes: Any) -> None:
    model_of(family, **changes).save_pretrained(folder)


def tokens_of(model: nn.Module, length: int = 12) -> torch.Tensor:
    """Two sequences of token ids."""
    return torch.randint(1, model.config.vocab_size, (2, length))
