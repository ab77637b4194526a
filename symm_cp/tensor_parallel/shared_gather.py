"""Lets linears that are called one after the other with the same input share its gather.

The first of them computes the outputs of all; the others return theirs. The outputs are kept during
one forward of the parent module, and each is returned once: nothing outlives the forward, and no
output has two callers. An output is returned only for the very tensor that it was computed from,
unmodified since, with the same weights and in the same mode (autograd, autocast). In all other
cases the linear computes its own output, and warns once that the gather was not shared.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from symm_cp.tensor_parallel.traced_versions import check_version, note_version

#: Computes the outputs of linears for one input shard, with one gather.
Compute: TypeAlias = Callable[[torch.Tensor, list[Any]], list[torch.Tensor]]


def _state(tensor: torch.Tensor | None) -> tuple[object, ...]:
    """Returns a value that changes if the tensor is replaced, or modified in a tracked way."""
    if tensor is None:
        return ()
    local = (_state(tensor._local_tensor),) if isinstance(tensor, DTensor) else ()
    return (id(tensor), tensor._version, *local)


def _mode(device: str) -> tuple[object, ...]:
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else None
    return (torch.is_grad_enabled(), dtype)


_numbers = itertools.count()


@dataclass
class _Outputs:
    """Computed outputs that were not returned yet, by member name."""

    input: torch.Tensor  # held, so that its id is not used again
    key: tuple[object, ...]
    parameters: dict[str, tuple[object, ...]]  # their states; while compiling, their ids
    by_name: dict[str, torch.Tensor]


class SharedGather:
    """The gather that the members of one parent module share."""

    def __init__(self, members: Mapping[str, nn.Linear], compute: Compute) -> None:
        self._members = dict(members)
        self._compute = compute
        # One entry for each active forward of the parent (it may call itself).
        self._forwards: list[_Outputs | None] = []
        self._warned = False
        self._tag = f"{', '.join(members)} ({next(_numbers)})"

    def open(self, parent: nn.Module, inputs: Any) -> None:
        """Forward pre-hook of the parent."""
        self._forwards.append(None)

    def close(self, parent: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook of the parent; after an exception it is called without an output."""
        kept = self._forwards.pop() if self._forwards else None
        if kept is not None and kept.by_name and output is not None:
            self._warn(f"{sorted(kept.by_name)} were computed but not used")

    def take(self, member: nn.Linear, x_shard: torch.Tensor) -> torch.Tensor:
        """Returns the member's output for `x_shard`, from the shared gather if possible."""
        name = next(name for name, linear in self._members.items() if linear is member)
        if torch.compiler.is_compiling():
            return self._take_traced(name, member, x_shard)
        if reason := self._cannot_share(x_shard):
            self._warn(f"{name!r} was called {reason}")
            return self._compute(x_shard, [member])[0]
        kept = self._forwards[-1]
        if kept is None or not kept.by_name:
            kept = self._forwards[-1] = self._compute_all(x_shard)
        elif (
            name not in kept.by_name
            or kept.key != self._key(x_shard)
            or kept.parameters[name] != self._parameters(member)
        ):
            self._warn(f"{name!r} was called again, with another input or in another mode")
            return self._compute(x_shard, [member])[0]
        return kept.by_name.pop(name)

    def _take_traced(self, name: str, member: nn.Linear, x_shard: torch.Tensor) -> torch.Tensor:
        """`take` for `torch.compile`, which traces neither ids nor versions of tensors."""
        kept = self._forwards[-1] if self._forwards else None
        if not self._forwards:
            return self._compute(x_shard, [member])[0]
        if kept is None:
            kept = self._forwards[-1] = self._compute_all_traced(x_shard)
        elif (
            name not in kept.by_name
            or kept.input is not x_shard
            or kept.key != _mode(x_shard.device.type)
            or kept.parameters[name] != (id(member.weight), id(member.bias))
        ):
            return self._compute(x_shard, [member])[0]
        for tensor in (x_shard, member.weight, member.bias):
            if tensor is not None:
                check_version(tensor, self._tag)
        output = kept.by_name.pop(name)
        if not kept.by_name:
            # An input that is kept would become an output of the graph.
            self._forwards[-1] = None
        return output

    def _compute_all_traced(self, x_shard: torch.Tensor) -> _Outputs:
        members = self._members.values()
        for tensor in (x_shard, *(t for m in members for t in (m.weight, m.bias))):
            if tensor is not None:
                note_version(tensor, self._tag)
        outputs = self._compute(x_shard, list(members))
        parameters: dict[str, tuple[object, ...]] = {
            name: (id(m.weight), id(m.bias)) for name, m in self._members.items()
        }
        named = dict(zip(self._members, outputs, strict=True))
        return _Outputs(x_shard, _mode(x_shard.device.type), parameters, named)

    def _compute_all(self, x_shard: torch.Tensor) -> _Outputs:
        outputs = self._compute(x_shard, list(self._members.values()))
        return _Outputs(
            x_shard,
            self._key(x_shard),
            {name: self._parameters(member) for name, member in self._members.items()},
            dict(zip(self._members, outputs, strict=True)),
        )

    def _cannot_share(self, x_shard: torch.Tensor) -> str:
        if not self._forwards:
            return "outside the forward of its parent module"
        if x_shard.is_inference():
            # Without a version counter, modifications go unnoticed.
            return "in inference mode, which does not track modifications (torch.no_grad() does)"
        return ""

    @staticmethod
    def _key(x_shard: torch.Tensor) -> tuple[object, ...]:
        return (_state(x_shard), _mode(x_shard.device.type))

    @staticmethod
    def _parameters(member: nn.Linear) -> tuple[object, ...]:
        return (_state(member.weight), _state(member.bias))

    def _warn(self, reason: str) -> None:
        if not self._warned and not torch.compiler.is_compiling():
            self._warned = True
            names = ", ".join(self._members)
            warnings.warn(
                f"symm_cp: the linears {names} should share one gather, but {reason}. The "
                "result is correct; sharing would save communication.",
                stacklevel=4,
            )
