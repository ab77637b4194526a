"""Records which load balancers cut the shards of a group, so that later calls need not guess."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from symm_cp.context_parallel.load_balancers import PADDING_ROWS, LoadBalancer

# Load balancers by length of this rank's shard; entries live as long as the process group.
_Kept = weakref.WeakKeyDictionary
_used: _Kept[dist.ProcessGroup, dict[int, set[LoadBalancer]]] = _Kept()
_last_cut: _Kept[dist.ProcessGroup, dict[int, LoadBalancer]] = _Kept()


def remember(group: dist.ProcessGroup, balancer: LoadBalancer, *, shards: bool) -> None:
    """Records that a load balancer was used, and whether the caller got `shards` cut by it."""
    length = balancer.rows(group.rank())
    used = _used.setdefault(group, {}).setdefault(length, set())
    if len(used) < 2:  # two are enough to know that it is ambiguous
        used.add(balancer)
    if shards:
        _last_cut.setdefault(group, {})[length] = balancer


def remembered(group: dist.ProcessGroup, local_length: int) -> set[LoadBalancer]:
    """Returns the load balancers (two at most) that were used for shards of this length."""
    return _used.get(group, {}).get(local_length or PADDING_ROWS, set())


def last_cut(group: dist.ProcessGroup, local_length: int) -> LoadBalancer | None:
    """Returns the load balancer of the last shards of this length that the caller got."""
    return _last_cut.get(group, {}).get(local_length or PADDING_ROWS)


@dataclass(eq=False)
class Cut:
    """Shards that one call returned; lives as long as any of them, or their reduction, does."""

    balancers: tuple[LoadBalancer, ...]
    holders: list[weakref.ref[object]]
    entered: bool = False  # whether a context over the group was entered since
    fitted: bool = False  # whether such a context had one of these load balancers

    @property
    def alive(self) -> bool:
        """Whether the caller still holds any of the shards."""
        for holder in self.holders:  # noqa: SIM110 - a loop without calls
            if holder() is not None:
                return True
        return False


_cuts: _Kept[dist.ProcessGroup, list[Cut]] = _Kept()


def note_cut(
    group: dist.ProcessGroup, balancers: Iterable[LoadBalancer], shards: Iterable[object]
) -> Cut:
    """Records that the caller got these shards, which later contexts over the group must fit."""
    made = Cut(tuple(balancers), [weakref.ref(shard) for shard in shards])
    _cuts[group] = [*_live_cuts(group), made]
    return made


def _live_cuts(group: dist.ProcessGroup) -> list[Cut]:
    return [each for each in _cuts.get(group, ()) if each.alive]


def enter_cuts(
    group: dist.ProcessGroup, balancers: Sequence[LoadBalancer], *, assumed: bool = False
) -> None:
    """Records that a context is entered; raises `ValueError` unless its layouts fit the shards.

    A load balancer of the context fits shards that it has cut, and all shards of other lengths. If
    it has cut none of the shards that the caller still holds, it must fit all shards that no
    earlier context has fitted. `assumed`: the context has no load balancer, and compares its layout
    when it attends.
    """
    cuts = _live_cuts(group)
    fitting = {balancer for each in cuts for balancer in each.balancers}
    waiting = {balancer for each in cuts if not each.fitted for balancer in each.balancers}
    if group.size() > 1:
        for balancer in balancers:
            if balancer not in fitting:
                check_cut("context_parallel", balancer, waiting)
    for each in cuts:
        each.entered = True
        each.fitted |= assumed or not set(balancers).isdisjoint(each.balancers)


def check_cut(op: str, balancer: LoadBalancer, known: Iterable[LoadBalancer]) -> None:
    """Raises `ValueError` if `known` has load balancers of this length, but not `balancer`."""
    others = [each for each in known if each.seq_length == balancer.seq_length]
    if others and balancer not in others:
        by = " and ".join(sorted(map(repr, others)))
        raise ValueError(
            f"{op}: load_balancer is {balancer!r}, but the shards of {balancer.seq_length} "
            f"positions were cut by {by}: use one for both (shard_batch returns it as "
            "reduce_loss.load_balancer)"
        )


def cut(op: str, tensor: torch.Tensor, seq_dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Selects positions of a tensor: `rows` is (S,), or (B, S) for each sample of dimension 0."""
    rows = rows.to(tensor.device)
    if rows.dim() == 1:
        return tensor.index_select(seq_dim, rows)
    samples = len(rows)
    if seq_dim == 0 or tensor.shape[0] != samples:
        raise ValueError(
            f"{op}: a tensor of shape {list(tensor.shape)} with {seq_dim=} has no batch of "
            f"{samples} samples in dimension 0: the load balancer has a layout for each sample"
        )
    parts = zip(tensor, rows, strict=True)
    return torch.stack([part.index_select(seq_dim - 1, own) for part, own in parts])
