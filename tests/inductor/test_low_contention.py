"""Collectives that independent work hides: graphs of fake CUDA tensors, which need no GPU."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from symm_cp.inductor.decisions import recording
from symm_cp.inductor.hide_collectives import sink_collectives
from symm_cp.inductor.options import Options
from symm_cp.testing import Ranks


def hides_on_cuda(group: dist.ProcessGroup) -> None:
    def traced(size: int) -> Graph:
        graph = Graph()
        with FakeTensorMode(), torch.device("cuda"):
            x = graph.placeholder("x")
            x.meta["val"] = torch.empty(1024, 1024, dtype=torch.bfloat16)
            a = graph.placeholder("a")
            a.meta["val"] = torch.empty(size, size, dtype=torch.bfloat16)
            calls = torch.ops._c10d_functional
            gathered = graph.call_function(
                calls.all_gather_into_tensor.default, (x, 2, group.group_name)
            )
            gathered.meta["val"] = torch.empty(2048, 1024, dtype=torch.bfloat16)
            waited = graph.call_function(calls.wait_tensor.default, (gathered,))
            waited.meta["val"] = gathered.meta["val"]
            product = graph.call_function(torch.ops.aten.mm.default, (a, a))
            product.meta["val"] = a.meta["val"]
        graph.output((waited, product))
        return graph

    for size, reason in ((8192, ""), (512, "too little independent work")):
        graph = traced(size)
        with recording() as report:
            sink_collectives(graph, Options(low_contention=True, min_bytes=1024))
        (decision,) = report.decisions
        order = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        if reason:
            assert re.search(reason, decision.reason), decision
            assert "wait_tensor" in order[1]
        else:
            # torch's op would run torch's kernel, which moves the bytes with multiprocessors.
            assert order[0] == "symm_mem._low_contention_all_gather_split.default"
            assert "mm" in order[1]


def test_low_contention_on_cuda(ranks: Ranks) -> None:
    ranks.run(2, hides_on_cuda)
