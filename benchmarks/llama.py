"""A Llama of transformers for `inference.py` and `training.py`, split over ranks in several ways.

- `transformers (...)` is split by transformers itself, as `from_pretrained(..., tp_plan="auto")`
  does it, over a backend of torch.distributed; over `symm_cp` also with this package's
  styles, as programs get them (`fused`). Over `nothing`, a backend whose collectives return at
  once, it shows the time of transformers' and torch's code around them.
- `apply` is split by `symm_cp.tensor_parallel.apply`.
- `limit` has the same parts of the weights in plain modules, and no communication at all.
- `one process, all threads` is the whole model on rank 0, with as many threads as there are ranks
  (or cores, if those are fewer), while the other ranks sleep: what a user has without ranks.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import symm_cp
from symm_cp.commands.bench.jobs import groups_over
from symm_cp.ranks import threads, threads_of

HIDDEN, LAYERS, HEADS, FEED_FORWARD = 1024, 8, 16, 2816

#: The variants whose results are meaningless.
ALONE = ("limit", "transformers (nothing)")
ONE_PROCESS = "one process, all threads"

Step = Callable[[], torch.Tensor]

# Registers "fake", a backend that does nothing.
_NOTHING = importlib.import_module("torch.testing._internal.distributed.fake_pg") and "fake"


def llama(dtype: torch.dtype, **changes: int) -> nn.Module:
    """Returns the whole model, with the same random weights on every rank; `changes` its sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "intermediate_size": FEED_FORWARD,
    }
    config = LlamaConfig(**{**sizes, **changes}, use_cache=False)
    return LlamaForCausalLM(config).to(dtype)


def _mesh(over: dist.ProcessGroup, name: str) -> DeviceMesh:
    # DTensor takes meshes of the same ranks and names for one mesh, whatever their groups are, and
    # would communicate through the group of the first one that it saw.
    return DeviceMesh.from_group(over, "cpu", mesh_dim_names=(name,))


def by_transformers(model: nn.Module, over: dist.ProcessGroup, name: str) -> nn.Module:
    """Returns the model as transformers splits it over the ranks of a group."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = sharing_weights(model)
    config: Any = DistributedConfig(tp_size=over.size(), tp_plan="auto")
    plan = model._resolve_parallel_plans(config)[0]
    return apply_tensor_parallelism(model, _mesh(over, name), plan)


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Has transformers split by its own styles."""
    from transformers.distributed import tensor_parallel

    styles = tensor_parallel.ALL_PARALLEL_STYLES
    kinds = {
        "rowwise": tensor_parallel.RowwiseParallel,
        "colwise": tensor_parallel.ColwiseParallel,
        "colwise_gather_output": tensor_parallel.ColwiseParallel,
    }
    for name, kind in kinds.items():
        styles[name] = kind(
            input_layouts=styles[name].input_layouts, output_layouts=styles[name].output_layouts
        )
    try:
        yield
    finally:
        for name in kinds:
            del styles[name]


def applied(model: nn.Module, over: dist.ProcessGroup, **options: Any) -> nn.Module:
    """Returns the model as this package splits it."""
    model = copy.deepcopy(model)
    symm_cp.tensor_parallel.apply(model, _mesh(over, "apply"), **options)
    return model


class _Gathered(torch.autograd.Function):
    """Repeats a rank's features to all ranks' number of features; copies only the first time."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, kept: dict[Any, torch.Tensor], size: int) -> Any:
        key = part.shape, part.dtype
        if key not in kept:
            kept[key] = torch.cat([part.detach()] * size, -1)
        return kept[key].view_as(kept[key])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(-1, 0, grad.shape[-1] // dist.get_world_size()), None, None


def sharing_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of a model that shares its parameters but has its own modules."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def _plan(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules that the model's own plan splits, and the style of each."""
    for pattern, style in model.tp_plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, module in model.named_modules():
            if wanted.fullmatch(name):
                yield module, style


def alone(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Returns the model of this rank's weights, which does not communicate."""
    rank, world_size = group.rank(), group.size()
    kept: dict[Any, torch.Tensor] = {}
    model = sharing_weights(model)
    for module, style in _plan(model):
        if style in ("replicate", "replicated_with_grad_allreduce"):
            continue
        part = module.weight.detach().chunk(world_size, int(style == "rowwise"))[rank]
        module.weight = nn.Parameter(part.contiguous().clone())
        if style == "embedding_rowwise":  # looks up as many tokens, among its own
            module.register_forward_pre_hook(lambda own, args: (args[0] % len(own.weight),))
        elif style in ("colwise_gather_output", "colwise_rep"):  # its names in transformers 5, 4
            module.register_forward_hook(
                lambda own, args, out: _Gathered.apply(out, kept, world_size)
            )
        elif style not in ("colwise", "rowwise"):
            raise NotImplementedError(f"{style}: a style of the model's tensor-parallel plan")
    return model


def static_cache(model: nn.Module, length: int) -> Any:
    """Returns an empty cache for keys and values of `length` tokens, whose size never changes."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def next_logits(model: nn.Module, cache: Any, ids: torch.Tensor, position: int) -> torch.Tensor:
    """Returns the logits after the last of `ids` (B, S), which begin at `position` in the cache."""
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"  # changed in transformers 5.24
    positions = torch.arange(position, position + ids.shape[1])[None]
    options = {"use_cache": True, "logits_to_keep": 1, name: cache}
    return model(input_ids=ids, position_ids=positions, **options).logits[:, -1]


def in_one_process(step: Callable[[], Step], group: dist.ProcessGroup) -> dict[str, Step]:
    """Returns the step that `step` makes of the whole model on rank 0, an empty one on others."""
    if group.rank() > 0:
        return {ONE_PROCESS: lambda: torch.zeros(())}
    count, alone = threads_of(group.size()), step()

    def run() -> torch.Tensor:
        with threads(count):
            return alone()

    return {ONE_PROCESS: run}


def has_result(variant: str, group: dist.ProcessGroup) -> bool:
    """Tells whether this rank has a meaningful result of a variant."""
    return variant not in ALONE and (variant != ONE_PROCESS or group.rank() == 0)


def _with_own_weights(model: nn.Module) -> nn.Module:
    """Copies weights that share memory with the whole model, for training."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, DTensor):
                weight._local_tensor = weight._local_tensor.clone()
            elif weight is not None:
                module._parameters[name] = nn.Parameter(weight.detach().clone())
    return model


def variants(
    model: nn.Module, group: dist.ProcessGroup, applications: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the model without communication, then split in all ways. Collective.

    `applications` are names of variants by `apply`, and its options.
    """
    yield "limit", _with_own_weights(alone(model, group))
    for backend, over in groups_over(group, _NOTHING, "symm_cp").items():
        name = "nothing" if backend == _NOTHING else backend
        with _unfused():
            split = by_transformers(model, over, backend)
        yield f"transformers ({name})", _with_own_weights(split)
        if backend != _NOTHING:
            split = by_transformers(model, over, backend)
            yield f"transformers ({name}, fused)", _with_own_weights(split)
    yield "transformers (gloo)", _with_own_weights(by_transformers(model, group, "gloo"))
    for name, options in applications.items():
        yield name, _with_own_weights(applied(model, group, **options))
