"""Gives programs that `symm-cp run` or `exec` started process groups of symm_cp instead of gloo."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symm_cp import env, native

_NAME = "symm_cp"


def replaced(requested: str, names: Collection[str]) -> str | None:
    """Returns the backends that replace the requested ones; None to keep the requested ones.

    `requested` is the backend that a program passes to `init_process_group`: "gloo",
    "cpu:gloo,cuda:nccl", or "undefined", which torch resolves by the machine's accelerator.
    """
    backends = dict(c10d.BackendConfig(c10d.Backend(requested)).get_device_backend_map())
    if backends.get("cpu") not in names:
        return None
    backends["cpu"] = _NAME
    # Not `is_available`: after it, forked processes cannot use GPUs.
    if ":" not in requested and torch.cuda.device_count() == 0:
        backends.pop("cuda", None)  # plain "gloo" means both devices
    if len(backends) == 1:
        return _NAME
    return ",".join(f"{device}:{backend}" for device, backend in backends.items())


def make_group(
    make: Callable[..., tuple[object, dist.Store | None]], *args: object, **kwargs: object
) -> tuple[object, dist.Store | None]:
    """Calls torch's `_new_process_group_helper` with the replaced backends.

    Raises `native.BuildError` if symm_cp cannot be built.
    """
    call = inspect.signature(make).bind(*args, **kwargs)
    requested = c10d.Backend(str(call.arguments["backend"]))
    backends = replaced(requested, env.backend_for())
    if backends is None:
        return make(*args, **kwargs)
    native.load()
    is_world = not call.arguments["global_ranks_in_group"]
    if is_world and call.arguments["group_rank"] == 0:
        _say(requested)
    call.arguments["backend"] = c10d.Backend(backends)
    call.arguments["backend_options"] = None  # gloo's, which gloo ignores
    group, store = make(*call.args, **call.kwargs)
    if isinstance(group, dist.ProcessGroup):
        _record(group, store, requested, backends)
    return group, store


def _record(
    group: dist.ProcessGroup, store: dist.Store | None, requested: str, backends: str
) -> None:
    """Makes `get_backend` return the backend that the program requested.

    Programs compare it with "gloo", and so do `monitored_barrier` and others of torch's functions.
    """
    if ":" in backends and "nccl" not in backends:  # torch sets a default only for one backend
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    world = c10d._world
    world.pg_map[group] = (requested, store)
    world.pg_backend_config[group] = str(c10d.BackendConfig(requested))


def _say(requested: str) -> None:
    name = "gloo" if requested == c10d.Backend.UNDEFINED else requested
    print(
        f"symm_cp: process groups of {name} use the backend symm_cp for CPU tensors",
        file=sys.stderr,
        flush=True,
    )
