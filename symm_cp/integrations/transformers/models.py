"""Models that attend with symm_cp while they are in use by `context_parallel(model=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from symm_cp.context_parallel.flex_hook import current_region
from symm_cp.context_parallel.model_limits import makes_own_sequence
from symm_cp.integrations.transformers.attention import NAME
from symm_cp.integrations.transformers.in_use import InUse
from symm_cp.integrations.transformers.positions import by_longest_position
from symm_cp.integrations.transformers.recurrent import by_sequence_before
from symm_cp.integrations.transformers.tables import by_position_in_sequence

_OP = "context_parallel"
_CHOSEN = "_attn_implementation_internal"  # what `_attn_implementation` sets in sub-configurations


def modules_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Returns all modules of a model or of several; raises `TypeError` for anything else."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    for each in models:
        if not isinstance(each, nn.Module):
            raise TypeError(f"{_OP}: model is a {type(each).__name__}, must be a module or several")
    found = {id(part): part for each in models for part in each.modules()}
    return list(found.values())


def _configurations(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Returns the configurations of modules, and those that these contain."""
    found: dict[int, PreTrainedConfig] = {}
    pending = [getattr(module, "config", None) for module in modules]
    while pending:
        config = pending.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


_configs, _generators = InUse(), InUse()


def _refusing(module: nn.Module) -> Any:
    """Returns a `generate` that raises within a region."""
    generate = module.generate

    def refused(*args: Any, **kwargs: Any) -> Any:
        within = current_region()
        if within is not None and within[0].world_size > 1:
            raise NotImplementedError(
                f"{_OP}: {type(module).__name__}.generate: each rank would continue its own part "
                "of the sequence, and a cache holds only this rank's keys. Generate outside of the "
                "context"
            )
        return generate(*args, **kwargs)

    return refused


@contextmanager
def attending(model: nn.Module | Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Within it, models attend with symm_cp; yields the modules that must run within it.

    Raises `ValueError` if none of them is a model of transformers, `NotImplementedError` for one
    that does not attend through transformers' `AttentionInterface`.
    """
    modules = modules_of(model)
    configs = _configurations(modules)
    if not configs:
        names = ", ".join(sorted({type(part).__name__ for part in modules[:1]}))
        raise ValueError(f"{_OP}: model={names} has no model of transformers in it")
    for module in modules:
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            raise NotImplementedError(
                f"{_OP}: {type(module).__name__} does not attend through transformers' "
                'AttentionInterface, so attn_implementation="symm_cp" has no effect on it. If it '
                "calls F.scaled_dot_product_attention, leave out model="
            )
    # What makes sequences of images or sounds may run outside: it is refused when it runs within.
    apart = (part for part in modules if makes_own_sequence(part))
    elsewhere = {id(inner) for part in apart for inner in part.modules()}
    generators = [module for module in modules if callable(getattr(module, "generate", None))]
    for config in configs:
        _configs.acquire(config, _CHOSEN, NAME)
    for module in generators:
        _generators.acquire(module, "generate", _refusing(module))
    try:
        with (
            by_longest_position(modules),
            by_position_in_sequence(modules),
            by_sequence_before(modules),
        ):
            yield [module for module in modules if id(module) not in elsewhere]
    finally:
        for module in generators:
            _generators.release(module, "generate")
        for config in configs:
            _configs.release(config, _CHOSEN)
