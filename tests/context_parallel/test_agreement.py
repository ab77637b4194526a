"""Ordinary mistakes that would give plausible, wrong losses: each raises, or warns, by default."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import symm_cp
from symm_cp.context_parallel import agreement, loss_reduction
from tests.context_parallel.common import mesh_of
from tests.context_parallel.test_batch import model_of
from tests.exhaustive import some

LENGTH = 16
SAME = "must get the same batches"


def ids_of(seed: int) -> torch.Tensor:
    return torch.randint(2, 31, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_other_batches_are_refused_on_all_ranks(group: dist.ProcessGroup, world_size: int) -> None:
    """Rank 1 has another batch, which differs in one tensor at a time."""
    mesh, other = mesh_of(group), group.rank() == 1
    ids, floats = ids_of(0), torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(1))
    whole: dict[str, Any] = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids, dtype=torch.bool),
    }
    swapped = ids[:, [1, 0, *range(2, LENGTH)]]
    swapped[0, 0] += swapped[0, 0] == swapped[0, 1]
    changes = {
        "input_ids": [ids_of(1), swapped, ids.int(), ids[:1]],
        "labels": [ids.masked_fill(ids == ids[0, 3], -100)],
        "attention_mask": [F.pad(torch.ones_like(ids)[:, 1:], (1, 0))],
        "token_type_ids": [ids > 3],
    }
    for name, values in changes.items():
        for value in values:
            batch = {**whole, name: value} if other else whole
            if name == "input_ids" and len(value) == 1:
                batch = {n: v[:1] for n, v in batch.items()} if other else batch
            with pytest.raises(RuntimeError, match=SAME) as caught:
                symm_cp.shard_batch(mesh, batch)
            text = str(caught.value)
            assert f"{name} (here" in text, text
            alone = "[0, 2]" if group.size() == 3 else "0"
            assert f"rank{'s' * (len(alone) > 1)} {alone} and rank 1" in text, text
            assert "DistributedSampler" in text
            assert "SYMM_CP_COMPARE_INPUTS=0" in text
    local, _ = symm_cp.shard_batch(mesh, whole)  # in step after all this
    # The layout is compared, too, and so are embeddings, but not their rounding.
    with pytest.raises(RuntimeError, match="the layout and options"):
        symm_cp.shard_batch(mesh, whole, average_gradients=other)
    kind = symm_cp.Sequential if other else symm_cp.HeadTail
    with pytest.raises(RuntimeError, match="the layout and options"):
        symm_cp.shard_batch(mesh, whole, load_balancer=kind(LENGTH, group.size()))
    with pytest.raises(RuntimeError, match="inputs_embeds"):
        symm_cp.shard_batch(mesh, {"inputs_embeds": floats.roll(1, 0) if other else floats})
    symm_cp.shard_batch(mesh, {"inputs_embeds": floats * (1.001 if other else 1)})
    for x in (ids_of(group.rank()), torch.randn(2, LENGTH) + 3 * group.rank()):
        with (
            pytest.raises(RuntimeError, match=SAME),
            symm_cp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        ):
            pass
        with pytest.raises(RuntimeError, match=SAME):
            symm_cp.context_parallel_shard(mesh, [x], [1])
    del local


def step(model: nn.Module, group: dist.ProcessGroup, batch: dict[str, torch.Tensor]) -> float:
    """A step by hand: cut, context, loss, backward pass."""
    mesh = mesh_of(group)
    local, reduce_loss = symm_cp.shard_batch(mesh, batch)
    labels = local.pop("labels")
    with symm_cp.context_parallel(mesh, model=model, load_balancer=reduce_loss.load_balancer):
        logits = model(**local).logits
        loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        loss.backward()
    return float(loss)


def batch_of() -> dict[str, torch.Tensor]:
    ids = ids_of(0)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_other_weights_are_refused_on_all_ranks(group: dist.ProcessGroup, world_size: int) -> None:
    other, batch = group.rank() == group.size() - 1, batch_of()
    model = model_of("LlamaForCausalLM")
    good = copy.deepcopy(model.state_dict())
    changed = model.model.layers[0].mlp.up_proj.weight
    if other:
        with torch.no_grad():
            changed[3, 5] += 1e-3
    for _ in range(2):  # and again, until it is mended
        with pytest.raises(RuntimeError, match="load one checkpoint on all") as caught:
            step(model, group, batch)
        assert "layers.0.mlp.up_proj.weight" in str(caught.value)
        assert "LlamaForCausalLM" in str(caught.value)
        assert f"and rank {group.size() - 1} in" in str(caught.value)
    model.load_state_dict(good)
    expected = step(model, group, batch)
    # Weights that are loaded later are compared again.
    state = {name: value + 1e-3 * other for name, value in good.items()}
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="load one checkpoint on all"):
        step(model, group, batch)
    model.load_state_dict(good)
    assert step(model, group, batch) == expected
    # shard_batch(model=...) and context_parallel(model=...) compare weights, too.
    seeded = model_of("LlamaForCausalLM", num_hidden_layers=2)
    if other:
        nn.init.normal_(seeded.lm_head.weight)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        symm_cp.shard_batch(mesh_of(group), batch, model=seeded)
    lone = model_of("LlamaForCausalLM")
    lone.model.embed_tokens.weight.requires_grad_(not other)
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight.*freeze the same"):
        symm_cp.shard_batch(mesh_of(group), batch, model=lone)
    mesh = mesh_of(group)
    local, _ = symm_cp.shard_batch(mesh, {"input_ids": ids_of(0)})
    with (
        pytest.raises(RuntimeError, match=r"lm_head\.weight"),
        symm_cp.context_parallel(mesh, model=seeded),
    ):
        seeded(**local)
    # Ranks may have weights of their own in modules that run elsewhere, and other buffers.
    model.register_buffer("running", torch.full((3,), float(other)))
    aside = nn.Linear(3, 3)
    nn.init.constant_(aside.weight, group.rank())
    aside(torch.ones(3))
    assert step(model, group, batch) == expected


def forgets_to_sum(group: dist.ProcessGroup, how: str) -> list[str]:
    """Trains some steps; returns the warnings."""
    agreement._known.clear()  # forget models of other tests that wait for a first step
    model: Any = model_of("LlamaForCausalLM")
    batch, averaged = batch_of(), how in ("ddp", "fsdp")
    trained = model
    if how == "ddp":
        trained = DistributedDataParallel(model, process_group=group)
    if "fsdp" in how:
        mesh = mesh_of(group)
        if how != "fsdp":  # over the replicas, of which there is one
            shape = torch.arange(group.size()).view(1, -1)
            mesh = DeviceMesh("cpu", shape, mesh_dim_names=("dp", "cp"))["dp"]
        fully_shard(model.model.layers[0], mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            mesh = mesh_of(group)
            local, _ = symm_cp.shard_batch(mesh, {"input_ids": batch["input_ids"]})
            # evaluation, before and between
            with torch.no_grad(), symm_cp.context_parallel(mesh, model=trained):
                trained(**local, attention_mask=torch.ones_like(local["input_ids"]))
            local, reduce_loss = symm_cp.shard_batch(mesh, batch, average_gradients=averaged)
            labels = local.pop("labels")
            with symm_cp.context_parallel(
                mesh, model=trained, load_balancer=reduce_loss.load_balancer
            ):
                logits = trained(**local).logits
                reduce_loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten())).backward()
            if how == "accumulates" and number % 2 == 0:
                continue
            if how in ("sums", "accumulates", "fsdp of replicas, sums"):
                for parameter in trained.parameters():
                    dist.all_reduce(agreement.local_part(parameter.grad), group=group)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "optimizer step" in str(w.message)]


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_gradients_that_nobody_sums_are_noticed(group: dist.ProcessGroup, world_size: int) -> None:
    for how in ("sums", "accumulates", "ddp", "fsdp", "fsdp of replicas, sums"):
        assert forgets_to_sum(group, how) == [], how
    for how, kind in (("nobody", "LlamaForCausalLM"), ("fsdp of replicas", "FSDPLlamaForCausalLM")):
        (message,) = forgets_to_sum(group, how)
        assert f"the gradients of {kind} differed" in message
        assert "symm_cp.training_step" in message
        assert "average_gradients=True" in message


def correct_programs(group: dist.ProcessGroup) -> None:
    """Programs in which ranks or optimizers rightly act by themselves raise and warn nothing."""
    agreement._known.clear()
    batch, model = batch_of(), model_of("LlamaForCausalLM")
    step(model, group, batch)  # an optimizer that sums
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def sum_gradients(*_: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)

    optimizer.register_step_pre_hook(sum_gradients)
    optimizer.step()
    optimizer.zero_grad()
    step(model, group, batch)
    model = model_of("LlamaForCausalLM")  # two optimizers, each with its sums just before its step
    parameters = list(model.parameters())
    for _ in range(2):
        step(model, group, batch)
        for some_of_them in (parameters[::2], parameters[1::2]):
            for parameter in some_of_them:
                dist.all_reduce(parameter.grad, group=group)
            torch.optim.SGD(some_of_them, 0.1).step()
        model.zero_grad()
    if group.rank() == 0:  # a checkpoint that one rank loads for all, and a probe that it trains
        model.load_state_dict({n: v + 1 for n, v in model.state_dict().items()})
    for parameter in model.parameters():
        dist.broadcast(parameter.data, group=group, group_src=0)
    expected = step(model, group, batch)
    probe = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    mesh = mesh_of(group)
    for _ in range(2):
        with symm_cp.context_parallel(mesh, on_unfused="ignore"):
            if group.rank() == 0:
                probe(torch.ones(4))
            else:
                nn.Linear(3, 3)(torch.ones(3))
        assert step(model, group, batch) == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_correct_programs_are_left_alone(group: dist.ProcessGroup, world_size: int) -> None:
    program = correct_programs
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(optimizer step|context)")
        program(group)


@pytest.mark.ranks(2)
def test_modules_without_a_model(group: dist.ProcessGroup) -> None:
    """A program without a model calls torch's modules; weights are compared at the next cut."""
    mesh, other = mesh_of(group), group.rank() == 1

    def run(embed: nn.Module, head: nn.Module) -> list[str]:
        optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                local, reduce_loss = symm_cp.shard_batch(mesh, batch_of())
                with symm_cp.context_parallel(mesh, load_balancer=reduce_loss.load_balancer):
                    x = embed(local["input_ids"]).unsqueeze(1)
                    x = F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)
                    loss = F.cross_entropy(head(x).flatten(0, 1), local["labels"].flatten())
                    reduce_loss(loss).backward()
                optimizer.step()  # the first with a learning rate of 0, as in a warm-up
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = 0.1
        return [str(w.message) for w in caught if "optimizer step" in str(w.message)]

    torch.manual_seed(0)
    embed, head = nn.Embedding(31, 8), nn.Linear(8, 31)
    (message,) = run(embed, head)  # gradients are not summed
    assert "Linear 1.weight" in message
    head = nn.Linear(8, 31)
    nn.init.normal_(head.weight, std=1.0 + other)
    with pytest.raises(RuntimeError, match=r"Linear 1\.weight: seed all ranks identically"):
        run(nn.Embedding(31, 8), head)


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_a_context_refuses_shards_of_another_layout(
    group: dist.ProcessGroup, world_size: int
) -> None:
    mesh, W = mesh_of(group), group.size()
    straight, q = symm_cp.Sequential(LENGTH, W), torch.randn(1, 2, LENGTH // W, 8)
    for used, meant in [(symm_cp.HeadTail(LENGTH, W), straight), (straight, None)]:
        local, reduce_loss = symm_cp.shard_batch(mesh, {"input_ids": ids_of(0)}, load_balancer=used)
        with (
            pytest.raises(ValueError, match=f"cut by {type(used).__name__}"),
            symm_cp.context_parallel(mesh, load_balancer=meant),
        ):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        with symm_cp.context_parallel(mesh, load_balancer=used):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        other = straight if used != straight else symm_cp.HeadTail(LENGTH, W)
        with (
            pytest.raises(ValueError, match="use one for both"),
            symm_cp.context_parallel(mesh, load_balancer=used),
        ):
            symm_cp.shard_batch(mesh, {"input_ids": ids_of(0)}, load_balancer=other)
        # Shards of two layouts at once, as a program has that prepares batches ahead; another
        # length; and shards that are gone.
        ahead = symm_cp.shard_batch(mesh, {"input_ids": ids_of(0)}, load_balancer=straight)
        longer = symm_cp.Sequential(2 * LENGTH, W)
        for balancer in (used, straight, longer):
            with symm_cp.context_parallel(mesh, load_balancer=balancer):
                pass
        del local, reduce_loss, ahead
    with symm_cp.context_parallel(mesh, load_balancer=symm_cp.HeadTail(LENGTH, W)):
        pass
    (shard,) = symm_cp.context_parallel_shard(mesh, [ids_of(0)], [1], straight)
    for function, fits in [
        (lambda held: symm_cp.HeadTail(held * W, W), False),
        (lambda held: symm_cp.Sequential(held * W, W), True),
    ]:
        refused = nullcontext() if fits else pytest.raises(ValueError, match="cut by Sequential")
        with refused, symm_cp.context_parallel(mesh, load_balancer=function):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    (shard,) = symm_cp.context_parallel_shard(mesh, [ids_of(0)], [1])
    with (
        pytest.raises(ValueError, match="cut by HeadTail"),
        symm_cp.context_parallel(mesh, load_balancer=straight),
    ):
        pass
    del shard


def told_by(
    group: dist.ProcessGroup,
    *,
    context: str = "",
    ahead: bool = False,
    reduces: bool = True,
    optimizes: bool = False,
    fails: bool = False,
) -> list[str]:
    """Runs a program; returns which mistakes its warnings name.

    `context`: it enters one "before" its loss is reduced, or "around" that, or calls "attention"
    over all ranks itself. `ahead`: it then cuts the next batch. `fails`: in its first step, after
    which all ranks go on.
    """
    mesh, table = mesh_of(group), nn.Parameter(torch.randn(31, 31))
    balancer = symm_cp.HeadTail(LENGTH, group.size())
    q = torch.randn(1, 2, LENGTH // group.size(), 8)
    optimizer = torch.optim.SGD([table], lr=0.1)
    loss_reduction._first_cuts.discard(group)
    with warnings.catch_warnings(record=True) as caught:
        optimizer.step()  # no cut of another test waits for a step
        caught.clear()
        warnings.simplefilter("always")
        for step in range(3 if optimizes else 1):
            local, reduce_loss = symm_cp.shard_batch(mesh, batch_of())
            region = symm_cp.context_parallel(mesh, load_balancer=balancer, on_unfused="ignore")
            if fails and step == 0:
                with pytest.raises(ArithmeticError), region:
                    raise ArithmeticError
                continue
            if context == "attention":
                symm_cp.all_gather_attention(q, q, q, group=group, load_balancer=balancer)
            with region if context == "around" else nullcontext():
                logits = table[local["input_ids"]].flatten(0, 1)
                loss = F.cross_entropy(logits, local["labels"].flatten())
                if context == "before":
                    with region:
                        F.scaled_dot_product_attention(q, q, q, is_causal=True)
                if ahead:
                    local, reduce_loss = symm_cp.shard_batch(mesh, batch_of())
                for _ in range(2 if reduces else 0):  # it warns once
                    reduced = reduce_loss(loss)
                (reduced if reduces else loss).backward()
            if optimizes:
                optimizer.step()
    mistakes = {
        "reduced, no context": "the loss of a batch that was cut is reduced, but no context was",
        "step, no context": "makes a step after a batch was cut, but no context was entered",
        "step, not reduced": "was not called with the loss",
    }
    return [n for n, text in mistakes.items() for w in caught if text in str(w.message)]


STEPS = {"optimizes": True, "context": "before"}
#: Programs, and the mistakes that warnings name.
PROGRAMS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["reduced, no context"]),
    *(({"context": where}, []) for where in ("before", "around", "attention")),
    ({"reduces": False, "optimizes": True}, ["step, no context"]),
    ({**STEPS, "reduces": False}, ["step, not reduced"]),
    (STEPS, []),
    ({**STEPS, "ahead": True, "reduces": False}, ["step, not reduced"]),
    ({**STEPS, "fails": True}, []),
    ({**STEPS, "fails": True, "reduces": False}, ["step, not reduced"]),
]


@pytest.mark.ranks(2)
def test_a_batch_without_a_context_or_reduction_is_noticed(group: dist.ProcessGroup) -> None:
    for program, told in PROGRAMS:
        assert told_by(group, **program) == told, program


@pytest.mark.ranks(2)
def test_shard_batch_knows_ddp_and_fsdp(group: dist.ProcessGroup) -> None:
    """The model's wrapper (DDP or FSDP2) tells whether gradients are averaged."""
    mesh, batch = mesh_of(group), batch_of()
    dense = model_of("LlamaForCausalLM")
    dense(**batch).loss.backward()
    for sharded in (False, True):
        model: Any = model_of("LlamaForCausalLM")
        if sharded:
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, process_group=group)
        local, reduce_loss = symm_cp.shard_batch(mesh, batch, model=model)
        balancer = reduce_loss.load_balancer
        with symm_cp.context_parallel(mesh, model=model, load_balancer=balancer):
            reduce_loss(model(**local).loss).backward()
        for (name, parameter), want in zip(
            model.named_parameters(), dense.parameters(), strict=True
        ):
            got = parameter.grad.full_tensor() if sharded else parameter.grad
            torch.testing.assert_close(got, want.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("compiles", some(False, of=[False, True]))
@pytest.mark.ranks(2)
def test_labels_are_not_shifted_twice(group: dist.ProcessGroup, compiles: bool) -> None:
    mesh, model, batch = mesh_of(group), model_of("LlamaForCausalLM"), batch_of()
    local, reduce_loss = symm_cp.shard_batch(mesh, batch)
    balancer = reduce_loss.load_balancer
    call = torch.compile(model, backend="eager") if compiles else model
    with (
        pytest.raises(NotImplementedError, match=r"pass model= to symm_cp\.shard_batch"),
        symm_cp.context_parallel(mesh, model=call, load_balancer=balancer),
    ):
        call(**local)
    if compiles:
        return
    # Classes that do not shift labels, a loss of the user, and labels that have been shifted.
    local, _ = symm_cp.shard_batch(mesh, batch, shift_labels=False)
    bert = model_of("BertForMaskedLM")
    with symm_cp.context_parallel(mesh, model=[model, bert], load_balancer=balancer):
        bert(**local)
        model(**local, shift_labels=local["labels"])
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
        model(**local)


@pytest.mark.ranks(2)
def test_comparisons_can_be_turned_off(group: dist.ProcessGroup) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SYMM_CP_COMPARE_INPUTS", "0")
        model = model_of("LlamaForCausalLM")
        nn.init.constant_(model.lm_head.weight, group.rank())
        batch = batch_of()
        batch["input_ids"] = ids_of(group.rank())
        step(model, group, batch)
        environment.setenv("SYMM_CP_COMPARE_INPUTS", "maybe")
        with pytest.raises(ValueError, match="must be 0 or 1"):
            symm_cp.shard_batch(mesh_of(group), batch)
