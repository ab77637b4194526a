"""Regions in which attention runs context parallel: each thread has a stack of them.

A region is plain data; hooks.py enters it, sdpa.py and flex.py attend within it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.context_parallel import guards
from symm_cp.context_parallel.layouts import last_cut
from symm_cp.context_parallel.load_balancers import HeadTail, LoadBalancer
from symm_cp.ops.attention.flex.graph import layout_text


@dataclass(frozen=True)
class ParallelRegion:
    """Attention within it runs over a group; `kind` restricts it to one function.

    Without a load balancer the sequence is spread head-tail.
    """

    group: str
    world_size: int
    load_balancer: LoadBalancer | None = None
    kind: str | None = None
    # The load balancer's layout as ops in graphs take it and as Dynamo can guard it; None if
    # samples have different layouts.
    layout_text: str | None = field(init=False, repr=False, compare=False)
    rank: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            layout = None if self.load_balancer is None else self.load_balancer.layout
            text = layout_text(layout)
        except NotImplementedError:
            text = None
        object.__setattr__(self, "layout_text", text)
        group = _resolve_process_group(self.group)  # type: ignore[arg-type]
        object.__setattr__(self, "rank", group.rank())

    def layout(self, local_length: int) -> LoadBalancer:
        """Returns how a sequence is spread of which this rank holds `local_length` positions."""
        if self.load_balancer is not None:
            return self.load_balancer
        if local_length % 2 != 0:
            raise ValueError(
                f"context_parallel: {local_length} positions on this rank cannot be split into two "
                "equal chunks: pass a load_balancer, which knows the length of the whole sequence"
            )
        balancer = HeadTail(local_length * self.world_size, self.world_size)
        if not torch.compiler.is_compiling():
            self._check_guess(balancer, local_length)
        return balancer

    def _check_guess(self, balancer: LoadBalancer, local_length: int) -> None:
        """Raises if the last shards of such a sequence were cut by another load balancer."""
        group = _resolve_process_group(self.group)  # type: ignore[arg-type]
        cut = last_cut(group, local_length)
        same = cut is None or cut.seq_length != balancer.seq_length or cut == balancer
        if not same and self.world_size > 1:
            raise ValueError(
                f"context_parallel: without a load_balancer, shards of {local_length} positions "
                f"are assumed to be cut by {balancer}, but the last ones were cut by {cut!r}: "
                "pass the load_balancer that the sequence was cut by"
            )
        guards.check_length(balancer)

    def expect(self, kind: str) -> None:
        """Raises if the region is restricted to another function."""
        if self.kind not in (None, kind):
            raise RuntimeError(
                f"ContextParallel(attention_type={self.kind!r}): the module called {kind}, which "
                "would attend to this rank's part of the sequence only"
            )

    def watch(self) -> guards.Watch:
        """Returns a new record of what runs within this region."""
        return guards.Watch(self.group, self.world_size, self.load_balancer)


_local = threading.local()


def _regions() -> list[ParallelRegion]:
    stack: list[ParallelRegion] | None = getattr(_local, "regions", None)
    if stack is None:
        stack = _local.regions = []
    return stack


def push(region: ParallelRegion) -> None:
    """Makes a region the innermost one of this thread."""
    _regions().append(region)


def pop() -> None:
    """Removes the innermost region of this thread."""
    _regions().pop()


def active() -> ParallelRegion | None:
    """Returns the innermost region of this thread."""
    stack = _regions()
    return stack[-1] if stack else None
