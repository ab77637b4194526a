"""Ranks on GPUs, which they may share: graphs, streams, polling, masks and compiled code.

The ops themselves, eagerly, are tested where their marker `devices` names CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import symm_cp
from symm_cp import inductor, native
from symm_cp.testing import Ranks
from tests.device import devices

pytestmark = devices("cuda")
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])
FLOAT8 = torch.float8_e4m3fn
OPS = torch.ops.symm_mem
wait = torch.ops._c10d_functional.wait_tensor


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error relative to the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


@dataclass(frozen=True)
class Call:
    """An op on tensors that stay where they are."""

    inputs: list[torch.Tensor]
    run: Callable[[], list[torch.Tensor]]

    def refresh(self) -> None:
        """Gives the inputs other values."""
        for tensor in self.inputs:
            tensor.data.copy_(torch.randn(tensor.shape).to(tensor.dtype))


def calls(group: dist.ProcessGroup) -> dict[str, Call]:
    """Every op, forward and backward."""
    W, name, half = group.size(), group.group_name, torch.bfloat16
    torch.manual_seed(torch.initial_seed() + group.rank())
    x, wide = torch.randn(64, 32).to(half), torch.randn(64 * W, 32).to(half)
    w = torch.randn(32, 48).to(half)
    symmetric = symm_mem.empty(64, 32, dtype=half, device=x.device).copy_(x)
    symm_cp.read_in_place(symmetric, group)
    x8, wide8 = x.to(FLOAT8), wide.to(FLOAT8)
    w8 = torch.randn(48, 32).to(FLOAT8).t()
    scale, rows, columns = torch.ones(()), torch.rand(64, 1) + 0.5, torch.rand(1, 48) + 0.5
    q, k, v = (torch.randn(1, 4, 64, 64).to(half) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    heads = [t.clone().requires_grad_() for t in (q, k, v)]

    def gradients() -> list[torch.Tensor]:
        up = symm_cp.all_gather_matmul(*leaves, group=group)
        down = symm_cp.matmul_reduce_scatter(up, leaves[1].t(), group=group)
        return list(torch.autograd.grad(down.float().square().sum(), leaves))

    def attention_gradients() -> list[torch.Tensor]:
        out = symm_cp.all_gather_attention(*heads, group=group, is_causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), heads)]

    return {
        "all-gather-matmul": Call([x, w], lambda: [symm_cp.all_gather_matmul(x, w, group=group)]),
        "all-gather-matmul, symmetric": Call(
            [symmetric, w], lambda: [symm_cp.all_gather_matmul(symmetric, w, group=group)]
        ),
        "matmul-reduce-scatter": Call(
            [wide, w], lambda: [symm_cp.matmul_reduce_scatter(wide, w, group=group)]
        ),
        "scaled all-gather-matmul": Call(
            [x8, rows],
            lambda: [
                symm_cp.scaled_all_gather_matmul(
                    x8, w8, rows, columns, group=group, out_dtype=half
                )[1]
            ],
        ),
        "scaled matmul-reduce-scatter": Call(
            [wide8],
            lambda: [
                symm_cp.scaled_matmul_reduce_scatter(
                    wide8, w8, scale, scale, group=group, out_dtype=half
                )
            ],
        ),
        "low-contention all-gather": Call(
            [x], lambda: [wait(OPS._low_contention_all_gather(x, name))]
        ),
        "low-contention reduce-scatter": Call(
            [wide], lambda: [wait(OPS._low_contention_reduce_scatter(wide, "avg", name))]
        ),
        "all-gather of keys and values": Call(
            [k, v], lambda: list(symm_cp.all_gather_kv(k, v, group=group))
        ),
        "gradients": Call(leaves, gradients),
        "attention and gradients": Call(heads, attention_gradients),
    }


def replays(group: dist.ProcessGroup) -> None:
    here = torch.get_default_device()
    for name, call in calls(group).items():
        symm_cp.reserve(group, 1 << 20, device=here)  # for one more graph
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries allocate memory at first use
                call.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call.run()
        for _ in range(20):
            call.refresh()
            graph.replay()
            found = [t.clone() for t in captured]
            for got, want in zip(found, call.run(), strict=True):
                # Gradients are added up in another order.
                assert error(got, want) <= 2**-6, name


@WORLD_SIZES
def test_graphs_are_replayed_with_other_inputs(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, replays, timeout=300)


@pytest.mark.ranks(2)
def test_no_workspace_is_made_in_a_capture(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(1 << 12, 256), torch.randn(256, 16)
    symm_cp.all_gather_matmul(x[:16], w, group=group)
    with (
        pytest.raises(RuntimeError, match=r"symm_cp\.reserve\(group, \d+"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        symm_cp.all_gather_matmul(x, w, group=group)
    torch.cuda.synchronize()
    out = symm_cp.all_gather_matmul(x, w, group=group)
    assert out.shape == (group.size() << 12, 16)


@WORLD_SIZES
@pytest.mark.ranks
def test_callers_may_use_other_streams(group: dist.ProcessGroup, world_size: int) -> None:
    late = torch.randn(4096, 4096)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(12):
        stream = streams[turn % 3]
        stream.wait_stream(streams[(turn - 1) % 3])
        with torch.cuda.stream(stream):
            for _ in range(3):
                late = (late @ late).softmax(-1)  # delays the ops below
            x = torch.full((64, 32), float(turn + group.rank())) + late[0, 0] * 0
            if turn % 2:
                out = symm_cp.all_gather_matmul(x, torch.eye(32), group=group)
            else:
                out = wait(OPS._low_contention_all_gather(x, group.group_name))
            x.fill_(-1.0)  # the op has read it by then
            found = out.view(group.size(), 64, 32)[:, 0, 0].tolist()
        assert found == [float(turn + rank) for rank in range(group.size())]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.ranks
def test_matmuls_by_tiles(group: dist.ProcessGroup, world_size: int) -> None:
    """Makes several calls: the number that kernels and streams compare differs in each."""
    W = group.size()
    torch.manual_seed(torch.initial_seed() + group.rank())
    for dtype in (torch.bfloat16, torch.float32):
        x, w, v = torch.randn(300, 264), torch.randn(264, 520), torch.randn(520, 136)
        x, w, v = (t.to(dtype) for t in (x, w, v))
        for turn in range(4):
            x.add_(turn)
            results = []
            for algorithm in ("whole", "tiles"):
                with symm_cp.tuning.forced(algorithm), symm_cp.tuning.listening() as choices:
                    up = symm_cp.all_gather_matmul(x, w, group=group)
                    results += [up, symm_cp.matmul_reduce_scatter(up, v, group=group)]
                assert {choice.algorithm for choice in choices.values()} == {algorithm}
            for got, want in zip(results[2:], results[:2], strict=True):
                assert error(got, want) <= W * (2**-7 if dtype == torch.bfloat16 else 2**-9)


def masked(group: dist.ProcessGroup, seed: int) -> None:
    W, rank = group.size(), group.rank()
    length = 128 * W + 5
    here = torch.get_default_device()
    generator = torch.Generator(here).manual_seed(seed)
    whole = [torch.randn(1, 4, length, 64, generator=generator).half() for _ in range(4)]
    at = torch.arange(length)
    visible = (at[:, None] >= at) | (at < 7)
    full = [t.clone().requires_grad_() for t in whole[:3]]
    expected = F.scaled_dot_product_attention(*full, attn_mask=visible)
    wanted = [expected, *torch.autograd.grad(expected, full, whole[3])]
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) | (j < 7), None, None, length, length, device=here
    )
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))
    balancer = symm_cp.HeadTail(length, W)
    rows = balancer.positions(rank).to(here)
    parts = [t[:, :, rows].requires_grad_() for t in whole[:3]]
    with symm_cp.context_parallel(mesh, load_balancer=balancer):
        for out in (
            F.scaled_dot_product_attention(*parts, attn_mask=visible),
            flex_attention(*parts, block_mask=mask),
        ):
            found = [out, *torch.autograd.grad(out, parts, whole[3][:, :, rows])]
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want[:, :, rows], rtol=2**-6, atol=2**-6)


@WORLD_SIZES
def test_masks_within_context_parallel(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, masked, int(torch.randint(1 << 30, ())), timeout=300)


def compiled(group: dist.ProcessGroup) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (funcol.all_gather_tensor_autograd(t, 2, group) for t in (k, v))
        return F.scaled_dot_product_attention(q, keys, values)

    def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        wide = funcol.all_gather_tensor_autograd(x, 0, group) @ up
        return funcol.reduce_scatter_tensor_autograd(wide.relu() @ down, "sum", 0, group)

    def fused_feed_forward(
        x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, group: dist.ProcessGroup
    ) -> torch.Tensor:
        wide = symm_cp.all_gather_matmul(x, up, group=group)
        return symm_cp.matmul_reduce_scatter(wide.relu(), down, group=group)

    torch.manual_seed(torch.initial_seed() + group.rank())
    half = torch.bfloat16
    heads = [torch.randn(1, 4, 128, 64).to(half).requires_grad_() for _ in range(3)]
    shapes = ((128, 64), (64, 128), (128, 64))
    matrices = [torch.randn(shape).to(half).requires_grad_() for shape in shapes]
    cases = (
        (attend, symm_cp.all_gather_attention, heads, 1),
        (feed_forward, fused_feed_forward, matrices, 2),
    )
    for function, reference, inputs, count in cases:
        out = reference(*inputs, group=group)
        wanted = [out, *torch.autograd.grad(out.float().square().sum(), inputs)]
        with inductor.enable(min_flops=0):
            report = inductor.explain(function, *inputs)
            assert len([d for d in report.decisions if d.fused_into]) >= count, report
            out = torch.compile(function)(*inputs)
            found = [out, *torch.autograd.grad(out.float().square().sum(), inputs)]
        for got, want in zip(found, wanted, strict=True):
            assert error(got, want) <= 2**-5, function.__name__


@pytest.mark.parametrize("world_size", [2])
def test_compiled_code_is_fused(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, compiled, timeout=600)


def graphed_by_torch(group: dist.ProcessGroup) -> None:
    """The first call of a shape warms up, the second is captured, later ones are replays."""

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        wide = symm_cp.all_gather_matmul(x, up, group=group)
        return symm_cp.matmul_reduce_scatter(wide.relu(), down, group=group)

    torch.manual_seed(torch.initial_seed() + group.rank())
    shapes = ((128, 64), (64, 128), (128, 64))
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):
        inputs[0].copy_(torch.randn(shapes[0]))
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(*inputs).clone()
        assert error(found, block(*inputs)) <= 2**-6


@pytest.mark.parametrize("world_size", [2])
def test_graphs_of_torch_compile(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, graphed_by_torch, timeout=300)


@pytest.mark.gpu
def test_tune(tmp_path: Path) -> None:
    """Two ranks, which share a GPU if need be."""
    (tmp_path / native.cache_key()).symlink_to(native.library_path().parent)
    command = [sys.executable, "-m", "symm_cp", "tune", "--shapes", "64x64x64", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--dtype", "bfloat16", "--seconds", "0.05"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYMM_CP_BUILD_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = torch.cuda.get_device_name()
    (table,) = tmp_path.glob("tuned_2_*.json")
    assert all(key.startswith(name) for key in json.loads(table.read_text()))
