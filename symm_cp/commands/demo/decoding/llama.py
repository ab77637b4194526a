"""A model of transformers with random weights, and its parts on the ranks of a group.

The model is split by its own tensor-parallel plan: `colwise` linears have a part of the output
features on each rank, `rowwise` linears a part of the input features, so that their products are
summed over the ranks. What sums them is given: see `variants.py`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from symm_cp.commands.demo.decoding.options import DecodeOptions

_HEAD_DIMS = (64, 32, 16, 8)
_HIDDEN_UNIT = 32  # the hidden features of a rank are a multiple of this
INSTALL = "pip install 'symm_cp[transformers]'"

Exchange: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exchanges:
    """What the ranks of a group do between matmuls.

    `all_reduce` sums a tensor over the ranks, and may do so in place. `all_gather` concatenates
    their last dimensions.
    """

    all_reduce: Exchange
    all_gather: Exchange


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--decode requires the package transformers: {INSTALL}")
    return importlib.import_module("transformers")


def config_of(options: DecodeOptions) -> Any:
    """Returns the model's configuration, as transformers has it.

    Raises `ValueError` without transformers, for a file that is none, and for sizes that the number
    of ranks does not divide.
    """
    transformers = _transformers()
    if options.config is None:
        config = _llama(transformers, options)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(str(options.config))
        except (OSError, ValueError) as error:
            raise ValueError(f"--config {options.config}: {error}") from error
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(
            f"--config {options.config}: transformers has no tensor-parallel plan for "
            f"{config.model_type!r}"
        )
    _check_styles(set(config.base_model_tp_plan.values()))
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % options.ranks != 0:
            raise ValueError(
                f"{name}={getattr(config, name)} is not divisible by --ranks {options.ranks}"
            )
    return config


def _check_styles(styles: set[str]) -> None:
    if unknown := styles - _STYLES.keys() - _WHOLE:
        raise ValueError(
            f"--decode does not know the style {min(unknown)!r} of the model's tensor-parallel plan"
        )


def _llama(transformers: Any, options: DecodeOptions) -> Any:
    dim, ranks = options.dim, options.ranks
    for head_dim in _HEAD_DIMS:
        if dim % (ranks * head_dim) == 0:
            break
    else:
        raise ValueError(
            f"--dim {dim} cannot be split into heads over {ranks} ranks: must be a multiple of "
            f"{ranks * _HEAD_DIMS[-1]}"
        )
    heads = dim // head_dim
    unit = _HIDDEN_UNIT * ranks
    return transformers.LlamaConfig(
        hidden_size=dim,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % (2 * ranks) == 0 else heads,
        intermediate_size=-(-8 * dim // (3 * unit)) * unit,
        vocab_size=-(-32000 // unit) * unit,
    )


def make(config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """Returns the whole model, with the same random weights on every rank."""
    torch.manual_seed(seed)
    model = _transformers().AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def cache_argument(model: nn.Module) -> str:
    """Returns the name of the argument for a cache: transformers 5.24 gave it another one."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def static_cache(model: nn.Module, length: int) -> Any:
    """Returns an empty cache for keys and values of `length` tokens, of one size in every step."""
    return _transformers().StaticCache(config=model.config, max_cache_len=length)


def sharing_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of a model that has the same parameters and other modules."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def plan_of(model: nn.Module) -> dict[str, str]:
    """Returns the style that the model's own plan gives each of its modules."""
    patterns = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style
        for pattern, style in model.tp_plan.items()
    }
    return {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


class Parts:
    """A rank's parts of a model's weights, which all variants share."""

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        self.model = model
        self._modules: dict[str, nn.Module] = {}
        for name, style in plan_of(model).items():
            _check_styles({style})
            if style not in _WHOLE:
                make = _STYLES[style]
                self._modules[name] = make(model.get_submodule(name), rank, world_size)

    def with_exchanges(self, exchanges: Exchanges) -> nn.Module:
        """Returns the model of this rank's parts, whose ranks exchange activations this way."""
        model = sharing_weights(self.model)
        for name, part in self._modules.items():
            own = sharing_weights(part)
            own.exchanges = exchanges  # type: ignore[assignment]
            model.set_submodule(name, own)
        return model


def _part(tensor: torch.Tensor, dim: int, rank: int, world_size: int) -> nn.Parameter:
    part = tensor.detach().chunk(world_size, dim)[rank].contiguous().clone()
    return nn.Parameter(part, requires_grad=tensor.requires_grad)


class _Part(nn.Module):
    """This rank's part of a module."""

    exchanges: Exchanges

    def __init__(self, dim: int, module: nn.Module, rank: int, world_size: int) -> None:
        super().__init__()
        if getattr(module, "bias", None) is not None:
            raise ValueError("--decode takes models without biases in the linears that are split")
        self.weight = _part(module.weight, dim, rank, world_size)


class _Colwise(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class _Gathered(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchanges.all_gather(F.linear(x, self.weight))


class _Summed(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchanges.all_reduce(F.linear(x, self.weight))


class _Embedding(_Part):
    def __init__(self, dim: int, module: nn.Module, rank: int, world_size: int) -> None:
        super().__init__(dim, module, rank, world_size)
        self._first = rank * len(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Looks up this rank's part of the vocabulary; the others give zeros."""
        own = tokens - self._first
        elsewhere = (own < 0) | (own >= len(self.weight))
        vectors = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.exchanges.all_reduce(vectors.masked_fill(elsewhere[..., None], 0))


#: Styles of modules that each rank has whole.
_WHOLE = {"replicate", "replicated_with_grad_allreduce"}
_STYLES: Mapping[str, Callable[[Any, int, int], nn.Module]] = {
    "colwise": lambda *args: _Colwise(0, *args),
    "rowwise": lambda *args: _Summed(1, *args),
    "colwise_gather_output": lambda *args: _Gathered(0, *args),
    "colwise_rep": lambda *args: _Gathered(0, *args),  # its name in transformers 4
    "embedding_rowwise": lambda *args: _Embedding(0, *args),
}
