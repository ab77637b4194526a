"""Stand-ins for the parts of vLLM and SGLang that the plug-ins use, if these are not installed.

The engines bring some 100 packages, so CI has none of them. Where one is installed, the tests use
its own classes instead.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch.distributed as dist

from symm_cp.testing import Ranks

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="sglang is not installed")


class DeviceCommunicatorBase:
    """Has the constructor of vLLM 0.32's class in `base_device_communicator.py`, and no more."""

    def __init__(self, cpu_group, device, device_group, unique_name="", use_all2all=False):
        self.device, self.cpu_group, self.device_group = device, cpu_group, device_group
        self.rank_in_group, self.world_size = cpu_group.rank(), cpu_group.size()
        self.ranks = dist.get_process_group_ranks(cpu_group)
        self.use_all2all = unique_name.split(":")[0] == "ep" and use_all2all
        self.all2all_manager = None

    def dispatch(self, hidden_states, topk_weights, topk_ids, *_):
        return hidden_states, topk_weights, topk_ids

    def combine(self, hidden_states, *_):
        return hidden_states


@contextlib.contextmanager
def modules(**contents: dict[str, object]) -> Iterator[None]:
    """Makes modules importable inside; `a__b={"name": value}` is a module a.b with this name."""
    made: dict[str, ModuleType] = {}
    for name, names in contents.items():
        parts = name.split("__")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            made.setdefault(path, ModuleType(path))
            if count > 1:  # as an import of a submodule does, unless the package has the name
                parent = made[".".join(parts[: count - 1])]
                vars(parent).setdefault(parts[count - 1], made[path])
        vars(made[".".join(parts)]).update(names)
    before = set(sys.modules)
    # Not `mock.patch.dict(sys.modules)`: it would also forget libraries that are first imported
    # inside, and some (Triton) end a process that imports them again.
    with pytest.MonkeyPatch.context() as patch:
        for path, module in made.items():
            patch.setitem(sys.modules, path, module)
        try:
            yield
        finally:
            for path in sys.modules.keys() - before:
                if path.startswith("symm_cp.integrations."):  # it refers to stand-ins
                    del sys.modules[path]


def vllm_communicator() -> type:
    """Returns the communicator's class, derived from vLLM's base class or from the stub."""
    path = "symm_cp.integrations.vllm.communicator"
    if HAS_VLLM:
        return importlib.import_module(path).SymmCommunicator
    base = "vllm__distributed__device_communicators__base_device_communicator"
    with modules(**{base: {"DeviceCommunicatorBase": DeviceCommunicatorBase}}):
        return importlib.import_module(path).SymmCommunicator


def vllm_platform(platform: object) -> contextlib.AbstractContextManager[None]:
    """Makes `platform` vLLM's current platform inside."""
    return modules(
        vllm__logger={"init_logger": logging.getLogger},
        vllm__platforms={"current_platform": platform},
    )


def run_in_new_processes(ranks: Ranks, world_size: int, function: Callable[..., None]) -> None:
    """Runs a function on ranks in new processes: engines keep state in their modules."""
    with ranks.own(world_size, function) as running:
        failures = [outcome.failure for outcome in running.outcomes(120)]
    assert not any(failures), "\n".join(failures)
