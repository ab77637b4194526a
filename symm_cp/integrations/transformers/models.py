"""Makes models attend with symm_cp while `context_parallel(model=...)` uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from symm_cp.context_parallel.inspectors import Known
from symm_cp.integrations.transformers.attention import NAME
from symm_cp.integrations.transformers.in_use import hold
from symm_cp.integrations.transformers.limits import PASSED
from symm_cp.integrations.transformers.masks import note_positions
from symm_cp.integrations.transformers.positions import use_longest_position
from symm_cp.integrations.transformers.recurrent import use_sequence_before
from symm_cp.integrations.transformers.tables import use_positions
from symm_cp.integrations.transformers.towers import makes_own_sequence

_OP = "context_parallel"
_CHOSEN = "_attn_implementation_internal"  # what `_attn_implementation` sets in sub-configurations


def _configurations(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Returns the configurations of modules, with all sub-configurations."""
    found: dict[int, PreTrainedConfig] = {}
    pending = {id(module.config): module.config for module in modules}
    while pending:
        key, config = pending.popitem()
        if isinstance(config, PreTrainedConfig) and key not in found:
            found[key] = config
            inner = (getattr(config, name, None) for name in config.sub_configs)
            pending |= {id(each): each for each in inner}
    return list(found.values())


def _has_config(module: nn.Module) -> bool:
    return isinstance(getattr(module, "config", None), PreTrainedConfig)


@contextmanager
def attending(known: Sequence[Known]) -> Iterator[list[nn.Module]]:
    """Makes models attend with symm_cp; yields the modules that must run in the `with` block.

    Raises `ValueError` if no model is transformers'.
    """

    def several(is_chosen: Callable[[nn.Module], Any]) -> list[nn.Module]:
        found = {id(part): part for each in known for part in each.select(is_chosen)}
        return list(found.values())

    select = known[0].select if len(known) == 1 else several

    configs = _configurations(select(_has_config))
    if not configs:
        names = ", ".join(type(each.parts()[0]).__name__ for each in known[:1])
        raise ValueError(f"{_OP}: model={names} has no model of transformers in it")
    # Modules that make sequences from images or sounds may run outside; running them within raises.
    elsewhere = {id(inner) for part in select(makes_own_sequence) for inner in part.modules()}
    with ExitStack() as stack:
        for config in configs:
            hold(stack, config, _CHOSEN, NAME)
            hold(stack, config, PASSED, True)
        for prepare in (note_positions, use_longest_position, use_positions, use_sequence_before):
            prepare(stack, select)
        parts = {id(part): part for each in known for part in each.parts()}
        yield [part for key, part in parts.items() if key not in elsewhere]
