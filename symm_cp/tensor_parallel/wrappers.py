"""Wrappers that `apply` puts around the forward of a model's own modules.

`wrap` changes a module's class in place to one that derives from the wrapper and from the old
class: names, hooks, references and `isinstance` stay valid, and copies of the module are wrapped,
too. All parameters are DTensors by then; a forward sees this rank's part of them, plain tensors.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from symm_cp.tensor_parallel.quantised import local_of
from symm_cp.tensor_parallel.replicated import copy, sum_ranks
from symm_cp.tensor_parallel.whole import Seat, gather, own_part


def wrap(module: nn.Module, wrapper: Any, **attributes: Any) -> None:
    """Runs `wrapper.forward` around the module's from now on; sets attributes on the module."""
    kind: Any = type(module)
    module.__class__ = _wrapped_class(wrapper, kind)
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _wrapped_class(wrapper: Any, kind: Any) -> Any:
    # Copies of a module are wrapped, too; pickle finds no class of this name in any module.
    return type(kind.__name__, (wrapper, kind), {"__doc__": kind.__doc__, "__reduce_ex__": _reduce})


class _OnlyCopied:
    """The class of a wrapped module, for `copy`; `pickle` raises, and names alternatives."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __deepcopy__(self, memo: Any) -> _OnlyCopied:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.kind.__name__}: a model that tensor_parallel.apply has split over ranks cannot "
            "be pickled (torch.save(model), multiprocessing). Use symm_cp.tensor_parallel.save("
            "model, folder) or model.save_pretrained(folder), which write the whole model, or "
            "torch.distributed.checkpoint for model.state_dict()"
        )


def _new(of: _OnlyCopied) -> Any:
    return of.kind.__new__(of.kind)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    return _new, (_OnlyCopied(type(module)),), object.__reduce_ex__(module, 2)[2]


#: torch 2.12 compiles `pop` from a module's `__dict__` to a deletion of the parameter of that name.
_DELETES_PARAMETERS = torch.__version__ < (2, 13)


class LocalParameters(nn.Module):
    """The module's forward gets its DTensor parameters as this rank's plain tensors.

    Gradients of the parameters named in `summed` are summed over the ranks, because each rank
    applies them to a part of the tokens, or of the heads. Parameters in `packed` hold two matrices
    in one dimension (gate and up projections), and each rank has a part of both: they get a further
    dimension of size 2 there, so that this part is a slice.
    """

    summed: frozenset[str]
    packed: dict[str, int]
    seat: Seat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns."""
        names: list[str] = []
        try:
            self._make_local(names)
            return super().forward(*args, **kwargs)
        finally:
            self._forget(names)

    def _make_local(self, names: list[str]) -> None:
        """Makes parameters plain tensors; adds the names of those that were not yet."""
        constant = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor) and name not in self.__dict__:
                # `to_local` makes a view each time.
                local = parameter._local_tensor if constant else local_of(parameter)
                if (dim := self.packed.get(name)) is not None:
                    local = local.flatten(dim, dim + 1)
                names.append(name)
                # Python finds this before the parameter, which only `nn.Module.__getattr__` finds.
                self.__dict__[name] = copy(local, self.seat.group) if name in self.summed else local

    def _forget(self, names: list[str]) -> None:
        for name in names:
            if not _DELETES_PARAMETERS:
                self.__dict__.pop(name, None)
            elif name in self.__dict__:
                object.__delattr__(self, name)  # which breaks the graph


class LocalParametersInside(nn.Module):
    """The module's forward gets the parameters of all modules inside it as `LocalParameters` does.

    For code that computes with a parameter outside of the forward of the module that owns it, as
    Mamba layers do with the weight of their convolution.
    """

    owners: list[LocalParameters]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns."""
        made: list[tuple[LocalParameters, list[str]]] = [(owner, []) for owner in self.owners]
        try:
            for owner, names in made:
                owner._make_local(names)
            return super().forward(*args, **kwargs)
        finally:
            for owner, names in made:
                owner._forget(names)


class PartOfInput(nn.Module):
    """The module takes this rank's part of the last dimension of a whole input."""

    seat: Seat
    sizes: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> Any:
        """Calls the module with this rank's features."""
        return super().forward(own_part(input, -1, self.seat, self.sizes))


class SummedOutput(nn.Module):
    """The module's output is a part of a sum; returns the sum over the ranks."""

    seat: Seat

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sums the output over the ranks."""
        return sum_ranks(super().forward(*args, **kwargs), self.seat.group)


class PartOfEachExpert(nn.Module):
    """Each rank holds a part of every expert's features, and all tokens."""

    seat: Seat

    def forward(
        self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sums the experts' outputs over the ranks."""
        tokens, weights = copy(hidden_states, self.seat.group), copy(weights, self.seat.group)
        return sum_ranks(super().forward(tokens, index, weights), self.seat.group)


class SomeExperts(nn.Module):
    """Each rank holds some experts, whole, and all tokens; skips the tokens of other experts."""

    seat: Seat
    num_experts: int  # of this rank
    first: int

    def forward(
        self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sums the outputs of the experts of all ranks."""
        tokens, weights = copy(hidden_states, self.seat.group), copy(weights, self.seat.group)
        outside = (index < self.first) | (index >= self.first + self.num_experts)
        # Experts of transformers skip the index `num_experts`; not all of them do in eager mode.
        config = getattr(self, "config", None)
        eager = getattr(config, "_experts_implementation", None) == "eager"
        index = (index - self.first).masked_fill(outside, 0 if eager else self.num_experts)
        weights = weights.masked_fill(outside, 0)
        return sum_ranks(super().forward(tokens, index, weights), self.seat.group)


def _replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Changes the first argument, which blocks of transformers also take as `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _replace_output(output: Any, change: Any) -> Any:
    """Changes the output, or the first of several."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _joined_sequence(x: torch.Tensor, seat: Seat) -> torch.Tensor:
    return gather(x, 1, seat, seat.equal_parts(x.shape[1]))


def _sequence_part(x: torch.Tensor, seat: Seat) -> torch.Tensor:
    if x.dim() != 3 or x.shape[1] % seat.world_size:
        raise ValueError(
            f"sequence_parallel=True: activations between blocks have shape {list(x.shape)}, must "
            f"be (batch, sequence, features) with a sequence that is divisible by world size "
            f"{seat.world_size}: pad it, or apply the plan with sequence_parallel=False (as "
            "generate() needs, which continues by one token)"
        )
    return own_part(x, 1, seat, seat.equal_parts(x.shape[1] // seat.world_size))


class SplitSequence(nn.Module):
    """The first block: takes the whole sequence, and hands on this rank's part."""

    seat: Seat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the block with this rank's part of the sequence."""
        args, kwargs = _replace_input(args, kwargs, partial(_sequence_part, seat=self.seat))
        return super().forward(*args, **kwargs)


class JoinSequence(nn.Module):
    """The last block: returns the whole sequence."""

    seat: Seat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers the block's output."""
        output = super().forward(*args, **kwargs)
        return _replace_output(output, partial(_joined_sequence, seat=self.seat))


class WholeSequence(nn.Module):
    """A module that needs the whole sequence, between modules that take a part."""

    seat: Seat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers the input, and returns this rank's part of the output."""
        args, kwargs = _replace_input(args, kwargs, partial(_joined_sequence, seat=self.seat))
        output = super().forward(*args, **kwargs)
        return _replace_output(output, partial(_sequence_part, seat=self.seat))


class ShapeOfWholeSequence(nn.Module):
    """A module whose linears gather: its code reads the whole sequence's length from the input.

    Attention modules shape query, key and value like their input, with `view`, which would silently
    take a part's shape for another number of heads. A DTensor has the shape of the whole.
    """

    mesh: DeviceMesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with a DTensor that is sharded by sequence."""

        def change(x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)

        args, kwargs = _replace_input(args, kwargs, change)
        return super().forward(*args, **kwargs)
