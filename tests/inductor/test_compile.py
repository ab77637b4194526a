"""The passes inside Inductor: whole models, caches, options and reports."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx import Graph
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

import symm_cp
from symm_cp import inductor
from symm_cp.inductor.options import Options
from symm_cp.inductor.passes import fuse_post_grad
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.inductor.graphs import AG, ATTENTION, RS, SUM, close, compare, compare_code, run

DIM = 16


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


@contextmanager
def compiling() -> Iterator[None]:
    with warnings.catch_warnings(), fresh_cache():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A feed-forward block behind a norm, as sequence-parallel models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate = nn.Linear(DIM, 4 * DIM, bias=False)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


def with_dtensor(group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Block(), mesh_of(group), plan)


class Functional(nn.Module):
    """The same with functional collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(group.rank())
        self.group = group
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = funcol.all_gather_tensor_autograd(self.norm(x), 1, self.group)
        mixed = self.down(F.silu(self.gate(full)) * self.up(full))
        return funcol.reduce_scatter_tensor_autograd(mixed, "sum", 1, self.group)


class Llama(nn.Module):
    """A decoder layer of transformers' Llama, with the positions that it needs."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.layer = LlamaDecoderLayer(config, 0)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.layer(x, position_embeddings=self.rotary(x, positions))
        return output[0] if isinstance(output, tuple) else output


def llama(group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    mesh = mesh_of(group)
    model = Llama()
    plan = {
        "layer.input_layernorm": SequenceParallel(),
        "layer.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "layer.self_attn.q_proj": ColwiseParallel(),
        "layer.self_attn.k_proj": ColwiseParallel(),
        "layer.self_attn.v_proj": ColwiseParallel(),
        "layer.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "layer.post_attention_layernorm": SequenceParallel(),
        "layer.mlp.gate_proj": ColwiseParallel(input_layouts=Shard(1)),
        "layer.mlp.up_proj": ColwiseParallel(input_layouts=Shard(1)),
        "layer.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(model, mesh, plan)


def without_sequence_parallelism(group: dist.ProcessGroup, shared: bool) -> nn.Module:
    """Column-parallel layers all-reduce gradients separately, or their sum if `shared`."""
    torch.manual_seed(0)
    plan: dict[str, Any] = {
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    if shared:
        whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
        plan["norm"] = PrepareModuleOutput(**whole, use_local_output=False)
    return parallelize_module(Block(), mesh_of(group), plan)


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "dtensor": with_dtensor,
    "functional": Functional,
    "two layers": partial(without_sequence_parallelism, shared=False),
    "shared input": partial(without_sequence_parallelism, shared=True),
    "llama": llama,
}


def trains_as_eager(group: dist.ProcessGroup, name: str) -> None:
    model, W = MODELS[name](group), group.size()
    width, extra = (32, (torch.arange(8 * W).unsqueeze(0),)) if name == "llama" else (DIM, ())
    x = torch.randn(2, 8, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    # Without code generation, which takes a minute for four ranks on two cores.
    compiled = compare(lambda x: model(x, *extra), [x], Options(strict=True), model, within=1e-4)
    fused = [d.fused_into for d in compiled.report.fused]
    assert fused, str(compiled.report)
    if name in ("two layers", "shared input"):
        assert fused == [SUM, SUM], str(compiled.report)  # with `down`'s bias; of two gradients
    assert not compiled.report.left, str(compiled.report)
    assert not [op for op in compiled.ops if "_c10d_functional" in op]


def generates_code(group: dist.ProcessGroup) -> None:
    model = Functional(group)
    code = compare_code(model, [torch.randn(2, 8, DIM, requires_grad=True)], model, within=1e-4)
    assert f"symm_mem.{AG}" in code
    assert f"symm_mem.{RS}" in code
    assert "symm_mem._fused_matmuls_reduce_scatter" in code
    assert "_c10d_functional.all_gather" not in code
    assert "_c10d_functional.reduce_scatter" not in code


@pytest.mark.exhaustive
def test_generated_code_has_the_fused_ops(ranks: Ranks) -> None:
    ranks.run(2, generates_code, timeout=300)


OFTEN = [(2, name) for name in MODELS if name != "shared input"]
REST = [(2, "shared input"), *((4, name) for name in MODELS if name != "llama")]


@pytest.mark.parametrize(("world_size", "name"), some(*OFTEN, of=[*OFTEN, *REST]))
def test_every_collective_is_fused(ranks: Ranks, world_size: int, name: str) -> None:
    ranks.run(world_size, trains_as_eager, name, timeout=300)


class Counting(CustomGraphPass):
    """A user's own pass."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Graph) -> None:
        self.graphs += 1

    def uuid(self) -> Any:
        return "counting"


def multiply(x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_gather_tensor(x, 0, group) @ w


def uses_caches(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    expected = multiply(x, w, group)

    def code() -> str:
        torch._dynamo.reset()
        result, sources = run_and_get_code(torch.compile(multiply), x, w, group)
        torch.testing.assert_close(result, expected)
        return "\n".join(sources)

    mine = Counting()
    with compiling(), inductor_config.patch(post_grad_custom_pre_pass=mine):
        for _ in range(2):  # the second time from the cache
            assert "fused_all_gather_matmul" not in code()
            inductor.enable()
            inductor.enable()  # changes nothing
            assert "fused_all_gather_matmul" in code()
            with inductor.enable(min_flops=1e9):
                assert "fused_all_gather_matmul" not in code()
            assert "fused_all_gather_matmul" in code()
            inductor.disable()
            inductor.disable()
            assert inductor_config.post_grad_custom_pre_pass is mine
        assert mine.graphs >= 2
        assert (
            counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"]
            > 0
        )
    passes = [inductor.Options(), inductor.Options(min_flops=1.0)]
    variants = [inductor.passes.Pass("x", lambda *_: None, o, before) for o in passes
            for before in (None, mine)]  # fmt: skip
    assert len({repr(p.uuid()) for p in variants}) == 4
    assert inductor.passes.Pass("x", lambda *_: None, passes[0], lambda graph: None).uuid() is None


@pytest.mark.exhaustive
def test_caches_passes_of_the_user_and_idempotence(ranks: Ranks) -> None:
    ranks.run(2, uses_caches, timeout=300)


def gathered(x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, group) @ w


def reports(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    with compiling():
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        both = inductor.explain(gathered, *leaves, group)
        assert [d.fused_into for d in both.decisions] == [
            "fused_all_gather_matmul",
            "fused_matmul_reduce_scatter",  # of the backward pass
        ], str(both)
        assert all(leaf.grad is None for leaf in leaves)
        gather, scatter = both.algorithms
        assert gather == "all_gather_matmul float32 8x8"
        assert scatter == "matmul_reduce_scatter float32 8x8"
        assert f"{scatter}: whole (by size)" in both.text()
        large = inductor.explain(gathered, torch.randn(40960, 256), torch.randn(256, 6), group)
        assert "all_gather_matmul float32 40960x256x6" in large.algorithms
        assert inductor_config.post_grad_custom_pre_pass is None


@pytest.mark.exhaustive
def test_explain(ranks: Ranks) -> None:
    ranks.run(2, reports, timeout=300)


def written_out(group: dist.ProcessGroup) -> None:
    """Attention written as formulas, which Inductor recognizes before the pass fuses it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (funcol.all_gather_tensor_autograd(t, 2, group) for t in (k, v))
        return torch.softmax(q @ keys.transpose(-2, -1) / 4.0, -1) @ values

    inputs = [torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(3)]
    results, grads = run(attend, inputs)
    with compiling(), inductor.enable(strict=True):
        report = inductor.explain(attend, *inputs)
        assert [d.fused_into for d in report.decisions] == [ATTENTION], report
        found, found_grads = run(torch.compile(attend), inputs)
    close([*found, *found_grads], [*results, *grads], within=1e-5)


@pytest.mark.exhaustive
def test_attention_that_is_written_out(ranks: Ranks) -> None:
    ranks.run(2, written_out, timeout=300)


def hides_collectives(group: dist.ProcessGroup) -> None:
    x, a = torch.randn(256, 64), torch.randn(256, 256)

    def fn(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        full = funcol.all_gather_tensor(x, 0, group)
        part = funcol.reduce_scatter_tensor(a, "sum", 0, group)
        for _ in range(3):
            a = torch.tanh(a @ a)
        return full.sum() + part.sum() + a.sum()

    expected = fn(x, a)
    with compiling(), inductor.enable(low_contention=True, min_bytes=1024):
        report = inductor.explain(fn, x, a)
        result, code = run_and_get_code(torch.compile(fn), x, a)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
    assert sorted(str(d.fused_into) for d in report.fused) == [
        "_low_contention_all_gather",
        "_low_contention_reduce_scatter",
    ], str(report)
    text = "\n".join(code)
    started = text.index("_low_contention_all_gather.default(")
    assert text.index("extern_kernels.mm(", started) < text.index("wait_tensor.default(", started)


@pytest.mark.exhaustive
def test_low_contention(ranks: Ranks) -> None:
    ranks.run(2, hides_collectives, timeout=300)


def compiles_whole(group: dist.ProcessGroup) -> None:
    W = group.size()
    mesh = mesh_of(group)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    balancer = symm_cp.HeadTail(8 * W, W)

    def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return symm_cp.all_gather_matmul(x * 2, w, group=group.group_name)

    def scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return symm_cp.matmul_reduce_scatter(x.repeat(W, 1), w, group=group.group_name)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return symm_cp.all_gather_attention(
            q * 2, k, v, group=group.group_name, is_causal=True, load_balancer=balancer
        )

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return plain(q, k, v)

    styled = parallelize_module(Attention(), mesh, symm_cp.ContextParallel(load_balancer=balancer))
    cases = [(matmul, (x, w)), (scatter, (x, w)), (attention, (q, k, v)), (styled, (q, k, v))]
    with compiling():
        for fn, inputs in cases:
            expected = run(fn, inputs)
            found = run(torch.compile(fn, fullgraph=True, backend="aot_eager"), inputs)
            torch.testing.assert_close(found, expected)
        compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
        with symm_cp.context_parallel(mesh, load_balancer=balancer):
            torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
        torch.testing.assert_close(compiled(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2]))
@pytest.mark.exhaustive
def test_user_code_compiles_without_graph_breaks(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, compiles_whole, timeout=300)


@pytest.mark.exhaustive
@pytest.mark.ranks(1)
def test_the_passes_take_time_in_proportion_to_the_graph(group: dist.ProcessGroup) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def layers(count: int, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            full = funcol.all_gather_tensor(x, 0, group)
            y = (full @ w).sin()
            for _ in range(20):
                y = y.cos() * 1.5
            x = funcol.reduce_scatter_tensor(y @ w, "sum", 0, group) + x
        return x

    from torch.fx.experimental.proxy_tensor import make_fx

    def seconds(count: int) -> float:
        with FakeTensorMode():
            graph = make_fx(partial(layers, count))(torch.empty(4, 4), torch.empty(4, 4)).graph
        assert len(graph.nodes) >= 45 * count
        start = time.process_time()
        fuse_post_grad(graph, Options())
        elapsed = time.process_time() - start
        assert sum("fused" in str(n.target) for n in graph.nodes) == 2 * count
        return elapsed

    seconds(2)  # imports
    few, many = seconds(28), seconds(112)
    # With 4 times the nodes, linear time grows 4 times, and quadratic time 16 times.
    assert many < 8 * few, f"{few:.2f} s and {many:.2f} s"
