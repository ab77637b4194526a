"""Models with gated delta nets under `context_parallel(model=...)`: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive, pairs, some
from tests.integrations.common import Client, causal_batch, check_client
from tests.integrations.decoders import MLA, MOE

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
_KIMI = {
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
# transformers computes the delta rule in float32, whatever the model's dtype is.
CLIENTS = {
    "qwen3-next": Client("Qwen3Next", {**MOE, **_DELTA}, tolerance=2e-4),
    "qwen3.5": Client("Qwen3_5", _DELTA, config="TextConfig", tolerance=2e-4),
    "olmo-hybrid": Client("OlmoHybrid", _DELTA, tolerance=2e-4),
    "kimi-linear": Client("KimiLinear", {**MOE, **MLA, **_KIMI}, tolerance=2e-4),
    "bailing-hybrid": Client(
        "BailingHybrid",
        {**MOE, **MLA, **_KIMI, "head_dim": 8, "n_group": 1, "topk_group": 1},
        tolerance=2e-4,
    ),
}
CASES = pairs(CLIENTS, (2, 4), ("mask", "padded", "none"))
BATCHES: dict[str, dict[str, Any]] = {
    "mask": {},
    "padded": {"padding": "right"},
    "none": {"masked": False},
}


def checks(group: dist.ProcessGroup, client: Client, length: int, kind: str, **how: Any) -> None:
    check_client(group, client, causal_batch(length, **BATCHES[kind]), layout="Sequential", **how)


@pytest.mark.parametrize(("name", "world_size", "kind"), some(("qwen3-next", 2, "mask"), of=CASES))
def test_clients(ranks: Ranks, name: str, world_size: int, kind: str) -> None:
    ranks.run(world_size, checks, CLIENTS[name], 27, kind)


@exhaustive
def test_parts_longer_than_a_chunk_and_shorter_than_the_convolution(ranks: Ranks) -> None:
    ranks.run(2, checks, CLIENTS["qwen3-next"], 150, "mask")
    ranks.run(4, checks, CLIENTS["qwen3-next"], 7, "mask")


@exhaustive
def test_with_a_cache_of_its_own(ranks: Ranks) -> None:
    client = CLIENTS["qwen3-next"]
    with_cache = Client(client.name, client.options, tolerance=2e-4, call={"use_cache": True})
    ranks.run(2, checks, with_cache, 27, "mask")


def compiled(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    # Not by aot_eager, which cannot run this layer of transformers, not without symm_cp either.
    # Experts and attention are compiled in test_compiled.py.
    client = CLIENTS["qwen3-next"].having(mlp_only_layers=[0, 1])

    def prepare(model: torch.nn.Module) -> None:
        model.get_submodule("model.layers.0").compile(fullgraph=True)

    checks(group, client, 48, "mask", prepare=prepare)


@exhaustive
def test_a_layer_compiled(ranks: Ranks) -> None:
    ranks.run(2, compiled, timeout=600)


def compiled_outside_first(group: dist.ProcessGroup) -> None:
    """A graph of a layer that sees this rank's part alone is not used within a context."""
    torch._dynamo.reset()
    model = CLIENTS["qwen3-next"].having(mlp_only_layers=[0, 1]).make("sdpa")
    ids = causal_batch(24)["input_ids"]
    balancer, mesh = symm_cp.Sequential(24, group.size()), mesh_of(group)
    local, _ = symm_cp.shard_batch(mesh, {"input_ids": ids}, load_balancer=balancer)
    rows = balancer.positions(group.rank())
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits[:, rows]
        model.get_submodule("model.layers.0").compile(backend="eager")
        alone = model(**local, use_cache=False).logits
        with symm_cp.context_parallel(mesh, model=model, load_balancer=balancer):
            within = model(**local, use_cache=False).logits
        again = model(**local, use_cache=False).logits
    torch.testing.assert_close(within, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, alone)
    assert group.rank() == 0 or not torch.allclose(alone, want, rtol=1e-2, atol=1e-2)


@exhaustive
def test_compiled_outside_first(ranks: Ranks) -> None:
    ranks.run(2, compiled_outside_first)


def recomputing(model: torch.nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


@exhaustive
def test_recomputed_activations(ranks: Ranks) -> None:
    ranks.run(2, checks, CLIENTS["qwen3-next"], 27, "mask", prepare=recomputing)


def refused_layouts(group: dist.ProcessGroup) -> None:
    client = CLIENTS["qwen3-next"]
    batch = causal_batch(32)
    message = r"'linear_attention' in config\.layer_types.* in rank order\. Pass load_balancer="
    for balancer in (symm_cp.HeadTail(32, group.size()), None):
        model, mesh = client.make("sdpa"), mesh_of(group)
        local, _ = symm_cp.shard_batch(
            mesh, {"input_ids": batch["input_ids"]}, load_balancer=balancer
        )
        context = symm_cp.context_parallel(mesh, model=model, load_balancer=balancer)
        with pytest.raises(NotImplementedError, match=message), context:
            model(**local)
        assert "forward" not in vars(model.model.layers[0].linear_attn)
    # Without model= the layers are transformers' own.
    sequential = symm_cp.Sequential(32, group.size())
    local, _ = symm_cp.shard_batch(
        mesh, {"input_ids": batch["input_ids"]}, load_balancer=sequential
    )
    context = symm_cp.context_parallel(mesh, load_balancer=sequential)
    message = r"this rank's part .* context_parallel\(model="
    with pytest.raises(NotImplementedError, match=message), context:
        model(**local)
    packed = {**local, "cu_seq_lens_q": torch.tensor([0, 10, 32], dtype=torch.int32)}
    context = symm_cp.context_parallel(mesh, model=model, load_balancer=sequential)
    message = r"packed documents \(cu_seq_lens_q\)"
    with pytest.raises(NotImplementedError, match=message), context:
        model(**packed)


def test_refuses_other_layouts_and_packed_documents(ranks: Ranks) -> None:
    ranks.run(2, refused_layouts)


def alone_again(group: dist.ProcessGroup) -> None:
    """Outside of a region, and on one rank, a model computes as without a context."""
    model = CLIENTS["qwen3-next"].make("sdpa")
    batch = causal_batch(12)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    want = model(**inputs).logits
    positions = torch.arange(12)[None]
    balancer = symm_cp.Sequential(12, 1)
    with symm_cp.context_parallel(mesh_of(group), model=model, load_balancer=balancer):
        torch.testing.assert_close(model(**inputs, position_ids=positions).logits, want)
    assert torch.equal(model(**inputs).logits, want)


def test_one_rank(ranks: Ranks) -> None:
    ranks.run(1, alone_again)
