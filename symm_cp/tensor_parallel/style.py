"""`ParallelStyle`s for `torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from symm_cp.group.memory import group_name
from symm_cp.tensor_parallel import adapters, quantised
from symm_cp.tensor_parallel.embedding import check_embedding, split_class
from symm_cp.tensor_parallel.features import Features, check_units
from symm_cp.tensor_parallel.linear import (
    FusedColwiseLinear,
    FusedRowwiseLinear,
    gather_and_apply,
)
from symm_cp.tensor_parallel.shared_gather import SharedGather


def _check_sequence_dim(style: str, sequence_dim: int) -> None:
    if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int):
        raise TypeError(f"{style}: sequence_dim must be an int, not {type(sequence_dim).__name__}")
    if sequence_dim == -1:
        raise ValueError(
            f"{style}: {sequence_dim=} is the last dimension, which holds the features"
        )


def _sequence_dim_of(
    style: str, argument: str, layout: Placement | None, sequence_dim: int
) -> int | None:
    """Returns the dimension that activations are sharded along, None where they are replicated."""
    _check_sequence_dim(style, sequence_dim)
    if layout is None:
        return sequence_dim
    if isinstance(layout, Replicate):
        return None
    if type(layout) is not Shard:
        raise TypeError(
            f"{style}: {argument}={layout!r} must be Shard(sequence_dim) or Replicate()"
        )
    _check_sequence_dim(style, layout.dim)
    return layout.dim


def _check_local_output(style: str, use_local_output: bool) -> bool:
    if not isinstance(use_local_output, bool):
        raise TypeError(f"{style}: use_local_output must be a bool, not {use_local_output!r}")
    return use_local_output


def _check_count(style: str, argument: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{style}: {argument} must be an int, not {count!r}")
    if count < 1:
        raise ValueError(f"{style}: {argument}={count} must be at least 1")
    return count


def _check_linear(style: str, module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
        raise ValueError(
            f"{style}: the weight is already a DTensor; apply only one style to a linear, before "
            "fully_shard"
        )
    # A subclass may override forward, which would be lost.
    if type(module) is not nn.Linear or "forward" in vars(module):
        name = type(module).__name__
        raise NotImplementedError(f"{style}: must be applied to an nn.Linear itself, not {name}")
    return module


def _features(
    linear: nn.Linear,
    mesh: DeviceMesh,
    how: FusedColwiseParallel | FusedRowwiseParallel,
    style: str = "",
    member: str = "",
) -> Features:
    """Divides the features that a style splits; raises where that is not possible.

    Errors name `style`, by default the class of `how`, and the `member` of a group.
    """
    style, columns = style or type(how).__name__, isinstance(how, FusedColwiseParallel)
    side, shared_by = ("out_features", how.shared_by) if columns else ("in_features", 1)
    name, size, multiple_of = member + side, getattr(linear, side), how.multiple_of
    check_units(style, name, size, mesh.size(), multiple_of, shared_by)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    features = Features.divided(size, rank, ranks, multiple_of, shared_by)
    if quantised.is_quantised(linear.weight):
        quantised.check(style, name, linear.weight, features, how.sequence_dim)
    if columns and not how.use_local_output and not features.as_stored:
        raise ValueError(
            f"{style}: use_local_output=False needs parts of {name}={size} as torch.chunk makes "
            f"them, {list(features.stored.sizes)}, but {multiple_of=} makes "
            f"{list(features.computed.sizes)}"
        )
    return features


def _distribute(
    style: str,
    module: nn.Module,
    mesh: DeviceMesh,
    weight: Placement,
    bias: Placement,
    source: int | None,
) -> None:
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(module, name, None)
        if parameter is not None:
            new = _sharded(f"{style}: {name}", parameter, mesh, placement, source)
            module.register_parameter(name, new)


def _sharded(
    what: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement, source: int | None
) -> nn.Parameter:
    """Returns a parameter's DTensor; the same one for all modules that it is tied to."""
    known: nn.Parameter | None = getattr(parameter, _SHARDED, None)
    if known is not None:
        assert isinstance(known, DTensor)
        if known.placements != (placement,) or known.device_mesh != mesh:
            raise ValueError(
                f"{what} of shape {list(parameter.shape)} is tied to a parameter placed "
                f"{known.placements} on {known.device_mesh}, and cannot be placed {(placement,)} "
                f"on {mesh} as well"
            )
        return known
    sharded = quantised.distributed(parameter, mesh, placement, source)
    new = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    setattr(parameter, _SHARDED, new)
    return new


def _become(module: Any, kind: type, features: Features, group: str, style: Any) -> None:
    """Changes a module's class in place, which keeps hooks, names and references valid."""
    module.__class__ = kind
    module.features = features
    module.group = group
    module.sequence_dim = style.sequence_dim
    module.local_output = style.use_local_output
    module.calls_op = style.sequence_dim is None and style.use_local_output and features.as_stored
    adapters.refuse_later()


#: The attribute of a dense parameter that holds its DTensor, for other modules that it is tied to.
_SHARDED = "_symm_cp_sharded"


class FusedColwiseParallel(ParallelStyle):
    """Splits an `nn.Linear` by output features, and fuses the communication of its input.

    Same result as torch's `ColwiseParallel(input_layouts=...)`. For an input that is sharded by
    sequence (the default), the all-gather of the forward and the reduce-scatter of the backward are
    fused into the matmuls; for a replicated one, the all-reduce of the backward is.

    Args:
        input_layouts: `Shard(sequence_dim)` or `Replicate()`; by default the former.
        output_layouts: `Shard(-1)`, the default, or `Replicate()`: the features of all ranks are
            gathered, for an output layer (`lm_head`) split by vocabulary. With the former and
            `use_local_output=False`, torch's `loss_parallel` computes the loss without gathering.
        use_local_output: returns plain tensors; otherwise DTensors placed as `output_layouts`.
        sequence_dim: the dimension of the input that is split over the ranks; negative counts from
            the end. The last one holds the features and is refused.
        multiple_of: each rank has a multiple of this many features; set it to the head dimension,
            so that no head is split. features.py explains sizes that are not divisible by the
            world size.
        shared_by: for key and value heads, how many query heads share each. If there are fewer key
            heads than ranks, each rank computes the key heads that its query heads need: one, or
            one for each query head.

    The input is this rank's shard, or all of a replicated input: a plain tensor, or a DTensor
    placed as `input_layouts`. Shards are equal on all ranks. The output has the whole sequence and
    this rank's features, or all. Parameters that modules share (an embedding and an output layer)
    stay shared. Weight and bias become DTensors with `Shard(0)`. Under autocast it computes in the
    dtype of autocast, as `nn.Linear` does.

    Raises `ValueError` for features that are not whole units of `multiple_of`, or fewer than ranks;
    `NotImplementedError` for a module that is not an `nn.Linear`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sequence_dim: int = 1,
        multiple_of: int = 1,
        shared_by: int = 1,
    ) -> None:
        super().__init__()
        style = type(self).__name__
        self.sequence_dim = _sequence_dim_of(style, "input_layouts", input_layouts, sequence_dim)
        if output_layouts not in (None, Shard(-1), Replicate()):
            raise ValueError(f"{style}: {output_layouts=} must be Shard(-1) or Replicate()")
        self.gathers_output = output_layouts == Replicate()
        self.use_local_output = _check_local_output(style, use_local_output)
        self.multiple_of = _check_count(style, "multiple_of", multiple_of)
        self.shared_by = _check_count(style, "shared_by", shared_by)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = type(self).__name__
        group = group_name(device_mesh)
        linear = _check_linear(style, module)
        features = _features(linear, device_mesh, self)
        _distribute(style, linear, device_mesh, Shard(0), Shard(0), self.src_data_rank)
        _become(linear, FusedColwiseLinear, features, group, self)
        linear.gathers_output = self.gathers_output
        linear.shared = None
        return linear

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({_layout('input_layouts', self.sequence_dim)}, "
            f"multiple_of={self.multiple_of})"
        )


class FusedColwiseGroup(ParallelStyle):
    """Applies `FusedColwiseParallel` to several linears of a module, which share an input.

    They share the input's gather, and the sum of its gradients.

    For query, key and value, or gate and up. Apply it to their parent module, whose forward must
    call each of them with the same tensor::

        plan = {"layers.*.attention": FusedColwiseGroup(("wq", "wk", "wv"))}
        parallelize_module(model, mesh, plan)

    In each forward of the parent the first linear gathers for all. A linear that is called with
    another tensor, with a modified one, outside that forward, or in inference mode gathers for
    itself, which is correct but slower, and warns once. Nothing is kept after the forward.

    Args:
        linears: the names of the linears, relative to the module; dots reach into submodules.
        input_layouts, use_local_output, sequence_dim: as for `FusedColwiseParallel`.
        multiple_of: as there, for all linears or by name: with grouped queries
            `{"wq": queries_per_key * head_dim, "wk": head_dim, "wv": head_dim}`.
        shared_by: as there, by name, for linears that have it: with more ranks than key heads
            `{"wk": queries_per_key, "wv": queries_per_key}`, and `multiple_of=head_dim`.

    Errors as for `FusedColwiseParallel`; and `ValueError` for a name that is missing or given
    twice, and for linears of different numbers of input features.
    """

    def __init__(
        self,
        linears: Sequence[str],
        *,
        input_layouts: Placement | None = None,
        use_local_output: bool = True,
        sequence_dim: int = 1,
        multiple_of: int | Mapping[str, int] = 1,
        shared_by: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(linears, str) or not all(isinstance(name, str) for name in linears):
            raise TypeError(
                f"FusedColwiseGroup: linears must be a sequence of names, not {linears!r}"
            )
        if not linears or len(set(linears)) != len(linears):
            raise ValueError(f"FusedColwiseGroup: {linears=} must be different names, at least one")
        units = (
            multiple_of if isinstance(multiple_of, Mapping) else dict.fromkeys(linears, multiple_of)
        )
        if set(units) != set(linears):
            raise ValueError(
                f"FusedColwiseGroup: {multiple_of=} must have an entry for each of {linears=}"
            )
        shared_by = shared_by or {}
        if not set(shared_by) <= set(linears):
            raise ValueError(f"FusedColwiseGroup: {shared_by=} must name only {linears=}")
        self.styles = {
            name: FusedColwiseParallel(
                input_layouts=input_layouts,
                use_local_output=use_local_output,
                sequence_dim=sequence_dim,
                multiple_of=units[name],
                shared_by=shared_by.get(name, 1),
            )
            for name in linears
        }

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = f"FusedColwiseGroup of {type(module).__name__}"
        linears: dict[str, nn.Linear] = {}
        for name in self.styles:
            try:
                linears[name] = _check_linear(style, module.get_submodule(name))
            except AttributeError as error:
                raise ValueError(f"{style}: the module has no linear named {name!r}") from error
        sizes = {name: linear.in_features for name, linear in linears.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"{style}: linears that share an input must have the same in_features, not {sizes}"
            )
        self._check_divisions(style, linears, device_mesh)
        members: dict[str, FusedColwiseLinear] = {}
        for name, linear in linears.items():
            self.styles[name].src_data_rank = self.src_data_rank
            member = self.styles[name]._apply(linear, device_mesh)
            assert isinstance(member, FusedColwiseLinear)
            members[name] = member
        shared = SharedGather(members, gather_and_apply)
        for member in members.values():
            member.shared = shared
        module.register_forward_pre_hook(shared.open)
        module.register_forward_hook(shared.close, always_call=True)
        return module

    def _check_divisions(
        self, style: str, linears: Mapping[str, nn.Linear], mesh: DeviceMesh
    ) -> None:
        """Raises `ValueError` before any linear is changed."""
        ranks, units = mesh.size(), {}
        for name, linear in linears.items():
            each = self.styles[name]
            _features(linear, mesh, each, style, f"{name}.")
            if each.multiple_of > 1:
                units[name] = linear.out_features // each.multiple_of * each.shared_by
        uneven = any(count % ranks for count in units.values())
        if uneven and len(set(units.values())) > 1:
            raise ValueError(
                f"{style}: the numbers of units of multiple_of, {units}, are not divisible by "
                f"world size {ranks}, so units that belong together could be on different ranks; "
                "give multiple_of for each linear, so that all have the same number of units (for "
                "grouped queries: the units of one key head)"
            )

    def __repr__(self) -> str:
        return f"FusedColwiseGroup({self.styles})"


class FusedRowwiseParallel(ParallelStyle):
    """Splits an `nn.Linear` by input features, and fuses the communication of its output.

    Splits an `nn.Embedding` by vocabulary; all ranks must give it the same tokens.

    Same result as torch's `RowwiseParallel(output_layouts=...)`. For an output that is sharded by
    sequence (the default), the reduce-scatter of the forward and the all-gather of the backward are
    fused into the matmuls; for a replicated one, the all-reduce of the forward is.

    Args:
        output_layouts: `Shard(sequence_dim)` or `Replicate()`; by default the former.
        use_local_output: returns a plain tensor; otherwise a DTensor placed as `output_layouts`.
        sequence_dim: the dimension of the output that is split over the ranks; negative counts
            from the end. The last one holds the features and is refused.
        multiple_of: as for the linears whose outputs are its input.

    The input has the whole sequence and this rank's features, a plain tensor or a DTensor with
    `Shard(-1)`. The output is this rank's shard of the sequence, or all of it. The weight becomes a
    DTensor with `Shard(1)`, the bias one with `Replicate()`: it is added once, after the sum, and
    every rank has its whole gradient. Autocast and errors are as for `FusedColwiseParallel`; the
    length of a sequence to shard must be divisible by the world size.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sequence_dim: int = 1,
        multiple_of: int = 1,
    ) -> None:
        super().__init__()
        style = type(self).__name__
        self.multiple_of = _check_count(style, "multiple_of", multiple_of)
        self.sequence_dim = _sequence_dim_of(style, "output_layouts", output_layouts, sequence_dim)
        self.use_local_output = _check_local_output(style, use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = "FusedRowwiseParallel"
        if isinstance(module, nn.Embedding):
            return self._apply_embedding(module, device_mesh)
        group = group_name(device_mesh)
        linear = _check_linear(style, module)
        features = _features(linear, device_mesh, self)
        _distribute(style, linear, device_mesh, Shard(1), Replicate(), self.src_data_rank)
        _become(linear, FusedRowwiseLinear, features, group, self)
        return linear

    def _apply_embedding(self, module: nn.Embedding, mesh: DeviceMesh) -> nn.Module:
        style, group = "FusedRowwiseParallel", group_name(mesh)
        check_embedding(style, module)
        if self.multiple_of != 1:
            raise ValueError(f"{style}: multiple_of={self.multiple_of} is for linears only")
        features = Features.divided(module.num_embeddings, mesh.get_local_rank(), mesh.size())
        _distribute(style, module, mesh, Shard(0), Shard(0), self.src_data_rank)
        kind: Any = type(module)
        _become(module, split_class(kind), features, group, self)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({_layout('output_layouts', self.sequence_dim)}, "
            f"multiple_of={self.multiple_of})"
        )


def _layout(argument: str, sequence_dim: int | None) -> str:
    return f"{argument}={Replicate() if sequence_dim is None else Shard(sequence_dim)!r}"
