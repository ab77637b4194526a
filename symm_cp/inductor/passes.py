"""The passes as Inductor takes them, and their places in its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from symm_cp.inductor.decisions import Decision, Report, record, recording
from symm_cp.inductor.fuse_all_reduces import replace_all_reduces
from symm_cp.inductor.fuse_all_to_alls import fuse_all_to_alls
from symm_cp.inductor.fuse_attention import fuse_attention
from symm_cp.inductor.fuse_gathers import fuse_gathers
from symm_cp.inductor.fuse_projections import fuse_projections
from symm_cp.inductor.fuse_scatters import fuse_scatters
from symm_cp.inductor.hide_collectives import sink_collectives
from symm_cp.inductor.neighbours import record_called, record_others
from symm_cp.inductor.nodes import know_equal_sizes, place_of, value
from symm_cp.inductor.options import Options
from symm_cp.inductor.rewrite import wait_for_each
from symm_cp.ops.unused_results import keep_unused


@cache
def _sources() -> str:
    """Returns a hash of the sources of the passes."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    return sources.hexdigest()


#: For each node of a graph before the passes, by name: the bytes of its inputs.
Before = dict[str, int]
#: Called after each pass with the nodes before it, the decisions, and whether that is the joint
#: graph of forward and backward, which is split afterwards.
listeners: list[Callable[[Before, Report, bool], None]] = []


def _given(graph: Graph) -> Before:
    def nbytes(node: Node) -> int:
        tensors = (t for t in map(value, node.all_input_nodes) if t is not None)
        sizes = (t.numel() * t.element_size() for t in tensors)
        return sum(size for size in sizes if isinstance(size, int))

    return {node.name: nbytes(node) for node in graph.nodes}


class UnfusedError(RuntimeError):
    """Under `strict`, a collective next to a matmul or attention was left alone."""


class Pass(CustomGraphPass):
    """Runs the passes that the user had set, then one of ours; `uuid` covers both, and options."""

    def __init__(
        self, stage: str, run: Callable[[Graph, Options], None], options: Options, before: Any
    ) -> None:
        self._stage, self._run, self.options = stage, run, options
        earlier = before if isinstance(before, list | tuple) else [before]
        self._before = [p for p in earlier if p is not None]

    def __call__(self, graph: Graph) -> None:
        """Runs the passes on a graph."""
        for earlier in self._before:
            earlier(graph)
        before = _given(graph) if listeners else {}
        nodes = {node.name: node for node in graph.nodes}
        with recording() as report:
            self._run(graph, self.options)
        report.decisions = [_placed(decision, nodes) for decision in _final(report)]
        for listen in listeners:
            listen(before, report, self._run is fuse_joint)
        for decision in report.decisions:
            record(decision)
        if self.options.strict:
            _refuse(report)

    def uuid(self) -> Any:
        """Identifies sources, options and earlier passes; None (no caching) if one has no uuid."""
        earlier = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._before]
        if any(identity is None for identity in earlier):
            return None
        return (self._stage, _sources(), repr(self.options), tuple(map(repr, earlier)))


def _placed(decision: Decision, nodes: Mapping[str, Node]) -> Decision:
    """Returns a decision with the places of its collectives in the program."""
    known = [nodes[name] for name in decision.collective.split(", ") if name in nodes]
    return replace(decision, where=", ".join(dict.fromkeys(filter(None, map(place_of, known)))))


def _final(report: Report) -> list[Decision]:
    """Returns one decision for each collective; a later pass may fuse one left alone before."""
    last: dict[str, Decision] = {}
    for decision in report.decisions:
        before = last.get(decision.collective)
        if before is None or decision.fused_into or not (before.fused_into or before.critical):
            last[decision.collective] = decision
    return list(last.values())


def _refuse(report: Report) -> None:
    left = [decision for decision in report.left if decision.critical]
    if left:
        raise UnfusedError("strict: " + "; ".join(map(str, left)))


def fuse_post_grad(graph: Graph, options: Options) -> None:
    """Rewrites a forward or a backward graph."""
    wait_for_each(graph)
    know_equal_sizes(graph)
    if options.context_parallel:
        fuse_all_to_alls(graph, options)
        fuse_projections(graph, options)
        graph.eliminate_dead_code()  # replaced matmuls would count as users
    record_called(graph)
    if options.async_tp:
        fuse_scatters(graph, options)
        fuse_gathers(graph, options)
    replace_all_reduces(graph, options)
    if options.low_contention:
        sink_collectives(graph, options)
    record_others(graph)
    keep_unused(graph)  # torch keeps the waits that the fused ops replace
    graph.eliminate_dead_code()
    graph.lint()


def fuse_joint(graph: Graph, options: Options) -> None:
    """Rewrites a joint graph of forward and backward."""
    wait_for_each(graph)
    know_equal_sizes(graph)
    if options.context_parallel:
        fuse_attention(graph, options)
        graph.eliminate_dead_code()
        graph.lint()


_RUNS = {
    # After Inductor's own patterns, which replace attention in matmuls and softmax by one op.
    "joint_custom_post_pass": fuse_joint,
    "post_grad_custom_pre_pass": fuse_post_grad,
}


def passes_for(options: Options) -> dict[str, Pass]:
    """Returns the passes by their names in Inductor's configuration; passes set there run first."""
    return {
        name: Pass(name, run, options, getattr(inductor_config, name))
        for name, run in _RUNS.items()
    }


def install(options: Options) -> Callable[[], None]:
    """Puts the passes into Inductor's configuration; returns a function that removes them."""
    before = {name: getattr(inductor_config, name) for name in _RUNS}
    for name, new in passes_for(options).items():
        setattr(inductor_config, name, new)

    def remove() -> None:
        for name, earlier in before.items():
            # A pass that the user has set since stays: it may call ours.
            if isinstance(getattr(inductor_config, name), Pass):
                setattr(inductor_config, name, earlier)

    return remove
