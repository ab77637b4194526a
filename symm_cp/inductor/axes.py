"""How the elements of a tensor are arranged, after views, transposes, splits and concatenations.

Each dimension of a tensor is described by *factors* of the dimensions of the tensor that it came
from (its origin), outermost first. A gather of dimension 1, say, that was made by gathering along
dimension 0 and moving the W parts is told from any other order of elements by where the factor of
W ranks has gone. Reading it off this way needs no list of the forms in which frameworks write it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Factor:
    """`size` steps of `stride` along dimension `dim` of the origin."""

    dim: int
    stride: int
    size: int

    @property
    def end(self) -> int:
        """The stride that a factor outside of this one would have."""
        return self.stride * self.size


#: The factors of each dimension of a tensor, outermost first; those of size 1 are left out.
Axes: TypeAlias = tuple[tuple[Factor, ...], ...]


def origin(shape: Sequence[int]) -> Axes:
    """The axes of the origin itself."""
    return tuple((Factor(dim, 1, size),) if size != 1 else () for dim, size in enumerate(shape))


def sizes(axes: Axes) -> list[int]:
    """The shape of a tensor."""
    return [math.prod(factor.size for factor in dim) for dim in axes]


def flat(axes: Axes) -> list[Factor]:
    """All factors, outermost first."""
    return [factor for dim in axes for factor in dim]


def split(factor: Factor, outer: int) -> tuple[Factor, Factor] | None:
    """Cuts a factor into `outer` parts; None where that does not come out even."""
    if outer < 1 or factor.size % outer != 0:
        return None
    inner = factor.size // outer
    return (
        Factor(factor.dim, factor.stride * inner, outer),
        Factor(factor.dim, factor.stride, inner),
    )


def _joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    joined: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        if joined and joined[-1].dim == factor.dim and joined[-1].stride == factor.end:
            factor = Factor(factor.dim, factor.stride, joined.pop().size * factor.size)
        joined.append(factor)
    return tuple(joined)


def view(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes after a view or reshape; None where a dimension is not made of whole factors."""
    rest = flat(axes)[::-1]
    found: list[tuple[Factor, ...]] = []
    for size in shape:
        dim: list[Factor] = []
        while size != 1:
            if not rest or size == 0:
                return None
            factor = rest.pop()
            if size % factor.size == 0:
                dim.append(factor)
                size //= factor.size
                continue
            parts = split(factor, size)
            if parts is None:
                return None
            dim.append(parts[0])
            rest.append(parts[1])
            size = 1
        found.append(_joined(dim))
    return None if rest else tuple(found)


def permute(axes: Axes, order: Sequence[int]) -> Axes:
    """The axes after a permutation of dimensions."""
    return tuple(axes[dim] for dim in order)


def lead(axes: Axes, dim: int, size: int) -> tuple[Factor, Axes] | None:
    """Cuts the outermost `size` parts off a dimension: their factor, and what is left."""
    if not axes[dim]:
        return None
    first, *others = axes[dim]
    parts = split(first, size)
    if parts is None:
        return None
    left = _joined([parts[1], *others])
    return parts[0], (*axes[:dim], left, *axes[dim + 1 :])


def prepend(axes: Axes, dim: int, factor: Factor) -> Axes:
    """Puts a factor before those of a dimension."""
    return (*axes[:dim], _joined([factor, *axes[dim]]), *axes[dim + 1 :])


def expose(axes: Axes, wanted: Factor) -> tuple[int, int, Axes] | None:
    """Finds a factor: its dimension, its place there, and the axes in which it stands alone."""
    for dim, factors in enumerate(axes):
        for place, factor in enumerate(factors):
            same = factor.dim == wanted.dim and factor.stride <= wanted.stride
            if not same or wanted.end > factor.end:
                continue
            if wanted.stride % factor.stride or factor.end % wanted.end:
                return None
            parts = [
                Factor(factor.dim, wanted.end, factor.end // wanted.end),
                wanted,
                Factor(factor.dim, factor.stride, wanted.stride // factor.stride),
            ]
            kept = [part for part in parts if part.size != 1 or part is wanted]
            new = (*factors[:place], *kept, *factors[place + 1 :])
            return dim, place + kept.index(wanted), (*axes[:dim], new, *axes[dim + 1 :])
    return None


def without(axes: Axes, factor: Factor) -> Axes:
    """The axes of one of the parts that a factor counts."""
    return tuple(tuple(other for other in dim if other != factor) for dim in axes)


def refined(have: Axes, want: Axes) -> tuple[Axes, Axes] | None:
    """Cuts the factors of two arrangements of the same elements so that both have the same ones."""
    edges: dict[int, set[int]] = {}
    for factor in (*flat(have), *flat(want)):
        edges.setdefault(factor.dim, set()).update((factor.stride, factor.end))

    def cut(axes: Axes) -> Axes | None:
        found = []
        for dim in axes:
            parts: list[Factor] = []
            for factor in dim:
                inner = sorted(e for e in edges[factor.dim] if factor.stride < e < factor.end)
                bounds = [factor.stride, *inner, factor.end]
                if any(b % a for a, b in itertools.pairwise(bounds)):
                    return None
                pairs = list(itertools.pairwise(bounds))
                parts += [Factor(factor.dim, a, b // a) for a, b in reversed(pairs)]
            found.append(tuple(parts))
        return tuple(found)

    cuts = cut(have), cut(want)
    if cuts[0] is None or cuts[1] is None or set(flat(cuts[0])) != set(flat(cuts[1])):
        return None
    return cuts[0], cuts[1]
