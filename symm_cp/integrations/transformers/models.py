"""Makes models attend with symm_cp while `context_parallel(model=...)` uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn
from transformers import PreTrainedConfig

from symm_cp.context_parallel.inspectors import modules_of
from symm_cp.integrations.transformers.attention import NAME
from symm_cp.integrations.transformers.in_use import hold
from symm_cp.integrations.transformers.limits import PASSED
from symm_cp.integrations.transformers.masks import note_positions
from symm_cp.integrations.transformers.positions import use_longest_position
from symm_cp.integrations.transformers.recurrent import use_sequence_before
from symm_cp.integrations.transformers.tables import use_positions
from symm_cp.integrations.transformers.towers import makes_own_sequence

_CHOSEN = "_attn_implementation_internal"  # what `_attn_implementation` sets in sub-configurations


def _configurations(parts: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Returns the configurations of modules, with all sub-configurations."""
    found: dict[int, PreTrainedConfig] = {}
    pending = {id(config): config for part in parts if (config := part.__dict__.get("config"))}
    while pending:
        key, config = pending.popitem()
        if isinstance(config, PreTrainedConfig) and key not in found:
            found[key] = config
            inner = (getattr(config, name, None) for name in config.sub_configs)
            pending |= {id(each): each for each in inner}
    return list(found.values())


@contextmanager
def attending(models: Sequence[nn.Module]) -> Iterator[list[nn.Module] | None]:
    """Makes models attend with symm_cp; yields the modules that must run in the `with` block.

    Yields None if no model is transformers'.
    """
    parts = modules_of(*models)
    configs = _configurations(parts)
    if not configs:
        yield None
        return
    # Modules that make sequences from images or sounds may run outside; running them within raises.
    towers = [part for part in parts if makes_own_sequence(part.__class__)]
    elsewhere = {inner for tower in towers for inner in tower.modules()}
    with ExitStack() as stack:
        for config in configs:
            hold(stack, config, _CHOSEN, NAME)
            hold(stack, config, PASSED, True)
        for prepare in (note_positions, use_longest_position, use_positions, use_sequence_before):
            prepare(stack, parts)
        yield [part for part in parts if part not in elsewhere]
