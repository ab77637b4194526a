"""`training_step` gives the loss and gradients of one process, however gradients are summed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import symm_cp
from tests.context_parallel.common import mesh_of
from tests.context_parallel.test_batch import model_of
from tests.exhaustive import exhaustive, some

IGNORED = -100


def masked_mean(logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    mask, labels = batch["labels"] != IGNORED, batch["labels"].clamp(min=0)
    return (F.cross_entropy(logits.mT, labels, reduction="none") * mask).sum() / mask.sum()


class Scored(nn.Module):
    """Computes its loss; takes shifted labels."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> dict[str, Any]:
        return {"loss": masked_mean(self.decoder(input_ids), {"labels": labels})}


def two_losses(logits: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    means = (masked_mean(logits, {"labels": batch[n]}) for n in ("labels", "mtp_labels"))
    return dict(zip(("labels", "mtp_labels"), means, strict=True))


def same_grads(model: nn.Module, dense: nn.Module, **limits: float) -> None:
    for (name, got), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if got.grad is not None:
            torch.testing.assert_close(
                got.grad, want.grad, msg=lambda m, n=name: f"{n}: {m}", **limits
            )


@pytest.mark.parametrize("loss_by", ["function", "model", "two functions"])
@pytest.mark.ranks(3)
def test_a_rank_without_labels(group: dist.ProcessGroup, loss_by: str) -> None:
    """A rank without labels adds nothing, though a mean over no labels has NaN gradients."""
    torch.manual_seed(0)
    one: nn.Module = Mixed(sparse=False).double()
    ids = torch.randint(8, 31, (2, 6 * group.size()))
    labels = ids.clone()
    labels[:, 6:] = IGNORED  # in sequential order all are on rank 0
    batch, model = {"input_ids": ids, "labels": labels}, copy.deepcopy(one)
    options: dict[str, Any] = {"loss_function": masked_mean}
    wanted = masked_mean(one(ids), batch)
    if loss_by == "model":
        options = {}
    if loss_by == "two functions":
        batch, options = (
            {**batch, "labels": ids, "mtp_labels": labels},
            {"loss_function": two_losses},
        )
        wanted = sum(two_losses(one(ids), batch).values())  # type: ignore[assignment]
    wanted.backward()
    with symm_cp.training_step(
        Scored(model) if loss_by == "model" else model,
        batch,
        group,
        shift_labels=False,
        load_balancer=symm_cp.Sequential(ids.shape[1], group.size()),
        **options,
    ) as step:
        step.loss.backward()
    own = slice(6 * group.rank(), 6 * group.rank() + 6)
    assert torch.equal(step.batch["labels"], batch["labels"][:, own])
    torch.testing.assert_close(step.loss, wanted)
    same_grads(model, one)


class Around(nn.Module):
    """Calls another model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
def test_ddp_that_did_not_reduce(group: dist.ProcessGroup) -> None:
    """A parameter without a gradient stops DDP's reduction, wherever in the model DDP is."""
    ids = torch.randint(2, 7, (1, 8 * group.size()))  # `rare` has no part
    for nested, unused in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        model = Mixed(sparse=False).double()
        wrapped: nn.Module = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=unused
        )
        wrapped = Around(wrapped) if nested else wrapped

        def step(wrapped: nn.Module = wrapped) -> None:
            with symm_cp.training_step(
                wrapped,
                {"input_ids": ids, "labels": ids},
                group,
                loss_function=masked_mean,
            ) as step:
                step.loss.backward()

        if unused:
            step()
            assert model.embed.weight.grad is not None
        else:
            with pytest.raises(RuntimeError, match=r"DDP did not reduce.* of Mixed .*find_unused"):
                step()


@pytest.mark.ranks(2)
def test_no_sync_over_replicas_is_refused(group: dist.ProcessGroup) -> None:
    """DDP of replicas would never average what was summed over the mesh in the meantime."""
    mesh = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("dp", "cp"))
    model = DistributedDataParallel(
        Mixed(sparse=False).double(), process_group=mesh["dp"].get_group()
    )
    ids = torch.randint(2, 7, (1, 16))
    batch, options = {"input_ids": ids, "labels": ids}, {"loss_function": masked_mean}
    with pytest.raises(NotImplementedError, match=r"training_step: no_sync\(\) of a wrapper over"):  # noqa: SIM117
        with model.no_sync(), symm_cp.training_step(model, batch, mesh["cp"], **options):
            pass
    with model.no_sync(), torch.no_grad():  # noqa: SIM117
        with symm_cp.training_step(model, batch, mesh["cp"], **options) as step:
            assert step.loss.isfinite()


@pytest.mark.parametrize(
    ("world_size", "method"),
    some(
        (2, None),
        of=[(1, None), (2, None), (2, "ulysses"), (3, None), (4, ("allgather", "ulysses"))],
    ),
)
@pytest.mark.ranks
def test_a_model_that_computes_its_loss(
    group: dist.ProcessGroup, world_size: int, method: Any
) -> None:
    """A model that computes its loss: compares weights after three steps, and steps' results."""
    model, dense = (model_of("LlamaForCausalLM", sliding_window=None) for _ in range(2))
    ids = torch.randint(2, 31, (2, 12 * group.size()), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, : len(ids[0]) // 3] = IGNORED
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    batch = {"input_ids": ids, "labels": labels.masked_fill(mask == 0, IGNORED)}
    batch["attention_mask"] = mask
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, dense)]
    mesh: Any = mesh_of(group)
    if isinstance(method, tuple):
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("keys", "heads"))
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = dense(**batch).loss
        expected.backward()
        with symm_cp.training_step(model, batch, mesh, method=method) as step:
            step.loss.backward()
        torch.testing.assert_close(step.loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
        assert step.num_items == int((batch["labels"][:, 1:] != IGNORED).sum())
        assert step.output.logits.shape[1] == step.batch["input_ids"].shape[1]
        for optimizer in optimizers:
            optimizer.step()
    for (name, got), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


class Mixed(nn.Module):
    """Attention, and a table that only one rank needs; takes no positions."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embed, self.rare = nn.Embedding(31, 16), nn.Embedding(31, 16, sparse=sparse)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if (input_ids == 7).any():
            x = x + self.rare(input_ids)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ self.embed.weight.T


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_steps_that_differ_from_rank_to_rank(group: dist.ProcessGroup, world_size: int) -> None:
    mesh = mesh_of(group)
    torch.manual_seed(0)
    model = Mixed().double()
    ids = torch.randint(8, 31, (1, 11 * group.size()))
    ids[0, 0] = 7  # on rank 0, in sequential order

    def loss_of_logits(logits: torch.Tensor, local: Mapping[str, Any]) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten())

    batch = {"input_ids": ids, "labels": ids}
    balancer = symm_cp.Sequential(11 * group.size(), group.size())
    options: dict[str, Any] = {"loss_function": loss_of_logits, "load_balancer": balancer}
    with symm_cp.training_step(model, batch, mesh, **options) as step:
        step.loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        gathered = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(gathered, parameter.grad.to_dense(), group=group)
        assert all(torch.equal(each, gathered[0]) for each in gathered)
        assert parameter.grad.to_dense().any()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    def run(model: nn.Module, batch: Any, then: Callable[[Any], object], **options: Any) -> None:
        with symm_cp.training_step(model, batch, mesh, **options) as step:
            then(step)

    # A step without a backward pass is refused; the others learn at once of one rank's error.
    with pytest.raises(RuntimeError, match=r"without a backward pass of step\.loss"):
        run(model, batch, lambda step: None, **options)

    def forgets(step: Any) -> None:
        step.loss.backward()
        model.zero_grad()

    with pytest.raises(RuntimeError, match=r"ends without gradients.*call zero_grad\(\) before"):
        run(model, batch, forgets, **options)

    def fails_on_rank_0(step: Any) -> None:
        step.loss.backward()
        assert 1 // group.rank() >= 0

    begin = time.monotonic()
    with pytest.raises(RuntimeError if group.rank() else ZeroDivisionError) as caught:
        run(model, batch, fails_on_rank_0, **options)
    assert group.rank() == 0 or "rank 0" in str(caught.value)
    assert time.monotonic() - begin < 5
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.to_dense(), grad.to_dense())  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="Mixed is no model of transformers"):
        run(model, batch, lambda step: None)
    llama = model_of("LlamaForCausalLM")
    with pytest.raises(ValueError, match="LlamaForCausalLM returned no loss for a batch of"):
        run(llama, {"input_ids": ids}, lambda step: None)
    run(model, batch, lambda step: step.loss.backward(), **options)


@exhaustive
@pytest.mark.ranks(2)
def test_encoders_and_decoders(group: dist.ProcessGroup) -> None:
    """RoBERTa, which makes its own positions, with the user's loss; T5, with two lengths."""
    ids = torch.randint(2, 31, (2, 8 * group.size()), generator=torch.Generator().manual_seed(3))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    labels = ids[:, : 5 * group.size()].contiguous()
    cases: list[tuple[str, dict[str, Any], dict[str, torch.Tensor], Any]] = [
        ("RobertaForTokenClassification", {}, {"labels": ids}, None),
        (
            "RobertaForTokenClassification",
            {},
            {"labels": ids},
            lambda out, local: F.cross_entropy(out.logits.flatten(0, 1), local["labels"].view(-1)),
        ),
        (
            "T5ForConditionalGeneration",
            {**sizes, "decoder_start_token_id": 3},
            {"labels": labels},
            None,
        ),
    ]
    for name, options, more, loss_function in cases:
        model, dense = (model_of(name, **options) for _ in range(2))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
        expected = dense(**batch).loss
        expected.backward()
        how = {} if loss_function is None else {"shift_labels": False}
        with symm_cp.training_step(
            model, batch, mesh_of(group), loss_function=loss_function, **how
        ) as step:
            step.loss.backward()
        torch.testing.assert_close(step.loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
        same_grads(model, dense, rtol=1e-4, atol=1e-5)
