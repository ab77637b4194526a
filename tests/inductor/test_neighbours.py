"""Which calls count as collectives, and what lies between them and a matmul."""

from __future__ import annotations

import operator

import torch
import torch.nn.attention.varlen  # defines its op
from torch.library import _scoped_library

from symm_cp.inductor.decisions import recording
from symm_cp.inductor.neighbours import record_others, why_attention_is_not_fused

c10d = torch.ops._c10d_functional


def test_waits_of_several_tensors_are_no_collectives() -> None:
    """torch 2.15 waits for coalesced collectives with `wait_tensors`, which older versions lack."""
    with _scoped_library("_c10d_functional", "FRAGMENT") as library:
        if not hasattr(c10d, "wait_tensors"):
            library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
        graph = torch.fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        gathered = graph.call_function(
            c10d.all_gather_into_tensor_coalesced.default, ([x], 2, "group")
        )
        items = [graph.call_function(operator.getitem, (gathered, 0))]
        waited = graph.call_function(c10d.wait_tensors.default, (items,))
        first = graph.call_function(operator.getitem, (waited, 0))
        graph.output(graph.call_function(torch.ops.aten.mm.default, (first, w)))
        with recording() as report:
            record_others(graph)
    (decision,) = report.decisions
    assert decision.collective == gathered.name
    assert "mm_default is next to it, and it takes several tensors at once" in decision.reason


def test_attention_to_gathered_keys_is_named() -> None:
    """`varlen_attn` has no kernel on CPU, so no graph of it can run here."""
    graph = torch.fx.Graph()
    q, k, edges = (graph.placeholder(name) for name in ("q", "k", "edges"))
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (k, 2, "group"))
    waited = graph.call_function(c10d.wait_tensor.default, (gathered,))
    moved = graph.call_function(torch.ops.aten.permute.default, (waited, [1, 0, 2]))
    assert why_attention_is_not_fused(waited) == ""
    attention = torch.ops.torch_attn._varlen_attn.default
    graph.call_function(attention, (q, moved, moved, edges, edges, 4, 4))
    assert "it feeds varlen_attn, which is" in why_attention_is_not_fused(waited)
