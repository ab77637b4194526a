"""`apply` makes a whole model tensor parallel, as its plan says."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from symm_cp.group.memory import GroupLike, resolve
from symm_cp.tensor_parallel import adapters, quantised, wrappers
from symm_cp.tensor_parallel.blocks import Blocks, blocks_of, members_of_lists
from symm_cp.tensor_parallel.checkpoint import SavesWholeModel, load, refuse_adapters
from symm_cp.tensor_parallel.embedding import VocabParallelEmbedding, option_of_whole
from symm_cp.tensor_parallel.features import Features
from symm_cp.tensor_parallel.heads import REPEATS, Heads, heads_of
from symm_cp.tensor_parallel.linear import FusedColwiseLinear, FusedRowwiseLinear
from symm_cp.tensor_parallel.optimizers import replaced
from symm_cp.tensor_parallel.plans import (
    COLWISE,
    EXPERTS,
    ROWWISE,
    Rule,
    is_packed,
    rules_of,
    split_dim,
)
from symm_cp.tensor_parallel.quantised import distributed
from symm_cp.tensor_parallel.same_inputs import compare_inputs
from symm_cp.tensor_parallel.saved_adapters import SavesWholeAdapters
from symm_cp.tensor_parallel.style import (
    FusedColwiseGroup,
    FusedColwiseParallel,
    FusedRowwiseParallel,
)
from symm_cp.tensor_parallel.trial import partial_gradients
from symm_cp.tensor_parallel.whole import Seat

_GATHERED = {"colwise_gather_output", "colwise_rep"}
_SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
_FUSED = (FusedColwiseLinear, FusedRowwiseLinear, VocabParallelEmbedding)


def apply(
    model: nn.Module,
    mesh: GroupLike,
    plan: str | Mapping[str, str] = "auto",
    *,
    sequence_parallel: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Makes a model tensor parallel in place, with the fused styles.

    Same result as::

        model(**inputs)  # in one process, on every rank, and the gradients of all parameters

    Args:
        model: a model of transformers 5, or any model for which a plan is given. It may be on the
            meta device (`with torch.device("meta")`), if a checkpoint is given or loaded later.
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name.
        plan: "auto", the plan that a model of transformers brings along, or a dict of patterns
            ("layers.*.mlp.up_proj") and kinds ("colwise"): see the README of this folder.
        sequence_parallel: between blocks each rank has a part of the sequence, whose length must be
            divisible by the world size. Otherwise all ranks have all of it.
        checkpoint: a folder of safetensors files to load from; each rank reads its own part only.
        src_data_rank: the rank whose weights all ranks take, as in `distribute_tensor`; with None
            each rank keeps its own. Weights on the meta device are not sent.

    Inputs and outputs are the whole model's, the same on all ranks; a call of the model with
    different inputs raises `RuntimeError` on all ranks. All parameters become DTensors: split, or
    `Replicate()`. Make optimizers afterwards: one that has the old parameters raises
    `RuntimeError` at its step. `model.save_pretrained`, where there is one, then saves the
    whole model: call it on all ranks; rank 0 writes. Returns the model. Raises
    `ValueError` or `NotImplementedError`, which name the module, the kind and an alternative,
    before anything is changed.
    """
    rules = rules_of(model, plan)
    work = _Application(model, _mesh_of(mesh, model), rules, sequence_parallel, src_data_rank)
    work.check()
    work.partial = partial_gradients(
        model,
        lambda tried: _Application(tried, work.mesh, rules, sequence_parallel, None).split(),
        work.mesh,
    )
    if checkpoint is not None:
        refuse_adapters("apply", model)
    work.run()
    if checkpoint is not None:
        load(model, checkpoint)
    return model


def _mesh_of(group: GroupLike, model: nn.Module) -> DeviceMesh:
    """Returns the mesh of a group, on the kind of device that the model is on."""
    if isinstance(group, DeviceMesh):
        return group
    process_group = _resolve_process_group(resolve(group).name)  # type: ignore[arg-type]
    kinds = [p.device.type for p in model.parameters() if not p.is_meta]
    known = [device.type for device in process_group._device_types]
    kind = kinds[0] if kinds else "cpu" if "cpu" in known else known[0]
    return DeviceMesh.from_group(process_group, kind, mesh_dim_names=("tp",))


def _name_in(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


class _Application:
    """One call of `apply`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        rules: list[Rule],
        sequence_parallel: bool,
        source: int | None,
    ) -> None:
        self.model, self.mesh, self.source = model, mesh, source
        self.seat = Seat.in_mesh(mesh)
        self.rules = rules
        self.blocks: Blocks | None = blocks_of(model, rules) if sequence_parallel else None
        self.kinds = {rule.name: rule.kind for rule in rules}
        self.heads: dict[str, Heads | None] = {}
        self.partial: Collection[str] = ()  # parameters whose gradients are parts of a sum
        self.linears = [
            rule for rule in rules if not rule.parameter and rule.kind in COLWISE | ROWWISE
        ]

    def module(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def linear(self, rule: Rule) -> Any:
        """The linear that a rule splits, without its adapters."""
        return self.module(adapters.linear_name(self.model, rule.owner))

    # --- checks ---

    def check(self) -> None:
        """Raises all errors of `run` in advance, while the model is unchanged."""
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"apply: {name} is already a DTensor: apply a plan once, before fully_shard"
                )
        for rule in self.rules:
            if "forward" in vars(self.module(rule.owner)):
                raise NotImplementedError(
                    f"apply: the forward of {rule.owner} was replaced on the object (by hooks of "
                    "accelerate, or by the tensor parallelism of transformers): apply the plan to "
                    "the model as it was built"
                )
        split = [r.owner for r in self.rules if r.kind != "replicated_with_grad_allreduce"]
        adapters.check(self.model, split)
        for rule in self.rules:
            if rule.parameter:
                self._check_parameter(rule)
            elif rule.kind in COLWISE | ROWWISE:
                self._check_linear(rule)
            elif rule.kind == "embedding_rowwise":
                self._check_embedding(rule)
            elif rule.kind in EXPERTS:
                self._check_experts(rule)
        self._check_ties()

    def _refuse(self, rule: Rule, reason: str) -> NotImplementedError:
        kind = type(self.module(rule.owner)).__name__
        return NotImplementedError(f"apply: {rule.name} ({kind}), kind {rule.kind!r}: {reason}")

    def _check_linear(self, rule: Rule) -> None:
        linear = self.linear(rule)
        if type(linear) is not nn.Linear:
            raise self._refuse(
                rule, "must be an nn.Linear itself; leave the rule out to replicate it"
            )
        columns = rule.kind in COLWISE
        width: int = linear.out_features if columns else linear.in_features
        heads, world_size = self._heads(rule), self.seat.world_size
        if heads is not None and heads.units < world_size:
            units = heads.units
            raise ValueError(
                f"apply: {rule.name} (kind {rule.kind!r}) has {units} heads, or groups of query "
                f"heads that share a key head, in its {width} features: fewer than world size "
                f"{world_size}. Use a mesh of at most {units} ranks, or replicate this attention: "
                "leave its rules out of the plan"
            )
        if quantised.is_quantised(linear.weight):
            shared_by = self._shared_by(rule) if columns else 1
            divided = self._multiple_of(rule), shared_by
            quantised.check(
                f"apply: {rule.name} (kind {rule.kind!r})",
                "out_features" if columns else "in_features",
                linear.weight,
                Features.divided(width, self.seat.rank, world_size, *divided),
                None if isinstance(self._layout(rule), Replicate) else 1,
            )

    def _heads(self, rule: Rule) -> Heads | None:
        """The heads of the attention that a linear belongs to, None for other linears.

        Query heads that share a key head stay together, as `repeat_kv` requires, unless there are
        fewer key heads than ranks.
        Cached at the first call for the rule, since `run` changes modules.
        """
        if rule.name not in self.heads:
            self.heads[rule.name] = self._heads_of(rule)
        return self.heads[rule.name]

    def _heads_of(self, rule: Rule) -> Heads | None:
        parent = rule.owner.rpartition(".")[0]
        if rule.kind in _GATHERED | _SPLIT_INPUT:
            return None
        linears = [o for o in self.linears if o.owner.rpartition(".")[0] == parent]
        colwise = [self.linear(o).out_features for o in linears if o.kind == "colwise"]
        rowwise = [self.linear(o).in_features for o in linears if o.kind == "rowwise"]
        return heads_of(self.module(parent), colwise, rowwise, self.seat.world_size)

    def _multiple_of(self, rule: Rule) -> int:
        heads, linear = self._heads(rule), self.linear(rule)
        if heads is None:
            return 1
        width: int = linear.out_features if rule.kind in COLWISE else linear.in_features
        return heads.head_dim if heads.shared_by > 1 else width // heads.units

    def _shared_by(self, rule: Rule) -> int:
        """Returns how many query heads share a head of a linear whose heads ranks share; else 1."""
        heads = self._heads(rule)
        if heads is None or self.linear(rule).out_features == heads.queries:
            return 1
        return heads.shared_by

    def _check_parameter(self, rule: Rule) -> None:
        parameter = self.module(rule.owner).get_parameter(rule.parameter)
        if quantised.is_quantised(parameter):
            raise self._refuse(rule, "is quantised: only weights of linears can be split then")
        if self.kinds.get(rule.owner) not in EXPERTS | {"local_params"}:
            raise self._refuse(
                rule,
                "a parameter can be split only if the plan gives its module the kind "
                "'moe_tp_experts', 'ep_dispatch_experts' or 'local_params'",
            )
        dim, halves = split_dim(rule.kind, parameter.dim()), 1 + is_packed(rule.kind)
        if parameter.shape[dim] % (halves * self.seat.world_size):
            unit = f"{halves} times " if halves > 1 else ""
            raise ValueError(
                f"apply: {rule.name} of shape {list(parameter.shape)}, kind {rule.kind!r}: "
                f"dimension {dim} is not divisible by {unit}world size {self.seat.world_size}"
            )

    def _check_experts(self, rule: Rule) -> None:
        """Requires that all parameters of experts are split: sums would count others W times."""
        experts, by_expert = self.module(rule.owner), rule.kind == "ep_dispatch_experts"
        for name, _ in experts.named_parameters():
            kind = self.kinds.get(_name_in(rule.owner, name), "")
            if not kind or (kind == "grouped_gemm") != by_expert:
                needed = "'grouped_gemm'" if by_expert else "'packed_colwise' or 'rowwise'"
                raise self._refuse(
                    rule,
                    f"needs a rule for its parameter {name} with the kind {needed}, not {kind!r}",
                )
        # transformers marks experts whose weights have other layouts by these attributes.
        transposed = getattr(experts, "is_transposed", False)
        if not by_expert and (transposed or not getattr(experts, "is_concatenated", True)):
            raise self._refuse(
                rule,
                "supports weights of (output, input) features with gate and up in one piece each; "
                "split these by expert, with 'ep_dispatch_experts' and 'grouped_gemm'",
            )

    def _check_embedding(self, rule: Rule) -> None:
        embedding = self.module(rule.owner)
        if not isinstance(embedding, nn.Embedding):
            raise self._refuse(rule, "must be an nn.Embedding")
        if quantised.is_quantised(embedding.weight):
            raise self._refuse(rule, "is quantised: only weights of linears can be split then")
        if name := option_of_whole(embedding):
            raise self._refuse(rule, f"an embedding with {name} cannot be split by vocabulary")

    def _check_ties(self) -> None:
        """Requires that weights which modules share are split in the same way."""
        for names in self._tied():
            placements = {name: self._planned(name) for name in names}
            if len(set(placements.values())) > 1:
                raise ValueError(
                    "apply: tied parameters must be split in the same way, but the plan says "
                    f"{placements}: give their modules matching kinds ('embedding_rowwise' and "
                    "'colwise_gather_output')"
                )

    def _tied(self) -> list[list[str]]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [group for group in names.values() if len(group) > 1]

    def _planned(self, name: str) -> Placement:
        owner, _, parameter = name.rpartition(".")
        if name in self.kinds:
            kind = self.kinds[name]
            dim = split_dim(kind, self.model.get_parameter(name).dim())
            return Shard(dim + 1 if is_packed(kind) else dim)
        kind = self.kinds.get(owner.removesuffix(".base_layer"), "")
        if kind in COLWISE or kind == "embedding_rowwise":
            return Shard(0)
        return Shard(1) if kind in ROWWISE and parameter == "weight" else Replicate()

    # --- changes ---

    def run(self) -> None:
        """Splits the model, and has its calls and optimizers checked from now on."""
        before = dict(self.model.named_parameters())
        self.split()
        _, inner = adapters.wrapped_model(self.model)
        if hasattr(inner, "_device_mesh"):  # by which `generate_batch` divides its cache
            group, kind = self.mesh.get_group(), self.mesh.device_type
            inner._device_mesh = DeviceMesh.from_group(group, kind, mesh_dim_names=("tp",))
        compare_inputs(inner, self.seat)
        replaced(before, self.model)

    def split(self) -> None:
        """Shards the parameters, and wraps the modules."""
        tied = self._tied()
        self._apply_styles()
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            if not isinstance(parameter, DTensor):
                self._distribute(name, self._planned(name))
        for first, *others in tied:
            for other in others:
                self._set(other, self.model.get_parameter(first))
        self._wrap_owners()
        for rule in self.rules:
            self._wrap(rule)
        if self.blocks is not None:
            self._wrap_blocks(self.blocks)
        adapters.wrap_all(self.model, self.seat)
        _, inner = adapters.wrapped_model(self.model)
        if inner is not self.model:
            wrappers.wrap(self.model, SavesWholeAdapters)
        if hasattr(inner, "save_pretrained"):
            wrappers.wrap(inner, SavesWholeModel)

    def _distribute(self, name: str, placement: Placement) -> None:
        old = self.model.get_parameter(name)
        value = old.detach()
        if isinstance(placement, Shard) and is_packed(self.kinds.get(name, "")):
            value = value.unflatten(placement.dim - 1, (2, -1))
        new = distributed(value, self.mesh, placement, self.source)
        self._set(name, nn.Parameter(new, requires_grad=old.requires_grad))

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, own_name = name.rpartition(".")
        self.module(owner).register_parameter(own_name, parameter)

    def _apply_styles(self) -> None:
        for rule in self.rules:
            if rule.kind == "embedding_rowwise":
                style = FusedRowwiseParallel(output_layouts=Replicate())
                self._apply_style(self.module(rule.owner), style)
        groups: dict[tuple[str, int], list[Rule]] = {}
        for rule in self.linears:
            if rule.kind == "colwise":
                key = rule.owner.rpartition(".")[0], self.linear(rule).in_features
                groups.setdefault(key, []).append(rule)
            else:
                self._apply_style(self.linear(rule), self._style(rule))
            self._split_adapters(rule)
        for (parent, _), rules in groups.items():
            names = [adapters.linear_name(self.model, rule.owner) for rule in rules]
            names = [name.removeprefix(f"{parent}.") for name in names]
            units = dict(zip(names, map(self._multiple_of, rules), strict=True))
            shared = dict(zip(names, map(self._shared_by, rules), strict=True))
            group = FusedColwiseGroup(
                tuple(units),
                input_layouts=self._layout(rules[0]),
                multiple_of=units,
                shared_by=shared,
            )
            self._apply_style(self.module(parent), group)
            if max(shared.values()) > 1:
                counts = [self.linear(rule).features.count for rule in rules]
                setattr(self.module(parent), REPEATS, max(counts) // min(counts))

    def _layout(self, rule: Rule) -> Placement:
        return Shard(1) if self.blocks is not None and self.blocks.is_fused(rule) else Replicate()

    def _style(self, rule: Rule) -> FusedColwiseParallel | FusedRowwiseParallel:
        layout, unit = self._layout(rule), self._multiple_of(rule)
        if rule.kind in ROWWISE:
            return FusedRowwiseParallel(output_layouts=layout, multiple_of=unit)
        return FusedColwiseParallel(
            input_layouts=layout,
            output_layouts=Replicate() if rule.kind in _GATHERED else Shard(-1),
            multiple_of=unit,
            shared_by=self._shared_by(rule),
        )

    def _apply_style(self, module: nn.Module, style: ParallelStyle) -> None:
        style.src_data_rank = self.source
        style._apply(module, self.mesh)

    def _split_adapters(self, rule: Rule) -> None:
        layer, columns = self.module(rule.owner), rule.kind in COLWISE
        if not adapters.is_adapted(layer):
            return
        for linear in adapters.split_with(layer, columns):
            self._apply_style(linear, self._style(rule))
        dim, sizes = None, None
        if columns and isinstance(self._layout(rule), Shard):
            dim = 1
        elif not columns and rule.kind not in _SPLIT_INPUT:
            length, unit = self.linear(rule).in_features, self._multiple_of(rule)
            divided = Features.divided(length, self.seat.rank, self.seat.world_size, unit)
            dim, sizes = -1, divided.computed.sizes
        adapters.wrap_layer(rule.owner, layer, self.seat, dim, sizes)

    def _wrap_owners(self) -> None:
        """Makes parameters plain tensors inside modules that own them, except those of styles."""
        summed = set(self._summed())
        for name, module in list(self.model.named_modules()):
            own = {p for p, _ in module.named_parameters("", False)}
            if own and not isinstance(module, _FUSED):
                wrappers.wrap(
                    module,
                    wrappers.LocalParameters,
                    seat=self.seat,
                    summed=frozenset(p for p in own if _name_in(name, p) in summed),
                    packed={
                        p: module.get_parameter(p).placements[0].dim - 1
                        for p in own
                        if is_packed(self.kinds.get(_name_in(name, p), ""))
                    },
                )

        for block in members_of_lists(self.model):
            owners = [p for p in block.modules() if isinstance(p, wrappers.LocalParameters)]
            wrappers.wrap(block, wrappers.LocalParametersInside, owners=owners)

    def _summed(self) -> Iterator[str]:
        """Yields the names of replicated parameters whose gradients are parts of a sum."""
        yield from self.partial
        for rule in self.rules:
            if rule.kind == "replicated_with_grad_allreduce":
                for parameter, _ in self.module(rule.owner).named_parameters():
                    yield _name_in(rule.owner, parameter)
        for rule in self.linears:
            if isinstance(self._layout(rule), Shard):
                yield from adapters.kept_whole(
                    rule.owner, self.module(rule.owner), rule.kind in COLWISE
                )
        if self.blocks is not None:
            for name in self.blocks.token_wise:
                for parameter, _ in self.module(name).named_parameters():
                    yield _name_in(name, parameter)
            for block in self.blocks.all:
                for parameter, _ in self.module(block).named_parameters("", False):
                    yield _name_in(block, parameter)

    def _wrap(self, rule: Rule) -> None:
        module, seat = self.module(rule.owner), self.seat
        if rule.parameter:
            return
        if rule.kind in _SPLIT_INPUT:
            sizes = self.linear(rule).features.computed.sizes
            for linear in (self.linear(rule), *adapters.split_with(module, columns=False)):
                wrappers.wrap(linear, wrappers.PartOfInput, seat=seat, sizes=sizes)
        elif rule.kind == "all_reduce":
            wrappers.wrap(module, wrappers.SummedOutput, seat=seat)
        elif rule.kind == "moe_tp_experts":
            wrappers.wrap(module, wrappers.PartOfEachExpert, seat=seat)
        elif rule.kind == "ep_dispatch_experts":
            count = module.num_experts // seat.world_size
            wrappers.wrap(
                module,
                wrappers.SomeExperts,
                seat=seat,
                num_experts=count,
                first=seat.rank * count,
                _is_expert_parallel=True,  # for transformers: some indices have no expert here
            )

    def _wrap_blocks(self, blocks: Blocks) -> None:
        seat = self.seat
        for name in blocks.fused:
            wrappers.wrap(self.module(name), wrappers.ShapeOfWholeSequence, mesh=self.mesh)
        for name in blocks.whole:
            wrappers.wrap(self.module(name), wrappers.WholeSequence, seat=seat)
        for name in blocks.first:
            wrappers.wrap(self.module(name), wrappers.SplitSequence, seat=seat)
        for name in blocks.last:
            wrappers.wrap(self.module(name), wrappers.JoinSequence, seat=seat)
