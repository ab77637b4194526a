"""How dimensions are divided and where shards lie, against torch's own views."""

from __future__ import annotations

import random

import pytest
import torch

from symm_cp.tensors.shards import ByteRows, Extent, Shards, Split, joint_rows, viewing


@pytest.mark.parametrize(("length", "ranks"), [(5, 3), (32_001, 4), (2, 4), (0, 3), (12, 4)])
def test_nearly_equal_parts_are_those_of_tensor_split(length: int, ranks: int) -> None:
    whole = torch.randn(2, length, 3)
    split = Split.nearly_equal(length, ranks, dim=1)
    parts = torch.tensor_split(whole, ranks, 1)
    for rank, part in enumerate(parts):
        assert torch.equal(split.of(rank, whole), part)
        assert split.shape_of(rank, whole.shape) == list(part.shape)
        assert split.whole_shape(part.shape) == list(whole.shape)
        assert split.whole(part).shape == whole.shape


def test_parts_of_any_size_make_up_the_whole() -> None:
    whole = torch.randn(7, 4)
    split = Split((3, 0, 4))
    assert (split.length, split.is_equal) == (7, False)
    assert Split.equal(2, 3).is_equal
    assert torch.equal(torch.cat([split.of(rank, whole) for rank in range(3)]), whole)
    assert split.along(1).of(2, torch.randn(2, 7)).shape == (2, 4)


def _bytes_at(memory: torch.Tensor, run: ByteRows) -> torch.Tensor:
    """The bytes of a run of rows, one row after the other."""
    rows = [memory[run.offset + row * run.pitch :][: run.nbytes] for row in range(run.rows)]
    return torch.cat(rows)


def test_extents_of_a_split_are_the_bytes_of_its_parts() -> None:
    draw = random.Random()
    for _ in range(50):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(1, 4))]
        dim = draw.randrange(len(shape))
        cuts = sorted(draw.randint(0, shape[dim]) for _ in range(2))
        split = Split((cuts[0], cuts[1] - cuts[0], shape[dim] - cuts[1]), dim)
        whole = torch.randn(shape)
        memory = whole.flatten().view(torch.uint8)
        extent = Extent.split(0, split, shape, 4)
        for rank in range(3):
            wanted = split.of(rank, whole).contiguous().flatten().view(torch.uint8)
            assert torch.equal(_bytes_at(memory, extent.run(rank)), wanted), (shape, split)
        assert torch.equal(_bytes_at(memory, extent.run(None)), memory)


def test_a_copy_between_runs_has_the_rows_of_the_side_that_has_several() -> None:
    columns, contiguous = ByteRows(0, 8, 3, 32), ByteRows(64, 24, 1, 24)
    assert joint_rows(columns, contiguous) == (8, 3, 8, 32)
    assert joint_rows(contiguous, columns) == (8, 3, 32, 8)
    with pytest.raises(AssertionError):
        joint_rows(ByteRows(0, 25, 1, 25), columns)


def test_shards_of_several_tensors_come_back_from_memory() -> None:
    shapes = [((3, 2), (5,)), ((0, 2), (1,)), ((4, 2), (2,))]
    tensors = [[torch.randn(a), torch.randint(9, b)] for a, b in shapes]
    for rank, own in enumerate(tensors):
        shards = Shards(own, 3, shapes)
        memory = torch.zeros(64 + shards.nbytes, dtype=torch.uint8)
        shards.pack(rank, viewing(memory), 64)
        for found, wanted in zip(shards.views(rank, viewing(memory), 64), own, strict=True):
            assert torch.equal(found, wanted)
        # A part begins at the same aligned place on all ranks.
        assert all(offset % 64 == 0 for offset in shards.sizes.offsets)
        assert shards.sizes.offsets == Shards(tensors[0], 3, shapes).sizes.offsets


def test_without_shapes_all_shards_are_as_the_own_one() -> None:
    shards = Shards([torch.randn(4, 3).t()], 2)
    assert shards.shapes == (((3, 4),),) * 2
    assert not shards.contiguous
