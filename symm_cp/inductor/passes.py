"""The passes as Inductor takes them, and where they are put."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from symm_cp.inductor.attention import fuse_attention
from symm_cp.inductor.gather import fuse_gathers
from symm_cp.inductor.low_contention import sink_collectives
from symm_cp.inductor.neighbours import record_others
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, Report, record, recording
from symm_cp.inductor.scatter import fuse_scatters


@cache
def _sources() -> str:
    """A hash of all that decides what the passes do."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class UnfusedError(RuntimeError):
    """With `strict`: a collective next to a matmul or attention was left alone."""


class Pass(CustomGraphPass):
    """Runs what the user had set before, then ours. Its `uuid` covers both, and the options."""

    def __init__(
        self, stage: str, run: Callable[[Graph, Options], None], options: Options, before: Any
    ) -> None:
        self._stage, self._run, self.options = stage, run, options
        given = before if isinstance(before, list | tuple) else [before]
        self._before = [p for p in given if p is not None]

    def __call__(self, graph: Graph) -> None:
        """Runs the passes on a graph."""
        for earlier in self._before:
            earlier(graph)
        with recording() as report:
            self._run(graph, self.options)
        report.decisions = _final(report)
        for decision in report.decisions:
            record(decision)
        if self.options.strict:
            _refuse(report)

    def uuid(self) -> Any:
        """Identifies sources, options and earlier passes; None, no caching, if those have none."""
        earlier = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._before]
        if any(identity is None for identity in earlier):
            return None
        return (self._stage, _sources(), repr(self.options), tuple(map(repr, earlier)))


def _final(report: Report) -> list[Decision]:
    """One decision for each collective; one that a pass left alone may be taken by a later one."""
    last: dict[str, Decision] = {}
    for decision in report.decisions:
        before = last.get(decision.collective)
        if before is None or decision.fused_into or not (before.fused_into or before.critical):
            last[decision.collective] = decision
    return list(last.values())


def _refuse(report: Report) -> None:
    left: list[Decision] = [decision for decision in report.left if decision.critical]
    if left:
        raise UnfusedError("strict: " + "; ".join(map(str, left)))


def _run_post_grad(graph: Graph, options: Options) -> None:
    if options.async_tp:
        fuse_scatters(graph, options)
        fuse_gathers(graph, options)
        record_others(graph)
    if options.low_contention:
        sink_collectives(graph, options)
    graph.eliminate_dead_code()
    graph.lint()


def _run_joint(graph: Graph, options: Options) -> None:
    if options.context_parallel:
        fuse_attention(graph, options)
        graph.eliminate_dead_code()
        graph.lint()


_RUNS = {
    # After Inductor's own patterns, which turn attention that was written out into one op.
    "joint_custom_post_pass": _run_joint,
    "post_grad_custom_pre_pass": _run_post_grad,
}


def passes_for(options: Options) -> dict[str, Pass]:
    """The passes by the names of Inductor's configuration; those that are there run first."""
    return {
        name: Pass(name, run, options, getattr(inductor_config, name))
        for name, run in _RUNS.items()
    }


def install(options: Options) -> Callable[[], None]:
    """Puts the passes into Inductor's configuration; returns what takes them out again."""
    before = {name: getattr(inductor_config, name) for name in _RUNS}
    for name, made in passes_for(options).items():
        setattr(inductor_config, name, made)

    def remove() -> None:
        for name, value in before.items():
            # Not where the user has set another one since: that may call ours.
            if isinstance(getattr(inductor_config, name), Pass):
                setattr(inductor_config, name, value)

    return remove
