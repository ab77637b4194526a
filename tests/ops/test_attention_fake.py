"""Fake kernels of attention: the shapes and strides of real results; dynamic shapes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from symm_cp.schedule import head_tail_order
from tests.exhaustive import exhaustive, pairs

OPS = torch.ops.symm_mem


def options(world_size: int) -> list[dict[str, Any]]:
    return [
        {},
        {"is_causal": True, "chunk_order": list(head_tail_order(world_size)), "scale": 0.3},
        {"enable_gqa": True, "cu_seqlens": torch.tensor([0, 3, 8 * world_size])},
        {"window_left": 2, "window_right": 1, "chunk_lengths": [8] * world_size},
        {"document_edges": [0, 5, 8 * world_size]},
        {
            "softcap": 1.5,
            "sinks": torch.randn(4),
            "bias": torch.randn(4, 16 * world_size - 1),
            "dropout_p": 0.2,
            "dropout_seed": torch.tensor([7]),
            "query_chunk_lengths": [8] * world_size,
        },
        {
            "sinks": torch.randn(4, dtype=torch.float64),
            "document_ids": torch.arange(8 * world_size).view(1, -1) // 3,
            "key_mask": torch.arange(8 * world_size).expand(2, -1) % 5 > 0,
            "is_causal": True,
        },
    ]


def options_of(length: int, world_size: int) -> list[dict[str, Any]]:
    """Options whose sizes and numbers follow from how many positions each rank holds."""
    whole, positions = length * world_size, torch.arange(length * world_size)
    return [
        {"window_left": 3, "window_right": 1, "chunk_lengths": [length] * world_size},
        {"document_edges": [0, length // 2, whole]},
        {
            "softcap": 1.5,
            "bias": torch.ones(4, 2 * whole - 1).cumsum(1) / whole,
            "dropout_p": 0.2,
            "dropout_seed": torch.tensor([7]),
            "query_chunk_lengths": [length] * world_size,
        },
        {"document_ids": positions.view(1, -1) // 3, "key_mask": positions.expand(2, -1) % 5 > 0},
    ]


@exhaustive
@pytest.mark.parametrize("number", range(len(options_of(8, 2))))
@pytest.mark.ranks(2)
def test_dynamic_shapes(group: dist.ProcessGroup, number: int) -> None:
    """One graph serves all lengths, from which it computes the options."""
    torch._dynamo.reset()
    counters.clear()
    name, size = group.group_name, group.size()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        chosen = options_of(q.shape[2], size)[number]
        return OPS.fused_all_gather_attention(q, k, v, name, **chosen)[0]

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (8, 12, 20):
        given = [torch.randn(2, 4, length, 6, requires_grad=True) for _ in range(3)]
        results = []
        for call in (attend, compiled):
            out = call(*given)
            results.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])


def described(tensors: Any) -> list[tuple[Any, ...]]:
    return [(t.shape, t.stride(), t.dtype, t.device.type) for t in tensors]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.ranks
def test_fake_results_are_like_real_ones(group: dist.ProcessGroup, world_size: int) -> None:
    name = group.group_name
    plain = torch.randn(2, 4, 8, 6)
    rows_first = torch.randn(2, 8, 4, 6).transpose(1, 2)
    packed = torch.randn(2, 8, 3, 4, 6)[:, :, 1].transpose(1, 2)
    apart = torch.randn(2, 4, 8, 12)[..., ::2]
    turned = torch.randn(2, 4, 6, 8).transpose(2, 3)
    wide = torch.randn(2, 4, 8, 11)
    queries = (plain, rows_first, packed, apart, turned)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    several = options(group.size())
    # Each form with all options, and each dtype with all forms and all options.
    for form, number, dtype in pairs(range(len(queries)), range(len(several)), dtypes):
        query, key, chosen = queries[form].to(dtype), plain.to(dtype), several[number]
        value = random.choice([plain, wide, wide[..., :6]]).to(dtype)
        real = OPS.fused_all_gather_attention(query, key, value, name, **chosen)
        grads = OPS.fused_all_gather_attention_backward(
            real[0], query, key, value, *real, name, **chosen
        )
        mode = FakeTensorMode()
        fake = {
            n: mode.from_tensor(o) if isinstance(o, torch.Tensor) else o for n, o in chosen.items()
        }
        a, b, c = (mode.from_tensor(t) for t in (query, key, value))
        with mode:
            found = OPS.fused_all_gather_attention(a, b, c, name, **fake)
            found_grads = OPS.fused_all_gather_attention_backward(
                found[0], a, b, c, *found, name, **fake
            )
        assert described(found) == described(real), (query.stride(), chosen)
        assert described(found_grads) == described(grads), (query.stride(), chosen)


def test_edges_on_the_host_for_tensors_on_a_gpu() -> None:
    """`torch.compile` traces edges as a CPU tensor next to GPU tensors, or as ints."""
    edges: list[dict[str, Any]] = [
        {"cu_seqlens": torch.tensor([0, 3, 8])},
        {"document_edges": [0, 3, 8]},
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 4, 8, 6, device="cuda")
        for chosen in edges:
            out, lse = OPS.fused_all_gather_attention(q, q, q, "0", **chosen)
            grads = OPS.fused_all_gather_attention_backward(out, q, q, q, out, lse, "0", **chosen)
            assert {t.device.type for t in (out, lse, *grads)} == {"cuda"}
