"""Symmetric-memory fused compute-collective ops for PyTorch.

Importing this package adds kernels: torch's symmetric memory and the ops of `torch.ops.symm_mem`
work on CPU tensors from then on. It builds its native part once for the installed torch. If that
cannot be built or loaded (no C++ compiler, no folder for it, a folder that others can write), the
import succeeds and prints one line, and the first use raises an error that says what to do.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from symm_cp import loading as _loading
from symm_cp import started as _started

__version__ = "0.1.0"
_everything = _loading.everything()
if _everything and _started.as_command():  # ends here for --help, --version and wrong arguments
    _import_module("symm_cp.cli").answer()
if _everything:
    from symm_cp import backend as _backend
    from symm_cp import env as _env
    from symm_cp import integrations as _integrations  # noqa: F401
    from symm_cp import native as _native
    from symm_cp import ops as _ops
    from symm_cp.context_parallel import (
        HeadTail,
        LoadBalancer,
        PerDocumentHeadTail,
        ProcessingTimeRoundRobin,
        Sequential,
        all_gather_attention,
        context_parallel_shard,
        context_parallel_unshard,
        heads_to_sequence,
        sequence_to_heads,
        shard_batch,
        training_step,
        ulysses_output_projection,
        ulysses_projection,
    )
    from symm_cp.cuda import read_in_place, reserve
    from symm_cp.group.hosts import register as _register_groups
    from symm_cp.group.memory import get_workspace
    from symm_cp.ops.attention import set_rotate_method
    from symm_cp.ops.attention.gather_kv import all_gather_kv
    from symm_cp.ops.attention.spread_cache import spread_cache_attention
    from symm_cp.ops.collectives.low_contention import (
        low_contention_all_gather,
        low_contention_reduce_scatter,
    )
    from symm_cp.ops.custom import op
    from symm_cp.ops.matmul import (
        all_gather_matmul,
        matmul_all_reduce,
        matmul_reduce_scatter,
        scaled_all_gather_matmul,
        scaled_matmul_all_reduce,
        scaled_matmul_reduce_scatter,
    )
    from symm_cp.ops.override import override_cuda_ops
    from symm_cp.ops.recurrent.convolution import causal_convolution
    from symm_cp.ops.recurrent.delta_rule import gated_delta_rule
    from symm_cp.ops.recurrent.halo import exchange_halo
    from symm_cp.ops.recurrent.linear_attention import gated_linear_attention
    from symm_cp.ops.recurrent.recurrence import recurrence
    from symm_cp.ops.recurrent.rwkv7 import rwkv7
    from symm_cp.ops.recurrent.scan import scan_states
    from symm_cp.runtime.recorder import Recording, trace
    from symm_cp.tensors.results import empty_cache

__all__ = [
    "ContextParallel",
    "HeadTail",
    "LoadBalancer",
    "PerDocumentHeadTail",
    "ProcessingTimeRoundRobin",
    "Recording",
    "Sequential",
    "all_gather_attention",
    "all_gather_kv",
    "all_gather_matmul",
    "causal_convolution",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "empty_cache",
    "exchange_halo",
    "fsdp",
    "gated_delta_rule",
    "gated_linear_attention",
    "get_workspace",
    "heads_to_sequence",
    "inductor",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "moe",
    "nvshmem",
    "op",
    "override_cuda_ops",
    "read_in_place",
    "recurrence",
    "reserve",
    "rwkv7",
    "scaled_all_gather_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "scan_states",
    "sequence_to_heads",
    "set_rotate_method",
    "shard_batch",
    "spread_cache_attention",
    "tensor_parallel",
    "trace",
    "training_step",
    "ulysses_output_projection",
    "ulysses_projection",
]

if _TYPE_CHECKING:
    from symm_cp import fsdp, inductor, moe, tensor_parallel
    from symm_cp.context_parallel import ContextParallel, context_parallel
    from symm_cp.cuda import nvshmem


def __getattr__(name: str) -> object:
    # Imported when asked for: torch's compiler takes a second, its styles (DTensor) half a second.
    if name in ("fsdp", "inductor", "moe", "tensor_parallel"):
        return _import_module(f"symm_cp.{name}")
    if name == "nvshmem":
        return _import_module("symm_cp.cuda.nvshmem")
    if name == "ContextParallel":
        return _import_module("symm_cp.context_parallel").ContextParallel
    raise AttributeError(f"module 'symm_cp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if _everything:
    _env.warn_of_unknown()
    _ops.register()
    _backend.register()
    try:
        _native.load()
        _register_groups()
        _ops.register_plans()
    except _native.BuildError as _error:
        _ops.register_without_native()
        _native.say(str(_error).splitlines()[0])
