"""`shard_batch`: labels, positions, and a loss that equals the whole batch's."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from transformers.modeling_outputs import BaseModelOutput

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, mesh_of
from tests.exhaustive import exhaustive, pairs, some

IGNORE = -100


@pytest.mark.parametrize(
    ("world_size", "length"),
    some((2, 5), (4, 24), of=itertools.product([1, 2, 3, 4], [5, 24])),
)
@pytest.mark.ranks
def test_the_loss_is_that_of_the_whole_batch(
    group: dist.ProcessGroup, world_size: int, length: int
) -> None:
    seed = int(torch.randint(1 << 30, ()))
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


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
@pytest.mark.ranks
def test_ranks_without_labels(group: dist.ProcessGroup, world_size: int) -> None:
    """All labels are in the first quarter, or there are none."""
    mesh, W = mesh_of(group), group.size()
    generator = torch.Generator().manual_seed(W)
    ids = torch.randint(11, (2, 4 * W), generator=generator)
    table = torch.randn(11, 11, dtype=torch.float64, generator=generator).requires_grad_()
    for kept in (slice(0, W), slice(0, 0)):
        labels = torch.full_like(ids, IGNORE)
        labels[:, kept] = ids[:, kept]
        whole = {"input_ids": ids, "labels": labels}
        local, reduce_loss = symm_cp.shard_batch(
            mesh, whole, load_balancer=symm_cp.Sequential(4 * W, W)
        )
        logits = table[local["input_ids"]].flatten(0, 1)
        if not kept.stop:  # no label at all: no loss, no gradient, no NaN
            loss = reduce_loss(F.cross_entropy(logits, local["labels"].flatten()))
            assert loss == 0
            assert reduce_loss.num_items == 0
            assert not torch.autograd.grad(loss, table)[0].any()
            continue
        expected = F.cross_entropy(table[ids[:, :-1]].flatten(0, 1), labels[:, 1:].flatten())
        (grad,) = torch.autograd.grad(expected, table)
        assert reduce_loss.num_items == 2 * (W - 1)
        for summed in (False, True):
            logits = table[local["input_ids"]].flatten(0, 1)
            how = {"reduction": "sum" if summed else "mean"}
            loss = F.cross_entropy(logits, local["labels"].flatten(), **how)
            if summed:
                loss = loss / reduce_loss.num_items
            loss = reduce_loss(loss, summed=summed)
            torch.testing.assert_close(loss, expected, **CLOSE)
            (share,) = torch.autograd.grad(loss, table)
            dist.all_reduce(share, group=group)
            torch.testing.assert_close(share, grad, **CLOSE)


def second_loss(group: dist.ProcessGroup) -> None:
    """A loss over labels of two tokens ahead, with gaps of its own, in one process and spread."""
    generator = torch.Generator().manual_seed(group.size())
    table = torch.randn(11, 11, dtype=torch.float64, generator=generator).requires_grad_()
    for length in (18, 2):  # ranks without labels, and without positions
        ids = torch.randint(11, (2, length), generator=generator)
        ahead = ids.roll(-1, 1)
        ahead[0, length // 4 :] = IGNORE
        ahead[:, : length // 4] = IGNORE
        expected = F.cross_entropy(table[ids].flatten(0, 1), ahead.flatten())
        (grad,) = torch.autograd.grad(expected, table)
        batch = {"input_ids": ids, "labels": ids, "mtp_labels": ahead, "targets": ahead}
        local, reduce_loss = symm_cp.shard_batch(mesh_of(group), batch)
        own = local["mtp_labels"]
        for labels in ("mtp_labels", own, own.flatten(), own.view(-1), "targets"):
            logits = table[local["input_ids"]].flatten(0, 1)
            loss = reduce_loss(F.cross_entropy(logits, own.flatten()), labels=labels)
            torch.testing.assert_close(loss, expected, **CLOSE)
            (share,) = torch.autograd.grad(loss, table)
            dist.all_reduce(share, group=group)
            torch.testing.assert_close(share, grad, **CLOSE)
        for unknown in ("input_ids", "mtp", ahead):  # `ahead` is whole
            with pytest.raises(ValueError, match=r"name: \['labels', 'mtp_labels', 'targets'\]"):
                reduce_loss(loss, labels=unknown)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduce_loss(loss)
        told = sum("other shares of ['mtp_labels']" in str(w.message) for w in caught)
        dist.all_reduce(total := torch.tensor(told), group=group)
        assert total > 0


def mean_of_samples(group: dist.ProcessGroup) -> None:
    """The mean over a sample's tokens, then over samples, in one process and spread."""
    generator = torch.Generator().manual_seed(group.size())
    table = torch.randn(11, 11, dtype=torch.float64, generator=generator).requires_grad_()
    for length in (9, 2):
        ids = torch.randint(11, (2, length), generator=generator)
        labels = ids.clone()
        labels[0, length // 3 + 1 :] = IGNORE
        kept = labels != IGNORE
        losses = F.cross_entropy(table[ids].mT, labels, reduction="none")
        expected = (losses.sum(1) / kept.sum(1)).mean()
        (grad,) = torch.autograd.grad(expected, table)
        weights = kept.double() / kept.sum(1, keepdim=True)
        batch = {"input_ids": ids, "labels": labels, "w": weights, "loss_mask": kept}
        local, reduce_loss = symm_cp.shard_batch(mesh_of(group), batch, shift_labels=False)

        def own(local: dict[str, torch.Tensor] = local) -> torch.Tensor:
            logits = table[local["input_ids"]].mT
            return F.cross_entropy(logits, local["labels"], reduction="none")

        for losses, named in ((own(), "w"), (own().flatten(), local["w"])):
            loss = reduce_loss(losses, weights=named)
            torch.testing.assert_close(loss, expected, **CLOSE)
            (share,) = torch.autograd.grad(loss, table)
            dist.all_reduce(share, group=group)
            torch.testing.assert_close(share, grad, **CLOSE)
        mean = reduce_loss(own(), weights="loss_mask")
        torch.testing.assert_close(mean, F.cross_entropy(table[ids].mT, labels), **CLOSE)
        with pytest.raises(ValueError, match="the losses of tokens require weights="):
            reduce_loss(own().expand(2, *own().shape))
        with pytest.raises(ValueError, match=r"weights is 'v', must be .*'loss_mask', 'w'\]"):
            reduce_loss(own(), weights="v")
        with pytest.raises(ValueError, match=r"must have one number for each of the weights 'w'"):
            reduce_loss(own().repeat(1, 2), weights="w")


@pytest.mark.parametrize("world_size", some(3, of=[2, 3, 4]))
def test_second_losses(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, second_loss)
    ranks.run(world_size, mean_of_samples)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_what_a_batch_holds(group: dist.ProcessGroup, world_size: int) -> None:
    mesh, W, rank, S = mesh_of(group), group.size(), group.rank(), 12
    rows = symm_cp.HeadTail(S, W).positions(rank)
    ids = torch.arange(2 * S).view(2, S)
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    cut = {
        "input_ids": ids,
        "labels": ids + 1,
        "position_ids": packed,
        "attention_mask": (ids > 3).long(),
        "token_type_ids": ids % 2,
        "seq_idx": ids.int() // 3,
        "my_weights": ids.float(),
    }
    whole = {
        # As long as the sequence by chance: numbers of boundaries, heads, channels.
        "cu_seq_lens_q": torch.arange(S),
        "cu_seq_lens_k": torch.arange(S).expand(2, -1),
        "max_length_q": 7,
        "max_length_k": torch.tensor([7] * S),
        "pixel_values": torch.zeros(2, S, 4, 4),
        "input_features": torch.zeros(2, S, 30),
        "return_dict": True,
    }
    local, _ = symm_cp.shard_batch(mesh, {**cut, **whole}, shift_labels=False)
    assert local.keys() == cut.keys() | whole.keys()
    for name, value in cut.items():
        assert torch.equal(local[name], value[:, rows]), name
    for name, value in whole.items():
        assert local[name] is value, name
    mask = torch.ones(2, S, S, S, dtype=torch.bool)
    several = torch.arange(3 * 2 * S).view(3, 2, S)  # positions in time, height and width
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": several}
    local, _ = symm_cp.shard_batch(mesh, batch)
    assert local["attention_mask"] is mask
    assert torch.equal(local["position_ids"], several[..., rows])
    # The collator may have shifted the labels.
    batch = {"input_ids": ids, "labels": ids, "shift_labels": ids + 7}
    local, _ = symm_cp.shard_batch(mesh, batch)
    assert torch.equal(local["labels"], (ids + 7)[:, rows])
    assert torch.equal(local["shift_labels"], (ids + 7)[:, rows])


@pytest.mark.ranks(2)
def test_embeddings_are_cut_differentiably(group: dist.ProcessGroup) -> None:
    mesh, W, rank = mesh_of(group), group.size(), group.rank()
    embeds = torch.randn(2, 8, 3, dtype=torch.float64).requires_grad_()
    weights = torch.randn(2, 8, 3, dtype=torch.float64)
    for tensor in (embeds.data, weights):
        dist.broadcast(tensor, 0, group=group)
    rows = symm_cp.HeadTail(8, W).positions(rank)
    local, _ = symm_cp.shard_batch(mesh, {"inputs_embeds": embeds})
    assert torch.equal(local["position_ids"], rows.expand(2, -1))
    (grad,) = torch.autograd.grad((local["inputs_embeds"] * weights[:, rows]).sum(), embeds)
    dist.all_reduce(grad, group=group)
    torch.testing.assert_close(grad, weights)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_encoder_and_decoder_have_lengths_of_their_own(
    group: dist.ProcessGroup, world_size: int
) -> None:
    mesh, W, rank = mesh_of(group), group.size(), group.rank()
    one, other = torch.arange(40).view(2, 20), torch.arange(24).view(2, 12)
    hidden = torch.randn(2, 20, 3)
    for by in (None, {20: symm_cp.Sequential(20, W), 12: symm_cp.HeadTail(12, W)}):
        used = by or {n: symm_cp.HeadTail(n, W) for n in (20, 12)}
        of_one, of_other = (used[n].positions(rank) for n in (20, 12))
        batch = {
            "input_ids": one,
            "attention_mask": one + 1,
            "decoder_input_ids": other,
            "decoder_attention_mask": other + 1,
            "labels": other + 2,
        }
        local, reduce_loss = symm_cp.shard_batch(mesh, batch, load_balancer=by)
        for name, rows in (("input_ids", of_one), ("attention_mask", of_one)):
            assert torch.equal(local[name], batch[name][:, rows]), name
        for name in ("decoder_input_ids", "decoder_attention_mask", "labels"):  # not shifted
            assert torch.equal(local[name], batch[name][:, of_other]), name
        assert "position_ids" not in local
        assert reduce_loss.load_balancer == used
        outputs = BaseModelOutput(last_hidden_state=hidden, hidden_states=None)
        for given in (outputs, (hidden,)):
            del batch["input_ids"], batch["attention_mask"]
            batch = {**batch, "encoder_outputs": given, "input_ids": None, "attention_mask": None}
            local, _ = symm_cp.shard_batch(mesh, batch, load_balancer=by)
            assert torch.equal(local["encoder_outputs"][0], hidden[:, of_one])
            assert torch.equal(local["labels"], batch["labels"][:, of_other])
        assert isinstance(local["encoder_outputs"], list)


SIZES = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_labels": 31}
SIZES |= {"intermediate_size": 16, "pad_token_id": 1, "max_position_embeddings": 80}


def model_of(name: str, **options: object) -> torch.nn.Module:
    """A small model with random weights, the same on all ranks."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    made = kind.config_class(**{**SIZES, "attn_implementation": "sdpa", **options})
    return kind(made).double().eval()


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_the_model_decides_what_a_batch_needs(group: dist.ProcessGroup, world_size: int) -> None:
    mesh, W, rank = mesh_of(group), group.size(), group.rank()
    rows = symm_cp.HeadTail(16, W).positions(rank)
    ids = torch.randint(2, 31, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[1, 12:] = 1  # padding
    labels = ids.masked_fill(ids == 1, IGNORE)
    batch = {"input_ids": ids, "labels": labels}
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)

    local, _ = symm_cp.shard_batch(mesh, batch, model=model_of("LlamaForCausalLM"))
    assert torch.equal(local["labels"], shifted[:, rows])
    assert torch.equal(local["shift_labels"], shifted[:, rows])
    assert torch.equal(local["position_ids"], rows.expand(2, -1))

    wrapped = torch.nn.parallel.DistributedDataParallel(
        model_of("BertForMaskedLM"), process_group=group
    )
    local, _ = symm_cp.shard_batch(mesh, batch, model=wrapped)
    assert torch.equal(local["labels"], labels[:, rows])
    assert "shift_labels" not in local

    # RoBERTa counts from padding_idx + 1, and not at padding.
    model = model_of("RobertaForMaskedLM")
    local, _ = symm_cp.shard_batch(mesh, batch, model=model)
    positions = ((ids != 1).cumsum(1) * (ids != 1)) + 1
    assert torch.equal(local["position_ids"], positions[:, rows])

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = model_of("T5ForConditionalGeneration", **sizes, decoder_start_token_id=3)
    batch["labels"] = labels[:, :6].contiguous()
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, model=model)
    of_labels = symm_cp.HeadTail(6, W).positions(rank)
    inputs = F.pad(batch["labels"][:, :-1], (1, 0), value=3).masked_fill(ids[:, :6] == 0, 1)
    inputs = inputs.masked_fill(inputs == IGNORE, 1)
    assert torch.equal(local["labels"], batch["labels"][:, of_labels])
    assert torch.equal(local["decoder_input_ids"], inputs[:, of_labels])
    assert local.keys() == {"input_ids", "labels", "decoder_input_ids"}
    assert reduce_loss.load_balancer.keys() == {16, 6}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration makes decoder_input_ids"):
        symm_cp.shard_batch(mesh, {"input_ids": ids}, model=model)
    del batch["labels"]
    batch["labels"] = labels
    bart = model_of("BartForCausalLM", d_model=16, decoder_layers=1, decoder_attention_heads=2)
    with pytest.raises(NotImplementedError, match="BartForCausalLM computes its loss without shi"):
        symm_cp.shard_batch(mesh, batch, model=bart)


@pytest.mark.parametrize(
    ("world_size", "name", "where"),
    some(
        (2, "LlamaForCausalLM", "begin"),
        of=pairs(
            (2, 4, 1),
            ("LlamaForCausalLM", "GPT2LMHeadModel", "RobertaForTokenClassification"),
            ("begin", "end", "scattered"),
        ),
    ),
)
@pytest.mark.ranks
def test_models_compute_their_loss(
    group: dist.ProcessGroup, world_size: int, name: str, where: str
) -> None:
    """The model's own loss, as a mean and as a sum divided by the number of labels."""
    mesh, W = mesh_of(group), group.size()
    model, dense = model_of(name), model_of(name)
    ids = torch.randint(2, 31, (2, 8 * W), generator=torch.Generator().manual_seed(W))
    labels = ids.clone()
    hidden = {"begin": slice(0, 5 * W), "end": slice(3 * W, None), "scattered": slice(0, None, 3)}
    labels[:, hidden[where]] = IGNORE
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    expected = dense(**batch).loss
    expected.backward()
    # A model for token classes ignores num_items_in_batch.
    for summed in (False, True)[: 2 if "LM" in name else 1]:
        model.zero_grad()
        local, reduce_loss = symm_cp.shard_batch(mesh, batch, model=model)
        how = {"num_items_in_batch": reduce_loss.num_items} if summed else {}
        with symm_cp.context_parallel(mesh, model=model, load_balancer=reduce_loss.load_balancer):
            loss = reduce_loss(model(**local, **how).loss, summed=summed)
            loss.backward()
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
        for (parameter, got), want in zip(
            model.named_parameters(), dense.parameters(), strict=True
        ):
            dist.all_reduce(got.grad, group=group)
            torch.testing.assert_close(
                got.grad, want.grad, rtol=1e-4, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}"
            )


@pytest.mark.ranks(2)
def test_bad_batches_are_refused_and_given_positions_kept(group: dist.ProcessGroup) -> None:
    mesh, ids = mesh_of(group), torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="must have input_ids, inputs_embeds, encoder_out"):
        symm_cp.shard_batch(mesh, {"x": ids})
    with pytest.raises(ValueError, match=r"labels of shape \[2\] must have one for each of the 8"):
        symm_cp.shard_batch(mesh, {"input_ids": ids, "labels": ids[:, 0]})
    with pytest.raises(ValueError, match=r"8 positions of input_ids .*pass decoder_input_ids"):
        symm_cp.shard_batch(mesh, {"input_ids": ids, "labels": ids[:, :6]})
    positions = {"start_positions": ids[:, 0], "end_positions": ids[:, 1]}
    with pytest.raises(ValueError, match="'end_positions', 'start_positions'"):
        symm_cp.shard_batch(mesh, {"input_ids": ids, **positions})
    two = {"input_ids": ids, "decoder_input_ids": ids[:, :6]}
    with pytest.raises(ValueError, match="does not fit a sequence of 6 positions"):
        symm_cp.shard_batch(mesh, two, load_balancer=symm_cp.HeadTail(8, 2))
    two["decoder_input_ids"] = ids[:, :7]
    with pytest.raises(ValueError, match=r"rank 1 has 4 rows of .*=7.* and of .*=8"):
        symm_cp.shard_batch(mesh, two)
    with pytest.raises(ValueError, match="seq_dim=2 is out of range"):
        symm_cp.shard_batch(mesh, {"input_ids": ids}, seq_dim=2)
    with pytest.raises(ValueError, match="does not fit a sequence of 8 positions on 2 ranks"):
        symm_cp.shard_batch(mesh, {"input_ids": ids}, load_balancer=symm_cp.HeadTail(9, 2))
    given = {"input_ids": ids, "labels": ids, "position_ids": ids}
    local, _ = symm_cp.shard_batch(mesh, given, shift_labels=False)
    assert torch.equal(local["position_ids"], ids[:, :4])
    assert torch.equal(local["labels"], ids[:, :4])


@exhaustive
@pytest.mark.ranks(2)
def test_the_loss_is_reduced_in_graphs(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    ids = torch.randint(5, (2, 8))
    _, reduce_loss = symm_cp.shard_batch(mesh_of(group), {"input_ids": ids, "labels": ids})
    weights = torch.randn(3, requires_grad=True)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return reduce_loss((w * (group.rank() + 1)).sum())

    results = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        total = call(weights)
        results.append((total, *torch.autograd.grad(total, weights)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
