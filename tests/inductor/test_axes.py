"""Axes after views, transposes and moved parts, against what torch does."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_cp.inductor.axes import (
    Axes,
    Factor,
    expose,
    flat,
    inverse,
    lead,
    origin,
    permute,
    prepend,
    refined,
    sizes,
    view,
    without,
)
from tests.exhaustive import exhaustive


def elements(axes: Axes, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that axes describe: positions in the origin."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    positions = torch.zeros(1, dtype=torch.int64)
    for factor in flat(axes):
        steps = torch.arange(factor.size) * factor.stride * strides[factor.dim]
        positions = positions.unsqueeze(-1) + steps
    return positions.reshape(sizes(axes))


@st.composite
def arranged(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor, Axes]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    tensor, axes = torch.arange(math.prod(shape)).view(shape), origin(shape)
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["permute", "flatten", "unflatten", "move"]))
        ndim = tensor.dim()
        if kind == "permute":
            order = draw(st.permutations(range(ndim)))
            tensor, axes = tensor.permute(order), permute(axes, order)
        elif kind == "flatten" and ndim > 1:
            dim = draw(st.integers(0, ndim - 2))
            new = [*tensor.shape[:dim], tensor.shape[dim] * tensor.shape[dim + 1],
                   *tensor.shape[dim + 2 :]]  # fmt: skip
            viewed = view(axes, new)
            assert viewed is not None  # whole dimensions can always be joined
            tensor, axes = tensor.reshape(new), viewed
        elif kind == "unflatten":
            dim = draw(st.integers(0, ndim - 1))
            outer = draw(st.sampled_from([1, 2, 3]))
            if tensor.shape[dim] % outer == 0:
                new = [*tensor.shape[:dim], outer, tensor.shape[dim] // outer,
                       *tensor.shape[dim + 1 :]]  # fmt: skip
                viewed = view(axes, new)
                if viewed is not None:
                    tensor, axes = tensor.reshape(new), viewed
        elif kind == "move":
            source, target = (draw(st.integers(0, ndim - 1)) for _ in range(2))
            cut = lead(axes, source, 2)
            if cut is not None:
                tensor = torch.cat(tensor.chunk(2, source), target)
                axes = prepend(cut[1], target, cut[0])
    return shape, tensor, axes


@settings(max_examples=400, deadline=None)
@given(arranged())
@exhaustive
def test_axes_say_where_elements_are(case: tuple[tuple[int, ...], torch.Tensor, Axes]) -> None:
    shape, tensor, axes = case
    assert sizes(axes) == list(tensor.shape)
    assert torch.equal(elements(axes, shape), tensor)
    fine = refined(axes, origin(shape))
    if fine is not None:
        assert torch.equal(elements(fine[0], shape), tensor)
        assert set(flat(fine[0])) == set(flat(fine[1]))
    back = inverse(axes, shape)
    assert (back is None) == (fine is None)
    if back is not None:
        places = elements(back, tuple(tensor.shape))
        assert torch.equal(tensor.flatten()[places], torch.arange(tensor.numel()).view(shape))


@settings(max_examples=200, deadline=None)
@given(arranged(), st.data())
def test_an_exposed_factor_stands_alone(
    case: tuple[tuple[int, ...], torch.Tensor, Axes], data: st.DataObject
) -> None:
    shape, tensor, axes = case
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.sampled_from([2, 3]))
    if shape[dim] % ranks:
        return
    wanted = Factor(dim, shape[dim] // ranks, ranks)
    exposed = expose(axes, wanted)
    if exposed is None:
        return
    at, place, fine = exposed
    assert fine[at][place] == wanted
    assert torch.equal(elements(fine, shape), tensor)
    assert math.prod(sizes(without(fine, wanted))) * ranks == tensor.numel()


def test_the_gather_of_a_middle_dimension() -> None:
    # (2 * 3, 4, 5) gathered along 0, its two parts moved to dimension 1, rows flattened.
    whole = origin((6, 4, 5))
    cut = lead(whole, 0, 2)
    assert cut is not None
    ranks, rest = cut
    rows = view(prepend(rest, 1, ranks), (24, 5))
    assert rows is not None
    assert expose(rows, Factor(0, 3, 2)) == (
        0,
        1,
        ((Factor(0, 1, 3), Factor(0, 3, 2), Factor(1, 1, 4)), (Factor(2, 1, 5),)),
    )


def test_what_is_no_arrangement_of_whole_factors() -> None:
    turned: Any = permute(origin((4, 6)), (1, 0))
    assert view(turned, (3, 8)) is not None
    assert view(turned, (4, 6)) is None  # cuts across: 6 x 4 read as 4 x 6
    assert view(origin((4,)), (2, 3)) is None
    assert lead(origin((5,)), 0, 2) is None
    assert lead(origin((1, 4)), 0, 2) is None
