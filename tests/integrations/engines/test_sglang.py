"""The plug-in for SGLang on CPU, and SGLang's sequence parallelism on our fused ops.

Where SGLang is installed, its own hooks, `GroupCoordinator` and `layernorm_sp.py` run as well.
"""

from __future__ import annotations

import enum
import os
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp.integrations import sglang as plugin
from symm_cp.testing import Ranks
from tests.backend.common import shared, small_integers, strided
from tests.exhaustive import some
from tests.integrations.engines.stubs import modules, needs_sglang, run_in_new_processes
from tests.integrations.engines.test_vllm import SIZES, everybodys, told


class Registry:
    """Stand-in for SGLang's hook registry, with the parts that the plug-in uses."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}

    def register(self, target: str, hook: Any, hook_type: Any) -> None:
        assert hook_type is HookType.AROUND
        self.hooks[target.removeprefix("sglang.srt.distributed.parallel_state.")] = hook


class HookType(enum.Enum):
    AROUND = "around"


def hooks() -> dict[str, Any]:
    registry = Registry()
    names = {"HookRegistry": registry, "HookType": HookType}
    with modules(sglang__srt__plugins__hook_registry=names):
        plugin.register()
    return registry.hooks


def test_the_default_backend_of_cpu_alone_changes() -> None:
    hook = hooks()["get_default_distributed_backend"]
    choices = {"cpu": "gloo", "cuda": "nccl", "xpu": "gloo"}
    assert hook(choices.get, "cpu") == "symm_cp"
    assert hook(choices.get, "cuda") == "nccl"
    assert hook(choices.get, "xpu") == "gloo"
    assert hook({"cpu": "others"}.get, "cpu") == "others"


def coordinator(group: dist.ProcessGroup) -> Any:
    return types.SimpleNamespace(device_group=shared(group), rank_in_group=group.rank())


@pytest.mark.parametrize("world_size", some(2, 4, of=[2, 3, 4]))
@pytest.mark.ranks
def test_parts_of_any_length(group: dist.ProcessGroup, world_size: int) -> None:
    ours, rank, size = coordinator(group), group.rank(), group.size()
    found = {name.rpartition(".")[2]: hook for name, hook in hooks().items()}
    gather, scatter = found["all_gatherv"], found["reduce_scatterv"]

    def original(*_: Any) -> None:
        raise AssertionError("SGLang's own needs NCCL")

    for sizes in SIZES[size]:
        inputs = [
            small_integers((sizes[rank], 3), dtype, rank)
            for dtype in (torch.bfloat16, torch.int64, torch.float32)
        ]
        expected = [torch.cat(everybodys(group, x)) for x in inputs]
        for result, whole in zip(gather(original, ours, inputs, sizes), expected, strict=True):
            assert torch.equal(result, whole)
        out = torch.empty_like(expected[2])
        (result,) = gather(original, ours, strided(inputs[2]), sizes, output=out)
        assert result is out
        assert torch.equal(out, expected[2])
        x = small_integers((sum(sizes), 3), torch.float32, rank)
        part = sum(everybodys(group, x)).split(sizes)[rank]
        assert torch.equal(scatter(original, ours, x, sizes=sizes), part)
        out = torch.empty_like(part)
        assert scatter(original, ours, x, out, sizes) is out
        assert torch.equal(out, part)
    x = small_integers((size, 3), torch.float32, rank)
    assert torch.equal(gather(original, ours, x)[0], torch.cat(everybodys(group, x)))
    assert torch.equal(scatter(original, ours, x), sum(everybodys(group, x))[rank : rank + 1])
    meta = torch.empty(2, device="meta")  # on other devices SGLang's own functions run
    assert gather(lambda *args: args, ours, meta) == (ours, meta, None, None)
    assert scatter(lambda *args: args, ours, meta) == (ours, meta, None, None)
    wrong = [1] * size if rank == 0 else [2] * size
    rows = torch.ones(2, 3)
    assert "all_gatherv: input of shape (2, 3) on rank 0" in told(
        lambda: gather(original, ours, rows, wrong)
    )
    assert "reduce_scatterv: sizes=[1" in told(
        lambda: scatter(original, ours, torch.ones(2 * size, 3), sizes=wrong)
    )
    assert torch.equal(gather(original, ours, rows)[0], torch.ones(2 * size, 3))


def uses_sglangs_own(_: dist.ProcessGroup) -> None:
    """Runs SGLang's own hooks, `GroupCoordinator` and `layernorm_sp.py`."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # as users set it to run SGLang on CPU
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import layernorm_sp
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    HookRegistry.apply_hooks()
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = parallel_state.get_default_distributed_backend("cpu")
    assert backend == "symm_cp"
    group = parallel_state.GroupCoordinator(
        [list(range(size))], rank, backend, *(False,) * 6, group_name="tp"
    )
    assert dist.get_backend(group.device_group) == "symm_cp"
    x = small_integers((4, 6), torch.float32, rank)
    inputs = everybodys(dist.group.WORLD, x)
    assert torch.equal(group.all_reduce(x.clone()), sum(inputs))
    assert torch.equal(group.all_gather(x, dim=1), torch.cat(inputs, 1))
    whole = torch.empty(4 * size, 6)
    group.all_gather_into_tensor(whole, x)
    assert torch.equal(whole, torch.cat(inputs))
    part = torch.empty(4, 6)
    group.reduce_scatter_tensor(part, whole)
    assert torch.equal(part, size * x)
    sizes = SIZES[size][1]
    rows = small_integers((sizes[rank], 3), torch.float32, rank)
    (found,) = group.all_gatherv(rows, sizes)
    assert torch.equal(found, torch.cat(everybodys(dist.group.WORLD, rows)))
    assert torch.equal(group.reduce_scatterv(found, sizes=sizes), size * rows)

    class Linear:  # like SGLang's unquantised linears
        bias, tp_group, quant_method = None, group, None

        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

    parallel = types.SimpleNamespace(tp_group=group)
    tokens, features, hidden = 2 * size - 1, 8, 6  # one row of padding
    full = torch.randn(tokens, features, generator=torch.Generator().manual_seed(1))
    up = torch.randn(hidden, features, dtype=torch.float64).bfloat16()
    down = torch.randn(features, hidden, dtype=torch.float64).bfloat16()
    with (
        mock.patch.object(layernorm_sp, "get_parallel", return_value=parallel),
        mock.patch.object(layernorm_sp, "sp_fused_matmul_eligible", return_value=True),
    ):
        shard = layernorm_sp.sp_entry_scatter(full.bfloat16())
        inner = layernorm_sp.column_parallel_g_matmul(Linear(up), shard, None)
        assert torch.equal(inner, full.bfloat16() @ up.t())
        out = layernorm_sp.row_parallel_gbar_matmul(Linear(down), inner, None)
        out = layernorm_sp.sp_exit_gather(out, tokens)
    product = inner.double() @ down.double().t()
    exact = sum(everybodys(dist.group.WORLD, product))
    # Two roundings to bfloat16: of each product, and of the sum.
    bound = sum(everybodys(dist.group.WORLD, inner.double().abs() @ down.double().t().abs()))
    assert (out.double() - exact).abs().le(2 * 2**-8 * bound).all()


@needs_sglang
@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
def test_sglangs_own_classes(ranks: Ranks, world_size: int) -> None:
    run_in_new_processes(ranks, world_size, uses_sglangs_own)
