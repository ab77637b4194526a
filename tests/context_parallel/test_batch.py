"""`shard_batch`: labels, positions, and a loss that is that of the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from tests.context_parallel.common import CLOSE, mesh_of
from tests.exhaustive import some
from tests.pool import Ranks

IGNORE = -100


def counts_every_label_once(group: dist.ProcessGroup, length: int, seed: int) -> None:
    mesh, W, rank = mesh_of(group), group.size(), group.rank()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (2, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 3] = IGNORE  # ranks have different numbers of targets
    table = torch.randn(11, 11, dtype=torch.float64, generator=generator).requires_grad_()

    logits = table[ids[:, :-1]]
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    (grad,) = torch.autograd.grad(expected, table)
    for balancer in (None, symm_cp.Sequential(length, W)):
        for average in (False, True):
            batch = {"input_ids": ids, "labels": labels, "scale": torch.ones(3)}
            local, reduce_loss = symm_cp.shard_batch(
                mesh, batch, load_balancer=balancer, average_gradients=average
            )
            rows = (balancer or symm_cp.HeadTail(length, W)).positions(rank)
            assert torch.equal(local["position_ids"], rows.expand(2, -1))
            assert torch.equal(local["input_ids"], ids[:, rows])
            assert local["scale"] is batch["scale"]
            mean = F.cross_entropy(
                table[local["input_ids"]].flatten(0, 1), local["labels"].flatten()
            )
            loss = reduce_loss(mean)
            torch.testing.assert_close(loss, expected, **CLOSE)
            (share,) = torch.autograd.grad(loss, table)
            dist.all_reduce(share, group=group)
            torch.testing.assert_close(share / (W if average else 1), grad, **CLOSE)
    assert torch.equal(labels[:, length // 3 :], ids[:, length // 3 :])  # the input is left alone


@pytest.mark.parametrize(
    ("world_size", "length"),
    some((2, 5), (4, 24), of=itertools.product([1, 2, 3, 4], [5, 24])),
)
def test_the_loss_is_that_of_the_whole_batch(ranks: Ranks, world_size: int, length: int) -> None:
    ranks.run(world_size, counts_every_label_once, length, int(torch.randint(1 << 30, ())))


def refuses(group: dist.ProcessGroup) -> None:
    mesh, ids = mesh_of(group), torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="must have input_ids or labels"):
        symm_cp.shard_batch(mesh, {"x": ids})
    with pytest.raises(ValueError, match="seq_dim=2 is out of range"):
        symm_cp.shard_batch(mesh, {"input_ids": ids}, seq_dim=2)
    with pytest.raises(ValueError, match="does not fit a sequence of 8 positions on 2 ranks"):
        symm_cp.shard_batch(mesh, {"input_ids": ids}, load_balancer=symm_cp.HeadTail(9, 2))
    given = {"input_ids": ids, "labels": ids, "position_ids": ids}
    local, _ = symm_cp.shard_batch(mesh, given, shift_labels=False)
    assert torch.equal(local["position_ids"], ids[:, :4])
    assert torch.equal(local["labels"], ids[:, :4])


def test_bad_batches_are_refused_and_given_positions_kept(ranks: Ranks) -> None:
    ranks.run(2, refuses)
