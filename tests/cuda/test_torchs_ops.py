"""What symm_cp does to torch's own ops on CUDA tensors, shown by fake ones: no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem

import symm_cp
from symm_cp import native
from symm_cp.cuda import Verdict
from symm_cp.cuda.gpu import CudaDevice
from tests.cuda.simulated import simulated_device, simulation

# What a user of torch's ops sees, before and after the import.
_SEEN = """
import json, logging, warnings
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
NAMES = sorted(
    s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("symm_mem:")
)


def kernels(key):
    found = {}
    for op in NAMES:
        lines = torch._C._dispatch_dump_table(f"symm_mem::{op}").splitlines()
        found[op] = next((line for line in lines if line.startswith(f"{key}: ")), "")
    return found


def compiled(function, *shapes):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return (function(*tensors),)

    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda") for shape in shapes]
        module, _ = aot_export_module(Module(), tensors, trace_joint=False)
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def under_autocast(op, *args):
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            x = torch.empty(32, 32, device="cuda")
            result = op(x, *[[x] if arg == "[x]" else x if arg == "x" else arg for arg in args])
    finally:
        torch.set_autocast_enabled("cuda", False)
    return str((result[1][0] if isinstance(result, tuple) else result).dtype)


def blocks_scaled():
    with FakeTensorMode(), torch.device("cuda"):
        a, b = torch.empty(128, 256), torch.empty(256, 256)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        result = ops.fused_all_gather_scaled_matmul(
            a, [b], torch.empty(256, 2), [torch.empty(2, 2)], 0, name, [None], [None],
            [torch.bfloat16], [False],
        )
    return str(result[1][0].shape)


def shuffled():
    with FakeTensorMode(), torch.device("cuda"):
        x, splits = torch.empty(4, 4), torch.empty(4, dtype=torch.int64)
        return str(ops.all_to_all_vdev_2d(x, x, splits, torch.stack([splits, splits]), name))


def seen():
    return {
        "kernels": kernels("CUDA"),
        "autocast": kernels("AutocastCUDA"),
        "autograd": kernels("AutogradCUDA"),
        "copy": compiled(lambda b, x: ops.one_shot_all_reduce_copy(b, x, "sum", name), (4,), (4,)),
        "remote": compiled(lambda x: ops.get_remote_tensors(x, name)[1], (4, 4)),
        "gather": under_autocast(ops.fused_all_gather_matmul, "[x]", 0, name),
        "scatter": under_autocast(ops.fused_matmul_reduce_scatter, "x", "sum", 0, name),
        "blocks": blocks_scaled(),
        "shuffled": shuffled(),
    }


before = seen()
import symm_cp
after = seen()


class Recording(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        called.append(str(op))
        return op(*args, **(kwargs or {}))


# On "meta", for a CPU build has no autograd for CUDA tensors.
called, gradients = [], {}
with torch.device("meta"), Recording():
    x, buffer = torch.empty(4, requires_grad=True), torch.empty(4)
    for op, args in (("one_shot_all_reduce", (x,)), ("one_shot_all_reduce_copy", (buffer, x))):
        reduced = getattr(ops, op)(*args, "sum", name)
        outer = torch.empty(4, requires_grad=True)
        called.clear()
        (grad,) = torch.autograd.grad(reduced, x, outer, create_graph=True)
        torch.autograd.grad(grad, outer, torch.empty(4))
        gradients[op] = list(called)
    for op, args in (("all_gather", ()), ("reduce_scatter", ("sum",))):
        result = getattr(ops, f"_low_contention_{op}")(x, *args, name)
        called.clear()
        torch.autograd.grad(result, x, torch.empty_like(result))
        gradients[op] = list(called)
print(json.dumps([before, after, gradients]))
"""


@pytest.fixture(scope="module")
def import_seen() -> list[Any]:
    """Torch's ops before and after the import, and the ops that the added gradients call."""
    done = subprocess.run(
        [sys.executable, "-c", _SEEN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    seen: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.exhaustive
def test_importing_leaves_torchs_cuda_ops_as_they_are(import_seen: list[Any]) -> None:
    before, after, _ = import_seen
    # Gradients that work with torch's kernels as well are added; torch has none.
    added = {op for op in before["autograd"] if before["autograd"][op] != after["autograd"][op]}
    assert added == {
        "fused_all_gather_matmul",
        "fused_matmul_reduce_scatter",
        "one_shot_all_reduce",
        "one_shot_all_reduce_copy",
        "_low_contention_all_gather",
        "_low_contention_reduce_scatter",
    }
    # It takes no tensor, so our CPU kernel counts for all devices where torch has no kernel.
    assert before["kernels"].pop("nccl_wait_signal", "") == ""
    after["kernels"].pop("nccl_wait_signal", None)
    assert {**after, "autograd": 0} == {**before, "autograd": 0}


@pytest.mark.exhaustive
def test_gradients_need_no_symmetric_memory(import_seen: list[Any]) -> None:
    # torch's kernels would refuse a gradient, which is an ordinary tensor.
    gradients = import_seen[2]
    for op in ("one_shot_all_reduce", "one_shot_all_reduce_copy"):
        calls = [called for called in gradients[op] if "reduce" in called or "wait" in called]
        of_a_copy = op.removeprefix("one_shot_all_reduce")
        assert calls == [
            f"symm_mem._all_reduce{of_a_copy}_backward.default",
            "symm_mem._all_reduce_backward.default",
        ]
    for op in ("all_gather", "reduce_scatter"):
        assert f"symm_mem._low_contention_{op}_backward.default" in gradients[op], gradients


def _call_cuda_kernel(name: str, *args: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(torch.ops.symm_mem, name).default.redispatch(keys, *args)


@pytest.mark.ranks(2)
def test_without_a_passed_self_test_torchs_kernels_stay(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    expected = symm_cp.matmul_reduce_scatter(x, w, group=group)
    mock, torchs = unittest.mock, torch.full((2,), 7.0)
    lines: list[str] = []
    with (
        mock.patch.object(CudaDevice, "driver", simulated_device().driver),
        mock.patch.object(torch_symm_mem, "_fused_matmul_reduce_scatter", return_value=torchs),
        mock.patch.object(native, "say", lines.append),
        simulation(plan_at=-1) as made,
        symm_cp.override_cuda_ops(),
    ):
        for verdict in (Verdict(), Verdict(passed=False, reason="the trial timed out")):
            name = dist.new_group([0, 1]).group_name
            with mock.patch.object(made, "verdict", lambda group, verdict=verdict: verdict):
                for _ in range(2):
                    got = _call_cuda_kernel("fused_matmul_reduce_scatter", x, w, "sum", 0, name)
                    torch.testing.assert_close(got, expected if verdict.passed else torchs)
    (line,) = lines
    assert line.startswith("override_cuda_ops: torch's kernels stay in use for group")
    assert line.endswith("the trial timed out")
