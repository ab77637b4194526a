"""accelerate's context and tensor parallelism at once, on symm_cp: gradients of one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer
from transformers.distributed import DistributedConfig

import symm_cp
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some
from tests.integrations.common import (
    Client,
    assert_same,
    causal_batch,
    in_one_process,
    saved,
)
from tests.integrations.test_accelerate import accelerating, accelerator_of, step
from tests.integrations.test_trainer import alone, results, same_training, trained

LLAMA = Client("Llama")
CLIENTS = {
    "Llama": LLAMA,
    "Mistral": Client("Mistral", {"sliding_window": 5}),
    # Normalizes each head: gradients of these norms are summed over the ranks that have the heads.
    "Qwen3": Client("Qwen3"),
}


def split_by_symm_cp(client: Client, accelerator: Accelerator) -> nn.Module:
    model = client.make("eager")
    return symm_cp.tensor_parallel.apply(model, accelerator.torch_device_mesh["tp"])


def loaded_by_transformers(client: Client, accelerator: Accelerator) -> nn.Module:
    """Loads with transformers, which must use all ranks: it applies FSDP over the CP ranks."""
    sizes = accelerator.parallelism_config
    model = client.make("eager")
    with saved(model) as folder:
        config = DistributedConfig(tp_size=sizes.tp_size, fsdp_size=sizes.cp_size)
        return type(model).from_pretrained(  # type: ignore[attr-defined, no-any-return]
            folder, distributed_config=config, dtype=client.dtype, attn_implementation="eager"
        )


SPLIT = {"symm_cp": split_by_symm_cp, "transformers": loaded_by_transformers}


CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Llama", "symm_cp", "gloo", {}),
    ("Mistral", "symm_cp", "symm_cp", {"load_balancer": symm_cp.Sequential, "method": "ulysses"}),
    ("Llama", "transformers", "symm_cp", {}),
    ("Qwen3", "transformers", "gloo", {"method": "auto"}),
]


@pytest.mark.parametrize(("name", "split", "backend", "options"), some(CASES[0], of=CASES))
@pytest.mark.ranks(4)
def test_losses_and_gradients_are_those_of_one_process(
    group: dist.ProcessGroup, name: str, split: str, backend: str, options: dict[str, Any]
) -> None:
    client = CLIENTS[name]
    with accelerating(group, backend, **options):
        accelerator = accelerator_of(
            group.size() // 2, 1, fsdp=True, wrap=split == "symm_cp", tp_size=2
        )
        for kind in ({"padding": "right"}, {"documents": [9, 15]}):
            batch = causal_batch(24, **kind)
            expected = in_one_process(client, batch)
            model = SPLIT[split](client, accelerator)
            actual = step(accelerator, client, batch, model)
            assert_same(actual, expected, batch, client.tolerance)


class SplitTrainer(Trainer):
    """A `Trainer` of a model that is split first, over the mesh that accelerate will use."""

    def __init__(self, model: Any, args: Any, **options: Any) -> None:
        mesh = args.parallelism_config.get_device_mesh("cpu")
        symm_cp.tensor_parallel.apply(model, mesh["tp"])
        super().__init__(model, args, **options)


def trains(group: dist.ProcessGroup, name: str) -> Any:
    options = {
        "parallelism_config": ParallelismConfig(cp_size=2, tp_size=2),
        "fsdp": True,
        "fsdp_config": {"version": 2},
        "gradient_accumulation_steps": 2,
    }
    with accelerating(group, "gloo"), tempfile.TemporaryDirectory() as folder:
        return trained(SplitTrainer, name, folder, 4, options)


@exhaustive
def test_trainers_losses_and_weights_are_those_of_one_process(ranks: Ranks) -> None:
    name = "LlamaForCausalLM"
    (wanted,) = results(ranks, 1, alone, name, {"gradient_accumulation_steps": 2})
    same_training(results(ranks, 4, trains, name), wanted)


@exhaustive
@pytest.mark.ranks(4)
def test_what_it_cannot_do_is_refused(group: dist.ProcessGroup) -> None:
    with accelerating(group, "symm_cp"):
        with pytest.raises(ValueError, match=r"tp_size=2 with cp_size=2 requires an fsdp_plugin"):
            accelerator_of(2, 1, fsdp=False, tp_size=2)
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerator_of(2, 1, fsdp=True, tp_size=2)
        model = LLAMA.make("eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"none of its parameters is split. Call symm_cp.tens"):
            accelerator.prepare(model, optimizer)
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(cp_size=2, tp_size=2),
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2, cpu_ram_efficient_loading=True
            ),
        )
        model = split_by_symm_cp(LLAMA, accelerator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="cpu_ram_efficient_loading=True, must be False"):
            accelerator.prepare(model, optimizer)
