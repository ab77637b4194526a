"""accelerate's context parallelism on symm_cp with compiled models: gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch._dynamo.utils import counters

from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.integrations.common import assert_same, causal_batch, in_one_process
from tests.integrations.test_accelerate import CLIENTS, accelerating, step


def compiled_steps(group: dist.ProcessGroup, name: str, fsdp: bool, regional: bool) -> None:
    """Steps of a model that accelerate compiles, whole or layer by layer."""
    torch._dynamo.reset()
    counters.clear()
    client = CLIENTS[name].having(num_hidden_layers=1)
    with accelerating(group, "symm_cp"):
        plugin: Any = None
        if fsdp:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                cpu_ram_efficient_loading=False,
            )
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(cp_size=group.size()),
            fsdp_plugin=plugin,
            dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional),
        )
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
