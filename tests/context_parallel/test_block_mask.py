"""Block masks cut to a rank, against the dense mask and torch's own flex attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from symm_cp.context_parallel import block_mask as module
from symm_cp.context_parallel.block_mask import local_block_mask, local_score_mod
from symm_cp.context_parallel.gathered_keys import _own_blocks
from symm_cp.context_parallel.load_balancers import (
    HeadTail,
    LoadBalancer,
    PerDocumentHeadTail,
    ProcessingTimeRoundRobin,
    Sequential,
)
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.ops.attention.flex.mask import AREA, EMPTY, FULL, PARTIAL, block_states
from symm_cp.schedule.layout import SequenceLayout
from tests.context_parallel.common import attention
from tests.cuda.simulated import simulation
from tests.exhaustive import some

MaskMod = Callable[..., torch.Tensor]


def mask_mods(length: int) -> Iterator[tuple[str, MaskMod, int, int]]:
    """Masks, with the numbers of samples and heads that they distinguish."""
    document = torch.bucketize(torch.arange(length), torch.tensor([length // 3, length // 2]))
    drawn = torch.rand(length, length) < 0.1
    reach = torch.tensor([[3, 40, length], [0, 17, 2]])
    yield "causal", lambda b, h, i, j: i >= j, 1, 1
    yield "documents", lambda b, h, i, j: document[i] == document[j], 1, 1
    yield "window", lambda b, h, i, j: (i - j).abs() <= 9, 1, 1
    yield "prefix", lambda b, h, i, j: (j < length // 4) | (i >= j), 1, 1
    yield "drawn", lambda b, h, i, j: drawn[i, j], 1, 1
    yield "by head", lambda b, h, i, j: (i >= j) & (i - j <= reach[b, h]), 2, 3
    yield "nothing", lambda b, h, i, j: (i < 0) & (j < 0), 1, 1


def balancers(mask: BlockMask, W: int) -> Iterator[LoadBalancer]:
    length = mask.seq_lengths[0]
    parts = [length // 3, 0, 1, length - length // 3 - 1]
    yield Sequential(length, W)
    yield HeadTail(length, W)
    yield PerDocumentHeadTail(parts, W)
    yield ProcessingTimeRoundRobin(mask, W)
    order = random.sample(range(2 * W), 2 * W)
    yield LoadBalancer(SequenceLayout(W, tuple(order), (length, *[0] * (2 * W - 1))))


def expected_states(mask: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The states of a dense mask's blocks, computed one block at a time."""
    B, H, Q, K = mask.shape
    shape = (B, H, -(-Q // size[0]), -(-K // size[1]))
    states = torch.full(shape, PARTIAL, dtype=torch.int8)
    for row in range(shape[2]):
        for column in range(shape[3]):
            block = mask[..., row * size[0] :, column * size[1] :][..., : size[0], : size[1]]
            seen = block.sum((-1, -2))
            states[:, :, row, column].masked_fill_(seen == 0, EMPTY)
            states[:, :, row, column].masked_fill_(seen == size[0] * size[1], FULL)
    return states


def check_local(
    mask: BlockMask, dense: torch.Tensor, balancer: LoadBalancer, rank: int, what: str
) -> None:
    local = local_block_mask(mask, balancer, rank)
    rows, (B, H) = len(balancer.positions(rank)), dense.shape[:2]
    assert local.seq_lengths == (rows, dense.shape[3]), what
    assert tuple(local.BLOCK_SIZE) == tuple(mask.BLOCK_SIZE), what
    assert local.symm_cp_global is mask
    exact = dense[:, :, balancer.positions(rank)][..., balancer.permutation()]
    assert torch.equal(block_states(local), expected_states(exact, mask.BLOCK_SIZE)), what
    # torch's kernels evaluate whole blocks: the mask hides positions beyond the end.
    again = create_mask(local.mask_mod, B, H, rows + 5, dense.shape[3] + 3, "cpu")
    assert torch.equal(again, F.pad(exact, (0, 3, 0, 5))), what


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
def test_against_the_dense_mask(world_size: int) -> None:
    sizes = [(64 * world_size, (16, 16)), (131, (16, 32)), (90, (128, 128)), (7, (4, 2))]
    for turn, (length, size) in enumerate(sizes):
        for name, mask_mod, B, H in mask_mods(length):
            mask = create_block_mask(mask_mod, B, H, length, length, "cpu", size)
            dense = create_mask(mask_mod, B, H, length, length, "cpu")
            found = list(balancers(mask, world_size))
            for balancer in (found[turn % 5], random.choice(found)):
                for rank in {0, random.randrange(world_size), world_size - 1}:
                    what = f"{name}, {length=}, {size=}, {balancer}, {rank=}"
                    check_local(mask, dense, balancer, rank, what)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.exhaustive
def test_torchs_flex_attention() -> None:
    length, W = 150, 3
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64) for _ in range(3))
    slopes = torch.rand(3, dtype=torch.float64)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + slopes[h] * (j - i)

    at = torch.arange(length)
    bias = slopes[:, None, None] * (at[None] - at[:, None])
    for turn, (_, mask_mod, B, H) in enumerate(mask_mods(length)):
        mask = create_block_mask(mask_mod, B, H, length, length, "cpu", 32)
        dense = create_mask(mask_mod, 2, 3, length, length, "cpu")
        expected, _ = attention(q, k, v, dense, bias=bias)
        balancer, rank = list(balancers(mask, W))[turn % 4], turn % W
        order, rows = balancer.permutation(), balancer.positions(rank)
        out = flex_attention(
            q[:, :, rows], k[:, :, order], v[:, :, order],
            local_score_mod(alibi, balancer, rank), local_block_mask(mask, balancer, rank),
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        # 150 terms of size 1 and less, in float64.
        assert torch.allclose(out, expected[:, :, rows], rtol=0, atol=150 * 2.0**-52)


def test_cross_attention() -> None:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return i // 5 >= j // 3

    mask = create_block_mask(mask_mod, 1, 1, 70, 45, "cpu", 16)
    dense = create_mask(mask_mod, 1, 1, 70, 45, "cpu")
    queries = HeadTail(70, 2)
    for keys in (None, Sequential(45, 2), HeadTail(45, 2)):
        order = torch.arange(45) if keys is None else keys.permutation()
        for rank in range(2):
            local = local_block_mask(mask, queries, rank, kv_load_balancer=keys)
            again = create_mask(local.mask_mod, 1, 1, *local.seq_lengths, "cpu")
            assert torch.equal(again, dense[:, :, queries.positions(rank)][..., order])


def test_blocks_without_a_mask() -> None:
    """Blocks listed by hand are split where a chunk ends within them."""
    counts, indices = torch.tensor([[[1, 2, 0, 1]]]), torch.arange(4).int().expand(1, 1, 4, 4)
    mask = BlockMask.from_kv_blocks(counts.int(), indices.contiguous(), BLOCK_SIZE=8)
    dense = (torch.arange(4) < counts.unsqueeze(-1)).repeat_interleave(8, -1)
    dense = dense.repeat_interleave(8, -2)
    for balancer in (Sequential(32, 3), HeadTail(32, 2), HeadTail(32, 4)):
        for rank in range(balancer.world_size):
            local = local_block_mask(mask, balancer, rank)
            assert local.full_kv_num_blocks is None
            exact = dense[:, :, balancer.positions(rank)][..., balancer.permutation()]
            again = create_mask(local.mask_mod, 1, 1, *local.seq_lengths, "cpu")
            assert torch.equal(again, exact)
            assert torch.equal(block_states(local) > 0, expected_states(exact, (8, 8)) > 0)


def test_one_block_for_everything() -> None:
    """torch makes such a block mask where none is given."""
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        ones, torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=1 << 30, seq_lengths=(33, 33)
    )
    local = local_block_mask(mask, HeadTail(33, 4), 2)
    assert local.mask_mod is not mask.mask_mod
    assert create_mask(local.mask_mod, 1, 1, *local.seq_lengths, "cpu").all()
    assert block_states(local).tolist() == [[[[PARTIAL]]]]


def test_evaluates_little(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = module.evaluate

    def evaluate(*args: Any) -> torch.Tensor:
        visible = original(*args)
        sizes.append(visible.numel())
        return visible

    monkeypatch.setattr(module, "evaluate", evaluate)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 4096, 4096, "cpu")
    for rank in range(4):
        local_block_mask(mask, HeadTail(4096, 4), rank)
        local_block_mask(mask, ProcessingTimeRoundRobin(mask, 4), rank)
    assert not sizes  # chunks of whole blocks: rows and columns are gathered
    odd = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 4000, 4000, "cpu", (2048, 1024))
    local_block_mask(odd, HeadTail(4000, 3), 1)
    assert sizes
    assert max(sizes) <= AREA


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_of_samples_with_layouts_of_their_own(batch: int) -> None:
    balancer = PerDocumentHeadTail([[16, 48], [40, 24]], 2)
    numbers = torch.stack(
        [
            torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
            for lengths in balancer.document_lengths[:batch]
        ]
    )

    def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        b = b if batch == 2 else b * 0  # one mask for all samples
        return (i >= j) & (numbers[b, i] == numbers[b, j])

    local = local_block_mask(create_block_mask(documents, batch, 1, 64, 64, "cpu", 16), balancer, 1)
    assert tuple(local.shape) == (2, 1, 32, 64)
    keys = balancer.permutation()
    dense = create_mask(local.mask_mod, 2, 1, 32, 64, "cpu")
    for b, queries in enumerate(balancer.positions(1)):
        expected = documents(torch.tensor(b), 0, queries[:, None], keys[b][None])
        assert torch.equal(dense[b, 0], expected)
        alone = create_block_mask(
            lambda _b, h, i, j, seen=expected: seen[i, j], 1, 1, 32, 64, "cpu", 16
        )
        assert torch.equal(block_states(local)[b], block_states(alone)[0])


def test_layouts_of_samples_that_do_not_fit() -> None:
    balancer = PerDocumentHeadTail([[16, 48], [40, 24]], 2)
    with pytest.raises(NotImplementedError, match="layout for each"):
        local_score_mod(lambda s, *_: s, balancer, 0)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 3, 1, 64, 64, "cpu", 16)
    with pytest.raises(ValueError, match="must be for 1 or 2, not 3"):
        local_block_mask(mask, balancer, 0)


def test_errors() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 64, 64, "cpu", 16)
    for call, text in [
        (lambda: local_block_mask(mask, Sequential(63, 3), 0), "whole sequence"),
        (lambda: local_block_mask(mask, Sequential(64, 3), 3), "rank=3"),
        (lambda: local_score_mod(lambda s, *_: s, Sequential(64, 3), -1), "rank=-1"),
        (
            lambda: local_block_mask(
                mask, Sequential(64, 2), 0, kv_load_balancer=Sequential(63, 2)
            ),
            "whole sequence",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


def test_positions_of_a_score_mod_are_where_its_indices_are() -> None:
    local = local_score_mod(
        lambda score, b, h, q, k: score + q - k, Sequential(64, 2), 1, device="meta"
    )
    index = torch.zeros(1, dtype=torch.int64, device="meta")
    assert local(torch.zeros((), device="meta"), *(index,) * 4).device.type == "meta"


def test_a_mask_that_all_layers_use_is_cut_once() -> None:
    def made() -> BlockMask:
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, "cpu", (16, 16))

    cuts, masks, balancer = module.Cuts(most=2), [made() for _ in range(3)], HeadTail(64, 2)
    cut = cuts.get(masks[0], balancer, balancer, 1)
    other = cuts.get(masks[1], balancer, balancer, 1)
    for _ in range(3):
        assert cuts.get(masks[0], balancer, balancer, 1) is cut
        assert cuts.get(masks[1], balancer, balancer, 1) is other
    masks[0].kv_num_blocks.zero_()  # the numbers of full blocks stay
    changed = cuts.get(masks[0], balancer, balancer, 1)
    assert not torch.equal(block_states(changed), block_states(cut))
    assert cuts.get(masks[1], Sequential(64, 2), balancer, 1) is not other
    assert cuts.get(masks[2], balancer, balancer, 0) is not cut
    assert len(cuts._latest) == 2


def test_a_mask_that_was_cut_before_is_not_cut_again() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, "cpu", (16, 16))
    balancer = HeadTail(64, 2)
    given = local_block_mask(mask, balancer, 1)

    def own(blocks: BlockMask) -> BlockMask | None:
        of_rank_1 = balancer, balancer, 1, torch.device("cpu")
        return _own_blocks(SequenceMask(block_mask=blocks), 1, *of_rank_1)

    with simulation(graph=True):  # in which the host must not wait
        assert own(given) is given
        for wrong in (mask, local_block_mask(mask, balancer, 0)):
            with pytest.raises(RuntimeError, match="cannot be cut while a CUDA graph is captured"):
                own(wrong)
    assert own(mask) is not given


def test_local_masks_are_made_on_the_device() -> None:
    """A copy from the host would make the host wait."""
    for balancer in (HeadTail(61, 3), PerDocumentHeadTail([[12, 6], [6, 12]], 3)):
        made = balancer.positions(1, device="meta"), balancer.permutation(device="meta")
        for on_device, plain in zip(
            made, (balancer.positions(1), balancer.permutation()), strict=True
        ):
            assert on_device.device.type == "meta"
            assert (on_device.shape, on_device.dtype) == (plain.shape, plain.dtype)
        assert balancer.gathered_rows(device="meta").device.type == "meta"
    uneven = LoadBalancer(SequenceLayout(3, (0, 1, 2), (5, 0, 3)))
    assert uneven.gathered_rows().tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
