"""Regions in which attention runs context parallel: each thread has a stack of them.

A region is plain data; hooks.py enters it, sdpa.py and flex.py attend within it.

If a sequence is shorter than the ranks, some hold no position. Models cannot reshape empty tensors,
so `shard_batch` gives such a rank one row of padding. The functions that mix positions leave it out
(`without_padding`), so it never reaches a peer, and return zeros for it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_map_only

from symm_cp.context_parallel import guards
from symm_cp.context_parallel.layouts import enter_cuts, last_cut
from symm_cp.context_parallel.lengths import Balancers, check_balancer, known_balancers
from symm_cp.context_parallel.load_balancers import PADDING_ROWS, HeadTail, LoadBalancer
from symm_cp.group.hosts import numbers_of_all
from symm_cp.group.memory import GroupLike, resolve
from symm_cp.ops.attention.layouts import (
    encoded,
    layout_held,
    layout_of_keys,
    must_count_keys,
)
from symm_cp.ops.attention.methods import ALLGATHER, Method, MethodLike, split_by

_OP = "context_parallel"

_head_tail = functools.lru_cache(maxsize=64)(HeadTail)  # regions without load balancers make many

R = TypeVar("R")


@dataclass(frozen=True)
class ParallelRegion:
    """A region in which attention runs over a group; `kind` restricts it to one function.

    Without load balancers, sequences are spread head-tail. `region_over` makes regions.
    """

    group: str
    world_size: int
    rank: int
    # One for each sequence; no rank holds equally many positions of two sequences.
    balancers: tuple[LoadBalancer, ...] = ()
    # Returns a sequence's load balancer, given the number of its positions that this rank holds.
    choose: Callable[[int], LoadBalancer] | None = None
    kind: str | None = None
    # How attention is split over the group.
    method: Method = ALLGATHER
    # The fields below follow from those above. Arguments for them are accepted and replaced: with
    # mixed precision FSDP2 copies dataclasses among a module's inputs, such as a mask's region.
    # The layouts as a graph's input, encoded for ops in graphs; None if samples have different
    # layouts, or a function chooses.
    layouts: torch.Tensor | None = field(default=None, repr=False, compare=False)
    # The same for tokens of all samples in a row, even if samples have different layouts; None if a
    # function chooses.
    packed: torch.Tensor | None = field(default=None, repr=False, compare=False)
    # Whether all ranks hold equally many positions of each sequence.
    even: bool = field(default=False, repr=False, compare=False)
    # The load balancers that have a layout for each sample.
    of_samples: tuple[LoadBalancer, ...] = field(default=(), repr=False, compare=False)
    # Whether this rank holds no position of some sequence.
    holds_none: bool = field(default=False, repr=False, compare=False)
    # The groups that get a rank's errors within the region: see `reporting_to_peers`.
    peers: str | tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        of_samples = tuple(balancer for balancer in self.balancers if balancer.samples)
        object.__setattr__(self, "of_samples", of_samples)
        object.__setattr__(self, "layouts", self._layouts())
        object.__setattr__(self, "packed", self._packed())
        even = all(len(set(balancer.lengths)) == 1 for balancer in self.balancers)
        object.__setattr__(self, "even", even and self.choose is None)
        none = any(balancer.lengths[self.rank] == 0 for balancer in self.balancers)
        object.__setattr__(self, "holds_none", none)
        object.__setattr__(self, "peers", self.method.peers(self.group))

    def _layouts(self) -> torch.Tensor | None:
        if self.choose is not None or self.of_samples:
            return None
        return encoded(tuple(balancer.layout for balancer in self.balancers))

    def _packed(self) -> torch.Tensor | None:
        if self.choose is not None:
            return None
        return encoded(tuple(balancer.of_all_samples for balancer in self.balancers))

    def layouts_in_graph(self, device: torch.device) -> torch.Tensor | None:
        """Returns the layouts as an input of the graph being traced; None if they cannot be one."""
        return self.layouts if torch.compiler.is_compiling() and device.type == "cpu" else None

    @property
    def holds_nothing(self) -> bool:
        """Whether this rank holds no position of any sequence, so that all its rows are padding."""
        return self.holds_none and not any(b.lengths[self.rank] for b in self.balancers)

    def is_padding(self, rows: int) -> bool:
        """Whether tensors with so many rows have the row of a rank without a position."""
        return (
            self.holds_none
            and rows == PADDING_ROWS
            and all(balancer.lengths[self.rank] != rows for balancer in self.balancers)
        )

    def real(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns a tensor without the row of a rank that holds no position."""
        if hasattr(tensor, "to_local") or not self.is_padding(tensor.shape[dim]):
            return tensor
        return tensor.narrow(dim, 0, 0)

    def whole_length(self, local_length: int) -> int:
        """Returns the length of a sequence of which this rank holds `local_length` positions.

        In graphs it follows from `local_length` if all ranks hold equally many positions.
        """
        if torch.compiler.is_compiling() and self.even:
            return local_length * self.world_size
        return self.layout(local_length).seq_length

    def whole_length_of_keys(self, queries: int, keys: int) -> int:
        """Returns the length of a sequence of which this rank holds `keys` positions."""
        if keys == queries:
            return self.whole_length(keys)
        spread = self.layout_of_keys(queries, keys)
        assert spread is not None
        return spread.seq_length

    def layout(self, local_length: int) -> LoadBalancer:
        """Returns the layout of a sequence of which this rank holds `local_length` positions."""
        local_length = 0 if self.is_padding(local_length) else local_length
        if self.choose is not None:
            return self._chosen(self.choose, local_length)
        if len(self.balancers) == 1:
            return self.balancers[0]
        balancer = layout_held(_OP, self.balancers, local_length, *self._place)
        if not self.balancers and not torch.compiler.is_compiling():
            self._check_guess(balancer, local_length)
        return balancer

    def layout_of_keys(
        self, queries: int, keys: int, *, ordered: bool = True
    ) -> LoadBalancer | None:
        """Returns the layout of keys from the numbers of queries and keys that this rank holds.

        None if it is unknown and makes no difference; see `layouts.layout_of_keys`. Collective if
        ranks must exchange their key counts.
        """
        if self.choose is not None:
            return self.layout(keys)
        queries, keys = (0 if self.is_padding(rows) else rows for rows in (queries, keys))
        if queries == keys and self.even and len(self.balancers) == 1:
            return self.balancers[0]
        if must_count_keys(self.balancers, ordered=ordered) and self._may_ask:
            name = f"{_OP}: numbers of keys"
            counts = [count for (count,) in numbers_of_all(resolve(self.group), name, [keys])]
            return self.balancers[0] if counts == list(self.balancers[0].lengths) else None
        rows, place = (queries, keys), self._place
        balancer = layout_of_keys(_OP, self.balancers, rows, *place, ordered=ordered)
        # Without load balancers the layout is a guess, which is compared with the last cut.
        return balancer if balancer is None or self.balancers else self.layout(keys)

    @property
    def _may_ask(self) -> bool:
        """Whether ranks can exchange counts; over a mesh, failures are reported to other groups."""
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        return self.method.grid is None and not (fake or torch.compiler.is_compiling())

    @property
    def _place(self) -> tuple[int, int, Callable[[int, int], LoadBalancer]]:
        return self.rank, self.world_size, _head_tail

    def _chosen(self, choose: Callable[[int], LoadBalancer], local_length: int) -> LoadBalancer:
        balancer = choose(local_length)
        if not isinstance(balancer, LoadBalancer):
            raise TypeError(
                f"{_OP}: load_balancer({local_length}) returned a {type(balancer).__name__}, must "
                "be a LoadBalancer"
            )
        given = (balancer.world_size, balancer.lengths[self.rank])
        if given != (self.world_size, local_length):
            raise ValueError(
                f"{_OP}: load_balancer({local_length}) returned {balancer}, which gives rank "
                f"{self.rank} {given[1]} positions, must be {local_length} on {self.world_size} "
                "ranks"
            )
        if not torch.compiler.is_compiling():
            enter_cuts(_resolve_process_group(self.group), (balancer,))  # type: ignore[arg-type]
        return balancer

    def of_sample(self, sample: int) -> ParallelRegion:
        """Returns the region for one sample of a batch with a layout for each sample."""
        balancers = (b.samples[sample] if b.samples else b for b in self.balancers)
        return replace(self, balancers=tuple(balancers))

    def _check_guess(self, balancer: LoadBalancer, local_length: int) -> None:
        """Raises if the last shards of this length were cut by another load balancer."""
        group = _resolve_process_group(self.group)  # type: ignore[arg-type]
        cut = last_cut(group, local_length)
        same = cut is None or cut.seq_length != balancer.seq_length or cut == balancer
        if not same and self.world_size > 1:
            raise ValueError(
                f"{_OP}: without a load_balancer, shards of {local_length} positions "
                f"are assumed to be cut by {balancer}, but the last shards were cut by {cut!r}: "
                "pass the load_balancer that the sequence was cut by"
            )

    def expect(self, kind: str) -> None:
        """Raises if the region is restricted to another function."""
        if self.kind not in (None, kind):
            raise RuntimeError(
                f"ContextParallel(attention_type={self.kind!r}): the module called {kind}, which "
                "would attend to this rank's part of the sequence only"
            )

    def watch(self) -> guards.Watch:
        """Returns a new `Watch` for this region."""
        return guards.Watch(self.group, self.world_size, self.balancers, peers=self.peers)


def without_padding(
    region: ParallelRegion, function: Callable[..., R], dim: int, *tensors: torch.Tensor
) -> R:
    """Calls a function of tensors that have positions along `dim`, as its results have.

    On a rank without a position, leaves the row of padding out, and adds zeros to the results.
    """
    if not region.holds_none:
        return function(*tensors)
    real = [region.real(tensor, dim) for tensor in tensors]
    if real[0] is tensors[0]:
        return function(*real)
    results = function(*real)
    return tree_map_only(torch.Tensor, lambda each: with_padding(each, dim), results)  # type: ignore[return-value]


def outside_graph(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls a function; if Dynamo traces the call, breaks the graph, and calls it in eager mode."""
    if not torch.compiler.is_dynamo_compiling():
        return function(*args, **kwargs)
    # Imported here because it loads Dynamo.
    from symm_cp.context_parallel.graph_breaks import outside_graph

    return outside_graph(function, *args, **kwargs)  # type: ignore[no-any-return]


def untraced(function: Callable[..., R]) -> Callable[..., R]:
    """Returns a function that Dynamo leaves alone, in frames that it could not trace."""
    return _disabled(function) if "torch._dynamo" in sys.modules else function


_disabled = functools.cache(torch.compiler.disable)


def with_padding(result: torch.Tensor, dim: int, rows: int = PADDING_ROWS) -> torch.Tensor:
    """Returns an empty result of attention with zeros for rows of padding."""
    shape = [*result.shape[:dim], rows, *result.shape[dim + 1 :]]
    return torch.cat([result, result.new_zeros(shape)], dim)  # keeps the link to peers' gradients


def region_over(
    group: GroupLike,
    load_balancer: Balancers | None = None,
    kind: str | None = None,
    *,
    method: MethodLike | None = None,
    op: str = _OP,
) -> ParallelRegion:
    """Returns a region over a group, or all ranks of a mesh.

    Raises for an invalid method, and for load balancers that do not fit.
    """
    name, split = split_by(op, group, method)
    process_group = _resolve_process_group(name)  # type: ignore[arg-type]
    size, rank = process_group.size(), process_group.rank()
    known = known_balancers(op, load_balancer, size)
    for balancer in known:
        check_balancer(op, balancer, balancer.seq_length, size)
    choose = None if known or load_balancer is None else load_balancer
    return ParallelRegion(name, size, rank, known, choose, kind, split)  # type: ignore[arg-type]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions: list[ParallelRegion] = []


_thread = _Thread()


def push(region: ParallelRegion) -> None:
    """Makes a region the innermost one of this thread."""
    _thread.regions.append(region)


def pop() -> None:
    """Removes the innermost region of this thread."""
    _thread.regions.pop()


def active() -> ParallelRegion | None:
    """Returns the innermost region of this thread."""
    return _thread.regions[-1] if _thread.regions else None
