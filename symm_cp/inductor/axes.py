"""How the elements of a tensor are arranged, after views, transposes, splits and concatenations.

*Factors* of the dimensions of a tensor's *origin*, whose elements it arranges, describe each
dimension of the tensor, outermost first. Example: frameworks gather dimension 1 by gathering along
dimension 0 and moving the W parts. The position of the factor of W ranks identifies this order of
elements, in whatever form a framework writes it.
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
        """The stride of the next outer factor of the same dimension."""
        return self.stride * self.size


#: The factors of each dimension of a tensor, outermost first, without those of size 1.
Axes: TypeAlias = tuple[tuple[Factor, ...], ...]


def origin(shape: Sequence[int]) -> Axes:
    """Returns the axes of the origin itself."""
    return tuple((Factor(dim, 1, size),) if size != 1 else () for dim, size in enumerate(shape))


def sizes(axes: Axes) -> list[int]:
    """Returns the shape of a tensor."""
    return [math.prod(factor.size for factor in dim) for dim in axes]


def flat(axes: Axes) -> list[Factor]:
    """Returns all factors, outermost first."""
    return [factor for dim in axes for factor in dim]


def split(factor: Factor, outer: int) -> tuple[Factor, Factor] | None:
    """Cuts a factor into `outer` equal parts; None if its size is not divisible by it."""
    if outer < 1 or factor.size % outer != 0:
        return None
    inner = factor.size // outer
    return (
        Factor(factor.dim, factor.stride * inner, outer),
        Factor(factor.dim, factor.stride, inner),
    )


def joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Joins factors that continue each other, and drops factors of size 1."""
    kept: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        if kept and kept[-1].dim == factor.dim and kept[-1].stride == factor.end:
            factor = Factor(factor.dim, factor.stride, kept.pop().size * factor.size)
        kept.append(factor)
    return tuple(kept)


def view(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Returns the axes after a view or reshape; None if that cuts across factors."""
    rest = flat(axes)[::-1]
    viewed: list[tuple[Factor, ...]] = []
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
        viewed.append(joined(dim))
    return None if rest else tuple(viewed)


def permute(axes: Axes, order: Sequence[int]) -> Axes:
    """Returns the axes after a permutation of dimensions."""
    return tuple(axes[dim] for dim in order)


def lead(axes: Axes, dim: int, size: int) -> tuple[Factor, Axes] | None:
    """Splits the outermost factor, of `size`, off a dimension; returns it and the other axes."""
    if not axes[dim]:
        return None
    first, *others = axes[dim]
    parts = split(first, size)
    if parts is None:
        return None
    left = joined([parts[1], *others])
    return parts[0], (*axes[:dim], left, *axes[dim + 1 :])


def prepend(axes: Axes, dim: int, factor: Factor) -> Axes:
    """Returns the axes with another outermost factor in a dimension."""
    return (*axes[:dim], joined([factor, *axes[dim]]), *axes[dim + 1 :])


def expose(axes: Axes, wanted: Factor) -> tuple[int, int, Axes] | None:
    """Returns the dimension and place of a factor, and the axes cut such that it stands alone."""
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
    """Returns the axes of one part, without the factor that counts the parts."""
    return tuple(tuple(other for other in dim if other != factor) for dim in axes)


def refined(have: Axes, want: Axes) -> tuple[Axes, Axes] | None:
    """Cuts the factors of two arrangements of the same elements until both have the same ones."""
    edges: dict[int, set[int]] = {}
    for factor in (*flat(have), *flat(want)):
        edges.setdefault(factor.dim, set()).update((factor.stride, factor.end))

    def cut(axes: Axes) -> Axes | None:
        dims = []
        for dim in axes:
            parts: list[Factor] = []
            for factor in dim:
                inner = sorted(e for e in edges[factor.dim] if factor.stride < e < factor.end)
                bounds = [factor.stride, *inner, factor.end]
                if any(b % a for a, b in itertools.pairwise(bounds)):
                    return None
                pairs = list(itertools.pairwise(bounds))
                parts += [Factor(factor.dim, a, b // a) for a, b in reversed(pairs)]
            dims.append(tuple(parts))
        return tuple(dims)

    cuts = cut(have), cut(want)
    if cuts[0] is None or cuts[1] is None or set(flat(cuts[0])) != set(flat(cuts[1])):
        return None
    return cuts[0], cuts[1]


def inverse(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Returns the axes of the origin, of `shape`, as an arrangement of the tensor with `axes`."""
    fine = refined(origin(shape), axes)
    if fine is None:
        return None
    places: dict[Factor, Factor] = {}
    for dim, factors in enumerate(fine[1]):
        stride = 1
        for factor in reversed(factors):
            places[factor] = Factor(dim, stride, factor.size)
            stride *= factor.size
    return tuple(joined(places[factor] for factor in factors) for factors in fine[0])
