"""Replacements for functions of diffusers: `enable` installs them, `disable` removes them.

diffusers has no extension point for attention over several ranks. All its attention backends that
support several ranks call one function, by its global name in the module `attention_dispatch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers.hooks import context_parallel as hooks
from diffusers.models import attention_dispatch
from diffusers.models.modeling_utils import ModelMixin

from symm_cp.integrations.diffusers import attention, models, spread

_OP = "symm_cp.integrations.diffusers"
_KNOWN = "0.42"

# Maps diffusers' function to its replacement.
_Replacing = Callable[[Any], Any]


@dataclass(frozen=True)
class _Patch:
    """A function of diffusers, which must have these `parameters`, and its replacement."""

    owner: Any
    name: str
    parameters: str
    replacing: _Replacing

    def check(self) -> None:
        """Raises `NotImplementedError` unless diffusers has the expected function."""
        function = getattr(self.owner, self.name, None)
        has = None if function is None else " ".join(inspect.signature(function).parameters)
        if has != self.parameters:
            raise NotImplementedError(
                f"{_OP}: {self.owner.__name__}.{self.name} of diffusers {diffusers.__version__} "
                f"{'is missing' if has is None else f'takes ({has})'}, must take "
                f"({self.parameters}) as in diffusers {_KNOWN}"
            )

    def apply(self) -> Callable[[], None]:
        """Replaces the function; returns a function that restores it."""
        before = inspect.getattr_static(self.owner, self.name)
        setattr(self.owner, self.name, self.replacing(before))
        return lambda: setattr(self.owner, self.name, before)


_PATCHES = (
    _Patch(
        attention_dispatch,
        "_templated_context_parallel_attention",
        "query key value attn_mask dropout_p is_causal scale enable_gqa return_lse forward_op "
        "backward_op _parallel_config",
        lambda _: attention.attend,
    ),
    _Patch(
        hooks.EquipartitionSharder,
        "unshard",
        "tensor dim mesh",
        lambda _: staticmethod(spread.unshard_even),
    ),
    _Patch(
        hooks.PartitionAnythingSharder,
        "unshard_anything",
        "tensor dim mesh",
        lambda _: staticmethod(spread.unshard_uneven),
    ),
    _Patch(ModelMixin, "_resolve_parallel_config", "self config", models.resolving),
    _Patch(ModelMixin, "enable_parallelism", "self config cp_plan", models.checking),
)


def _refuse_other_backends() -> Callable[[], None]:
    """Makes backends for one rank refuse context parallelism; returns a function that undoes it."""
    registry = attention_dispatch._AttentionBackendRegistry
    before = dict(registry._backends)
    for name, backend in before.items():
        if name.value not in registry._supports_context_parallel:
            registry._backends[name] = attention.refusing(name.value, backend)
    return lambda: registry._backends.update(before)


_undo: list[Callable[[], None]] = []


def enable() -> None:
    """Runs diffusers' context parallelism on this package's ops, for all models and configs.

    Where diffusers' own code works, results are equal. On CPU its `enable_parallelism` fails, and
    so does `ring_degree` with torch's attention; its `ring_anything` and `ulysses_anything` have no
    gradients. Models may be parallelised before or after this call. A second call does nothing.
    Raises `NotImplementedError`, and changes nothing, if the installed diffusers has unexpected
    functions. Source: `_templated_context_parallel_attention` of diffusers.
    """
    if _undo:
        return
    for patch in _PATCHES:
        patch.check()
    _undo.extend(patch.apply() for patch in _PATCHES)
    _undo.append(_refuse_other_backends())


def disable() -> None:
    """Restores the functions that `enable` replaced, if any.

    Models that were parallelised continue with diffusers' own functions.
    """
    while _undo:
        _undo.pop()()
