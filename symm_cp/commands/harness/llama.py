"""A model of transformers with random weights, and its parts on the ranks of a group.

The model is split by its own tensor-parallel plan: each rank has a part of the output features of
`colwise` linears, and a part of the input features of `rowwise` linears, whose products are summed
over the ranks. `Exchanges` say how.
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

INSTALL = "pip install 'symm_cp[transformers]'"

Exchange: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exchanges:
    """How the ranks of a group exchange activations between matmuls.

    `all_reduce` sums a tensor over the ranks, and may do so in place. `all_gather` concatenates
    their last dimensions.
    """

    all_reduce: Exchange
    all_gather: Exchange


def load_transformers() -> Any:
    """Returns the package; raises `ValueError` without it."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--decode requires the package transformers: {INSTALL}")
    return importlib.import_module("transformers")


def check_styles(styles: set[str]) -> None:
    """Raises `ValueError` for a style of a tensor-parallel plan that `Parts` does not know."""
    if unknown := styles - _STYLES.keys() - _WHOLE:
        raise ValueError(
            f"--decode does not know the style {min(unknown)!r} of the model's tensor-parallel plan"
        )


def make(config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """Returns the whole model, with the same random weights on every rank."""
    torch.manual_seed(seed)
    model = load_transformers().AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def cache_argument(model: nn.Module) -> str:
    """Returns the name of the cache argument, which transformers 5.24 changed."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def static_cache(model: nn.Module, length: int) -> Any:
    """Returns an empty cache for keys and values of `length` tokens, whose size never changes."""
    return load_transformers().StaticCache(config=model.config, max_cache_len=length)


def next_logits(
    model: nn.Module, run: Callable[..., Any], cache: Any, ids: torch.Tensor, position: int
) -> torch.Tensor:
    """Returns the logits after the last of `ids` (B, S), which begin at `position` in the cache.

    `run` is the model, or its compiled form.
    """
    positions = torch.arange(position, position + ids.shape[1])[None]
    arguments = {cache_argument(model): cache}
    out = run(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **arguments)
    return out.logits[:, -1]


def sharing_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of a model that shares its parameters but has its own modules."""
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
            check_styles({style})
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

    def lend_to(self, split: nn.Module) -> None:
        """Makes a model that `apply` has split use these tensors as its weights.

        Caches of hundreds of MB keep some weights from one variant to the next, and speed that up.
        """
        for name, part in self._modules.items():
            weight = split.get_submodule(name).weight
            if not torch.equal(weight.to_local(), part.weight):
                raise ValueError(f"{name}: the parts of the two models differ")
            weight._local_tensor = part.weight.detach()


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
        """Looks up this rank's part of the vocabulary, and zeros for other tokens."""
        own = tokens - self._first
        outside = (own < 0) | (own >= len(self.weight))
        vectors = F.embedding(own.masked_fill(outside, 0), self.weight)
        return self.exchanges.all_reduce(vectors.masked_fill(outside[..., None], 0))


#: Styles of modules that every rank has whole.
_WHOLE = {"replicate", "replicated_with_grad_allreduce"}
_STYLES: Mapping[str, Callable[[Any, int, int], nn.Module]] = {
    "colwise": lambda *args: _Colwise(0, *args),
    "rowwise": lambda *args: _Summed(1, *args),
    "colwise_gather_output": lambda *args: _Gathered(0, *args),
    "colwise_rep": lambda *args: _Gathered(0, *args),  # its name in transformers 4
    "embedding_rowwise": lambda *args: _Embedding(0, *args),
}
