"""Predicted timelines of compiled graphs: what computes, what communicates, and what waits.

The nodes run in graph order. A collective starts at its call, after all earlier collectives;
computation goes on until a node waits for its result. A fused op runs as its schedule does in the
simulator (`symm_cp/schedule/work.py`); a rank waits at once for a blocking collective. The time in
which a rank only waits is *exposed*.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch.fx import Graph, Node

from symm_cp.inductor import costs
from symm_cp.inductor.nodes import WAIT, WAIT_FOR_ALL, argument, is_item
from symm_cp.schedule.machine import Machine
from symm_cp.schedule.simulate import Event
from symm_cp.schedule.steps import Compute, Copy
from symm_cp.schedule.work import Work

COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
#: The name of ops that are not drawn by themselves: consecutive spans of them are drawn as one.
OTHERS = "other ops"


@dataclass
class Span:
    """A span of time of a lane: "exposed" where the compute lane waits for `name`."""

    lane: Literal["compute", "communication"]
    kind: Literal["compute", "communication", "exposed"]
    name: str
    start_us: float
    us: float


@dataclass
class GraphTimeline:
    """The predicted timeline of a graph on one rank."""

    machine: str
    spans: list[Span] = field(default_factory=list)
    total_us: float = 0.0
    #: By node name, for each asynchronous collective whose result the graph waits for: the
    #: microseconds of it that the graph computes instead of waiting.
    hidden_us: dict[str, float] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether there is any communication in the graph."""
        return any(span.kind != "compute" for span in self.spans)

    def described(self) -> dict[str, Any]:
        """Returns the timeline as `symm-cp explain --json` writes it."""

        def total(kind: str) -> float:
            return round(sum(span.us for span in self.spans if span.kind == kind), 3)

        spans = [asdict(span) for span in self.spans]
        for span in spans:
            span.update(start_us=round(span["start_us"], 3), us=round(span["us"], 3))
        return {
            "machine": self.machine,
            "total_us": round(self.total_us, 3),
            "compute_us": total("compute"),
            "communication_us": total("communication"),
            "exposed_us": total("exposed"),
            "spans": spans,
        }


class _Walk:
    def __init__(self, on: Machine) -> None:
        self.on = on
        self.timeline = GraphTimeline(on.name)
        self._now = 0.0  # the end of the compute lane
        self._free = 0.0  # the end of the communication lane
        # For each asynchronous result: when it is complete, its collective's name and duration.
        self._ends: dict[Node, tuple[float, str, float]] = {}

    def compute(self, name: str, us: float) -> None:
        spans = self.timeline.spans
        last = spans[-1] if spans else None
        if us and name == OTHERS and last and (last.name, last.kind) == (OTHERS, "compute"):
            last.us += us
        elif us:
            spans.append(Span("compute", "compute", name, self._now, us))
        self._now += us

    def start(self, node: Node, us: float) -> None:
        begin = max(self._now, self._free)
        self._free = begin + us
        self.timeline.spans.append(Span("communication", "communication", node.name, begin, us))
        self._ends[node] = self._free, node.name, us

    def follow(self, node: Node, result_of: Node) -> None:
        if result_of in self._ends:
            self._ends[node] = self._ends[result_of]

    def wait(self, node: Node) -> None:
        """Waits for a result; waiting for a complete result takes no time."""
        if node in self._ends:
            end, name, us = self._ends[node]
            wait = max(0.0, end - self._now)
            self.timeline.hidden_us.setdefault(name, max(0.0, us - wait))
            self._expose(name, wait)

    def fused(self, node: Node, work: Work, ranks: int) -> None:
        """Places rank 0's events of the schedule; the other ranks have equal events."""
        events = [event for event in work.predict(self.on, ranks).events if event.rank == 0]
        begin = max(self._now, self._free)
        self._expose(node.name, begin - self._now)
        kernels = sorted((each for each in events if isinstance(each.step, Compute)),
                         key=lambda each: each.start)  # fmt: skip
        for event in kernels:
            self._expose(node.name, begin + event.start * 1e6 - self._now)
            self.compute(node.name, (event.end - event.start) * 1e6)
        total = begin + max((event.end for event in events), default=0.0) * 1e6
        self._expose(node.name, total - self._now)
        for event in filter(_communicates, events):
            start, us = begin + event.start * 1e6, (event.end - event.start) * 1e6
            span = Span("communication", "communication", node.name, start, us)
            self.timeline.spans.append(span)
        self._free = max(self._free, self._now)

    def _expose(self, name: str, us: float) -> None:
        if us <= 0:
            return
        self.timeline.spans.append(Span("compute", "exposed", name, self._now, us))
        self._now += us

    def ended(self) -> GraphTimeline:
        self.timeline.total_us = self._now
        return self.timeline


def _communicates(event: Event) -> bool:
    """Tells whether a step moves bytes between ranks: a copy, or a kernel that reads in place."""
    step = event.step
    if event.end == event.start:
        return False
    if isinstance(step, Copy):
        return step.src.rank != step.dst.rank
    return isinstance(step, Compute) and any(region.rank != 0 for region in step.reads)


def timeline_of(graph: Graph) -> GraphTimeline:
    """Predicts the timeline of a graph, of a forward or a backward pass."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    ranks = {node: costs.ranks_of(node) for node in calls if _is_collective(node)}
    walk = _Walk(costs.machine(max(ranks.values(), default=1)))
    for node in calls:
        if is_item(node):
            walk.follow(node, node.args[0])
        elif node.target is WAIT or node.target is WAIT_FOR_ALL:
            for each in node.all_input_nodes:
                walk.wait(each)
        elif node in ranks:
            _communicate(walk, node, ranks[node])
        else:
            us = costs.computing_us(node, walk.on)
            walk.compute(node.name if _is_named(node) else OTHERS, us)
    return walk.ended()


def _communicate(walk: _Walk, node: Node, ranks: int) -> None:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    us = costs.transfer_us(costs.received(name, costs.given_bytes(node), ranks), ranks)
    if node.target.namespace in COLLECTIVES or "low_contention" in name:  # type: ignore[union-attr]
        walk.start(node, us)
    elif (work := costs.work_of(node, ranks, walk.on)) is not None:
        walk.fused(node, work, ranks)
    else:  # a kernel, if there is one, and an exchange that nothing hides
        walk.compute(node.name, costs.fused_us(node, ranks, walk.on))
        walk.start(node, us)
        walk.wait(node)


def _is_collective(node: Node) -> bool:
    namespace = getattr(node.target, "namespace", "")
    if namespace in COLLECTIVES:
        return node.target not in (WAIT, WAIT_FOR_ALL)
    return namespace == "symm_mem" and argument(node, "group_name") is not None


def _is_named(node: Node) -> bool:
    """Tells whether a node is drawn by itself: matmuls and attention are."""
    name = str(getattr(node.target, "overloadpacket", node.target))
    return any(part in name for part in ("mm", "matmul", "attention", "attn", "convolution"))
