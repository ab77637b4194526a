"""accelerate's context parallelism on symm_cp: losses and gradients of one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import TorchContextParallelConfig, TorchDynamoPlugin
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

import symm_cp
from symm_cp.integrations.accelerate import disable, enable
from symm_cp.ops.attention.methods import rotate_method
from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import exhaustive, some
from tests.integrations.common import (
    IGNORED,
    Batch,
    Client,
    Result,
    assert_same,
    causal_batch,
    in_one_process,
)
from tests.integrations.test_trainer import (
    Texts,
    alone,
    launched,
    model_of,
    replicated,
    results,
    same_training,
    trained,
)

LLAMA = Client("Llama")
WINDOWS = Client("Mistral", {"sliding_window": 5})
SINKS = Client("GptOss", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1})
CLIENTS = {"Llama": LLAMA, "Mistral": WINDOWS, "GptOss": SINKS}


@contextmanager
def accelerating(group: dist.ProcessGroup, backend: str, **options: Any) -> Iterator[None]:
    """Sets up ranks as torchrun does, with accelerate's context parallelism on symm_cp.

    accelerate keeps its first state and sets environment variables; both are reset on exit.
    """
    with mock.patch.dict(os.environ), world(group, backend) as of_world:
        launched(of_world)
        AcceleratorState._reset_state(reset_partial_state=True)
        enable(**options)
        try:
            yield
            dist.barrier()  # others may still connect
        finally:
            disable()
            AcceleratorState._reset_state(reset_partial_state=True)


def accelerator_of(
    cp_size: int,
    dp_shard_size: int,
    *,
    fsdp: bool,
    wrap: bool = True,
    regional: bool | None = None,
    **config: Any,
) -> Accelerator:
    """`regional`: whether it compiles layer by layer; None: it does not compile."""
    plugin = dynamo = None
    if regional is not None:
        dynamo = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap" if wrap else "no_wrap",
            cpu_ram_efficient_loading=False,
        )
    config = {"cp_size": cp_size, "dp_shard_size": dp_shard_size, **config}
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**config),
        fsdp_plugin=plugin,
        dynamo_plugin=dynamo,
    )


def whole_grads(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    grads: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        # DDP and compiled modules add prefixes to the names inside.
        grads[name.replace("_orig_mod.", "").removeprefix("module.")] = grad
    return grads


def step(
    accelerator: Accelerator, client: Client, batch: Batch, model: nn.Module | None = None
) -> Result:
    """One step of a loop as accelerate documents it; the loss counts all labels of all ranks."""
    model = model or client.make("eager")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    config, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    own = dict(batch)
    own.setdefault("position_ids", torch.arange(own["labels"].shape[1]).expand(own["labels"].shape))
    own["labels"] = F.pad(own["labels"][:, 1:], (0, 1), value=IGNORED)
    counted = int((own["labels"] != IGNORED).sum())
    if config.dp_shard_size > 1:
        replica = mesh["dp_shard"].get_local_rank()
        own = {name: part.chunk(config.dp_shard_size)[replica] for name, part in own.items()}
    own = {name: part.clone() for name, part in own.items()}
    originals = {name: part.clone() for name, part in own.items()}
    with accelerator.maybe_context_parallel(
        buffers=list(own.values()),
        buffer_seq_dims=[1] * len(own),
        no_restore_buffers={own["labels"]},
    ):
        inputs = dict(own)
        labels = inputs.pop("labels")
        logits = model(**inputs, **client.call).logits
        summed = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = summed / counted
        averaged = accelerator.num_processes // config.tp_size
        accelerator.backward(loss * averaged)
    assert labels.shape[1] < originals["labels"].shape[1]
    assert all(torch.equal(own[name], originals[name]) for name in inputs)
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=mesh["dp_shard_cp"].get_group())
    unsharded = symm_cp.context_parallel_unshard(mesh["cp"], [logits.detach()], [1])[0]
    if config.dp_shard_size > 1:
        parts = [torch.empty_like(unsharded) for _ in range(config.dp_shard_size)]
        dist.all_gather(parts, unsharded.contiguous(), group=mesh["dp_shard"].get_group())
        unsharded = torch.cat(parts)
    return Result(loss, unsharded, whole_grads(model))


def compiled_steps(group: dist.ProcessGroup, name: str, fsdp: bool, regional: bool) -> None:
    """Steps of a model that accelerate compiles, whole or layer by layer."""
    torch._dynamo.reset()
    counters.clear()
    client = CLIENTS[name].having(num_hidden_layers=1)
    with accelerating(group, "symm_cp"):
        accelerator = accelerator_of(group.size(), 1, fsdp=fsdp, regional=regional)
        for kind in ({}, {"documents": [9, 15]}):
            batch = causal_batch(24, **kind)
            expected = in_one_process(client, batch)
            assert_same(step(accelerator, client, batch), expected, batch, client.tolerance)
    assert counters["aot_autograd"]["ok"] > 0
    torch._dynamo.reset()


@exhaustive
@pytest.mark.parametrize(
    ("name", "fsdp", "regional"),
    [("Llama", True, False), ("Llama", False, True), ("Mistral", True, True)],
)
def test_compiled_models(ranks: Ranks, name: str, fsdp: bool, regional: bool) -> None:
    ranks.run(2, compiled_steps, name, fsdp, regional, timeout=300)


CASES = [
    (2, ["Mistral"], 1, True, "gloo", "HeadTail", None),
    (2, ["Llama", "GptOss"], 1, True, "symm_cp", "Sequential", "ulysses"),
    (2, ["Mistral"], 1, False, "symm_cp", "HeadTail", "auto"),
    (4, ["Mistral"], 2, True, "symm_cp", "HeadTail", "ulysses"),
]


def trains(
    group: dist.ProcessGroup, name: str, dp: int, fsdp: bool, options: dict[str, Any]
) -> Any:
    config = ParallelismConfig(cp_size=group.size() // dp, dp_shard_size=dp)
    options = {**options, "parallelism_config": config}
    if fsdp:
        options |= {"fsdp": True, "fsdp_config": {"version": 2}}
    with accelerating(group, "gloo"), tempfile.TemporaryDirectory() as folder:
        return trained(Trainer, name, folder, 4 // dp, options)


ACCUMULATED = {"gradient_accumulation_steps": 2}
OWN_MEAN = {"average_tokens_across_devices": False}
TRAINERS: list[tuple[Any, ...]] = [
    (2, "LlamaForCausalLM", 1, False, ACCUMULATED),
    (2, "BertForMaskedLM", 1, False, {}),
    (4, "MistralForCausalLM", 2, True, {}),
    (4, "MistralForCausalLM", 2, True, OWN_MEAN),
]


@exhaustive
@pytest.mark.parametrize(("world_size", "name", "dp", "fsdp", "options"), TRAINERS)
def test_trainers_losses_and_weights_are_those_of_one_process(
    ranks: Ranks, world_size: int, name: str, dp: int, fsdp: bool, options: dict[str, Any]
) -> None:
    (wanted,) = results(ranks, 1, alone, name, options)
    if options == OWN_MEAN:  # the mean of the replicas' means, as without context parallelism
        wanted = results(ranks, 2, replicated, name, options)[0]
    same_training(results(ranks, world_size, trains, name, dp, fsdp, options), wanted)


@pytest.mark.parametrize(
    ("world_size", "names", "dp", "fsdp", "backend", "layout", "method"), some(CASES[0], of=CASES)
)
@pytest.mark.ranks
def test_losses_and_gradients_are_those_of_one_process(
    group: dist.ProcessGroup,
    world_size: int,
    names: list[str],
    dp: int,
    fsdp: bool,
    backend: str,
    layout: str,
    method: Any,
) -> None:
    options = {"load_balancer": getattr(symm_cp, layout), "method": method}
    for name in names:  # FSDP's plugin keeps the class of the first model's layers
        with accelerating(group, backend, **options):
            accelerator = accelerator_of(group.size() // dp, dp, fsdp=fsdp)
            for kind in ({}, {"padding": "right"}, {"documents": [9, 15]}):
                client, batch = CLIENTS[name], causal_batch(24, **kind)
                expected = in_one_process(client, batch)
                actual = step(accelerator, client, batch)
                assert_same(actual, expected, batch, client.tolerance)


class Plain(nn.Module):
    """A model from no library, which calls torch's attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(31, 8), nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        qkv = self.project(self.embed(ids)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*qkv, is_causal=True)


@exhaustive
@pytest.mark.ranks(2)
def test_other_models_and_methods(group: dist.ProcessGroup) -> None:
    """Runs a plain model with a chosen rotation method, which is reset; refuses a wrong buffer."""
    ids = torch.randint(31, (2, 6 * group.size()))
    with accelerating(group, "symm_cp"):
        handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
        accelerator = accelerator_of(group.size(), 1, fsdp=False, cp_handler=handler)
        model = Plain().double()
        whole = model(ids)
        whole.square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        prepared = accelerator.prepare(model)
        cp = accelerator.torch_device_mesh["cp"]
        (own,) = symm_cp.context_parallel_shard(cp, [ids], [1])
        with accelerator.maybe_context_parallel():
            assert rotate_method() == "alltoall"
            out = prepared(own)
            accelerator.backward(out.square().sum() * group.size())
        assert rotate_method() == "allgather"
        (gathered,) = symm_cp.context_parallel_unshard(cp, [out.detach()], [2])
        torch.testing.assert_close(gathered, whole.detach())
        torch.testing.assert_close([p.grad for p in model.parameters()], grads)
        with (
            pytest.raises(ValueError, match="out of range"),
            accelerator.maybe_context_parallel(buffers=[own], buffer_seq_dims=[2]),
        ):
            pass


@exhaustive
@pytest.mark.ranks(4)
def test_what_it_cannot_do_is_refused(group: dist.ProcessGroup) -> None:
    with accelerating(group, "symm_cp"):
        with pytest.raises(ValueError, match=r"uses 1 of 4 processes.* ACCELERATE_USE_CPU=true"):
            Accelerator(parallelism_config=ParallelismConfig(cp_size=group.size()))
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(ValueError, match="requires an fsdp_plugin with fsdp_version=2"):
            accelerator_of(group.size() // 2, 2, fsdp=False)
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(ValueError, match="sp_size=2 is DeepSpeed's sequence parallelism"):
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
        AcceleratorState._reset_state(reset_partial_state=True)
        config = {"parallelism_config": ParallelismConfig(cp_size=group.size())}
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", **config)
            trainer = Trainer(model_of("LlamaForCausalLM"), args, train_dataset=Texts("Llama"))
            trainer.compute_loss_func = lambda *args, **kwargs: None
            with pytest.raises(NotImplementedError, match="compute_loss_func would get labels"):
                trainer.train()
        AcceleratorState._reset_state(reset_partial_state=True)
        disable()
        with pytest.raises(ValueError, match="only compatible DistributedType"):
            accelerator_of(group.size(), 1, fsdp=False)  # accelerate's own
    with (
        accelerating(group, "symm_cp"),
        pytest.raises(ValueError, match="fsdp_version=1, must be 2"),
    ):
        Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(cp_size=group.size()),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1),
        )


def test_enabling_can_be_repeated_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [
        (Accelerator, "_prepare_cp"),
        (Accelerator, "_prepare_tp"),
        (AcceleratorState, "__init__"),
        (ParallelismConfig, "_validate_accelerator"),
        (Trainer, "_prepare_context_parallel_inputs"),
        (Trainer, "compute_loss"),
        (Trainer, "prediction_step"),
    ]
    before = [vars(owner)[name] for owner, name in methods]
    for _ in range(2):
        enable()
        enable(load_balancer=symm_cp.Sequential)
        assert all(vars(o)[n] is not was for (o, n), was in zip(methods, before, strict=True))
        disable()
        disable()
        assert [vars(owner)[name] for owner, name in methods] == before
    with pytest.raises(TypeError, match="load_balancer is a HeadTail, must be a function"):
        enable(load_balancer=symm_cp.HeadTail(8, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown method='ring'; choose one of"):
        enable(method="ring")  # type: ignore[arg-type]
    monkeypatch.setattr(accelerate, "__version__", "1.16.0.dev0")
    with pytest.raises(
        RuntimeError, match=r"accelerate 1\.16\.0\.dev0 is installed, must be 1\.15"
    ):
        enable()
    assert [vars(owner)[name] for owner, name in methods] == before
