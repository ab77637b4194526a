"""Predicted timelines of graphs: what waits for what, and the page that shows it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from symm_cp import inductor, page
from symm_cp.inductor.timeline import timeline_of
from symm_cp.schedule.machine import TYPICAL_CPU
from symm_cp.testing import Ranks
from tests.html_page import Page

_GATHERED = 1 << 20  # elements of float32


def traced(group: dist.ProcessGroup, size: int) -> Graph:
    """Returns a graph of a gather that overlaps a matmul of `size`."""
    graph = Graph()
    calls, aten = torch.ops._c10d_functional, torch.ops.aten
    with FakeTensorMode():
        x, a = graph.placeholder("x"), graph.placeholder("a")
        x.meta["val"], a.meta["val"] = torch.empty(_GATHERED), torch.empty(size, size)
        args = (x, group.size(), group.group_name)
        gathered = graph.call_function(calls.all_gather_into_tensor.default, args)
        gathered.meta["val"] = torch.empty(_GATHERED * group.size())
        product = graph.call_function(aten.mm.default, (a, a))
        product.meta["val"] = torch.empty(size, size)
        waited = graph.call_function(calls.wait_tensor.default, (gathered,))
        waited.meta["val"] = gathered.meta["val"]
    graph.output((waited, product))
    return graph


def hides(group: dist.ProcessGroup) -> None:
    on = TYPICAL_CPU
    transfer = (on.transfer(4 * _GATHERED * (group.size() - 1)) + on.signal_seconds) * 1e6
    for size in (64, 4096):
        found = timeline_of(traced(group, size)).described()
        product = on.matmul(2.0 * size**3, "float32", 4 * size**2) * 1e6
        assert found["communication_us"] == pytest.approx(transfer, abs=0.01)
        assert found["compute_us"] == pytest.approx(product, abs=0.01)
        assert found["exposed_us"] == pytest.approx(max(0.0, transfer - product), abs=0.01)
        assert found["total_us"] == pytest.approx(max(product, transfer), abs=0.01)
        kinds = [(span["lane"], span["kind"]) for span in found["spans"]]
        waits = [("compute", "exposed")] if size == 64 else []
        assert kinds == [("communication", "communication"), ("compute", "compute"), *waits]


def test_a_matmul_hides_a_gather(ranks: Ranks) -> None:
    ranks.run(2, hides)
    ranks.run(3, hides)


def check(timeline: dict[str, Any]) -> None:
    """Spans of a lane do not overlap; the compute lane's busy and waiting times are the total."""
    for lane in ("compute", "communication"):
        spans = sorted(
            (span for span in timeline["spans"] if span["lane"] == lane),
            key=lambda span: float(span["start_us"]),
        )
        for span, following in pairwise(spans):
            assert span["start_us"] + span["us"] <= following["start_us"] + 0.01
    busy = timeline["compute_us"] + timeline["exposed_us"]
    assert busy == pytest.approx(timeline["total_us"], rel=1e-3, abs=0.05)


def explained(group: dist.ProcessGroup) -> tuple[list[dict[str, Any]], str]:
    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = funcol.all_gather_tensor_autograd(x, 0, group) @ up
        out = funcol.reduce_scatter_tensor_autograd(hidden.relu() @ down, "sum", 0, group)
        return funcol.all_to_all_single_autograd(out, None, None, group) * 2

    x = torch.randn(16 * group.size(), 8, requires_grad=True)
    up, down = torch.randn(8, 32, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    report = inductor.explain(block, x, up, down)
    for graph in report.graphs:
        assert graph["timeline"] is not None
        check(graph["timeline"])
    decided = [each.collective for each in report.decisions]
    assert [each["name"] for graph in report.graphs for each in graph["collectives"]] == decided
    for graph in report.graphs:  # forward, and backward
        waited_for = {s["name"] for s in graph["timeline"]["spans"] if s["kind"] == "exposed"}
        (exchange,) = [each for each in graph["collectives"] if not each["fused_into"]]
        assert exchange["name"] in waited_for
        assert exchange["exposed_us"] > 0
    return report.graphs, report._repr_html_()


def test_the_page_of_a_report(ranks: Ranks) -> None:
    for graphs, html in ranks.run(2, explained):
        assert len(graphs) == 2
        Page(html).check(graphs)


def test_names_are_escaped() -> None:
    reason = "<script>alert(1)</script> & more"
    each = {"name": "<b>", "bytes": 1, "ranks": 2, "calls": 1, "exposed_us": 0.5}
    each |= {"advice": reason, "fused_into": None, "runs_as": None, "reason": reason}
    span = {"lane": "compute", "kind": "exposed", "name": "<b>", "start_us": 0.0, "us": 2.0}
    numbers = {"total_us": 2.0, "compute_us": 0.0, "communication_us": 1.5, "exposed_us": 2.0}
    graph = {"rank": 0, "graph": 1, "collectives": [each], "timeline": None}
    graph["timeline"] = {"machine": "<i>", "spans": [span], **numbers}
    html = page.document([graph], {reason: 2}, command=["<i>"])
    assert "<script" not in html
    assert "<b>" not in html
    assert "<i>" not in html
    found = Page(html)
    found.check([graph])
    assert found.cells[-1] == f"left alone: {reason}"
    assert found.items == [f"{reason} (2 x)", f"<b>: {reason}"]
