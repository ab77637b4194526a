"""Records by which ranks compare inputs: what changes them, and what does not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from symm_cp.ops import equal_inputs
from tests import device


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_hashes_of_integers_know_values_and_places(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 70)).to(dtype)
    known = int(equal_inputs.hashed(x))
    assert int(equal_inputs.hashed(x.clone())) == known
    assert int(equal_inputs.hashed(x.t().contiguous().t())) == known
    for place in (0, 17, 349):
        other = x.clone().view(-1)
        other[place] = ~other[place] if dtype == torch.bool else other[place] + 1
        assert int(equal_inputs.hashed(other)) != known
    # Changes that cancel out in a plain sum, and in one with weights 1, 2, 3, ...
    ids = torch.full((300,), 50)
    hashes = {int(equal_inputs.hashed(ids))}
    for change in ([1, -1], [1, -2, 1], [1, -3, 3, -1], [1, -1, -1, 1]):
        for begin in range(0, 290, 7):
            other = ids.clone()
            other[begin : begin + len(change)] += torch.tensor(change)
            hashes.add(int(equal_inputs.hashed(other)))
    assert len(hashes) == 1 + 4 * len(range(0, 290, 7))


def test_hashes_of_contents_know_no_strides() -> None:
    for x in (torch.ones(1, 2)[:, ::2], torch.randn(6, 3).t(), torch.randn(9)[3:] * 1j):
        same = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        assert equal_inputs.content_hash(x) == equal_inputs.content_hash(same)
        assert equal_inputs.content_hash(x) != equal_inputs.content_hash(same + 1)


def test_values_are_compared_but_for_rounding() -> None:
    x = torch.randn(1000)
    first = equal_inputs.spread_values(x, 8).tolist()
    for rounded in (x.bfloat16(), x * 1.001):
        assert not equal_inputs.far_apart(first, equal_inputs.spread_values(rounded, 8).tolist())
    for other in (torch.randn(1000), -x, 2 * x, torch.zeros(1000)):
        assert equal_inputs.far_apart(first, equal_inputs.spread_values(other, 8).tolist())
    assert not equal_inputs.far_apart([math.nan, 1.0, math.inf], [0.0, 1.0, 1.0])
    for odd in (torch.empty(0, 3), torch.tensor(1.5), torch.randn(3, 4).t(), torch.randn(2) * 1j):
        assert equal_inputs.spread_values(odd, 8).shape == (8,)


@device.devices(*device.NAMES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_ranks_compare(group: dist.ProcessGroup, world_size: int) -> None:
    ids = torch.arange(40, device=device.name()).view(4, 10)
    many = [(f"x{k}", ids + k) for k in range(40)]  # more than a record has words
    how = {"subject": "things", "remedy": "do better"}
    equal_inputs.compare(group, "op", many, **how)
    for changed in (0, 14, 39):
        name, value = many[changed]
        here = list(many)
        here[changed] = (name, value + (group.rank() == 1))
        with pytest.raises(RuntimeError, match=f"things differ .*{name} .*do better"):
            equal_inputs.compare(group, "op", here, **how)
    with pytest.raises(RuntimeError, match=r"in the set of tensors \(here "):
        equal_inputs.compare(group, "op", many[: 3 + group.rank()], **how)
    for value in (ids, ids.float(), ids[:0], ids.float()[:0], ids[0, 0], ids > 3):
        same = equal_inputs.same_on_all_ranks(value, "op", "x", "same", group.group_name)
        assert same is value
        if value.numel():
            other = value[..., None] if group.rank() else value
            with pytest.raises(RuntimeError, match=r"op: the inputs of ranks differ .* in x"):
                equal_inputs.same_on_all_ranks(other, "op", "x", "same", group.group_name)
