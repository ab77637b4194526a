"""Models with gated delta nets or Mamba 2 under `context_parallel`: as in one process."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive, pairs, some
from tests.integrations.common import (
    IGNORED,
    Client,
    Result,
    WideTensors,
    assert_near,
    assert_same,
    causal_batch,
    check_client,
    recomputing,
    target_loss,
    under_context_parallel,
)
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
CLIENTS = {
    "qwen3-next": Client("Qwen3Next", {**MOE, **_DELTA}),
    "qwen3.5": Client("Qwen3_5", _DELTA, config="TextConfig"),
    "olmo-hybrid": Client("OlmoHybrid", _DELTA),
    "kimi-linear": Client("KimiLinear", {**MOE, **MLA, **_KIMI}),
    "bailing-hybrid": Client(
        "BailingHybrid",
        {**MOE, **MLA, **_KIMI, "head_dim": 8, "n_group": 1, "topk_group": 1},
    ),
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
_MAMBA |= {"mamba_expand": 2, "mamba_chunk_size": 8}
_LIST = ["linear_attention", "full_attention"]
MAMBAS = {
    "mamba2": Client(
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8}
        | {"expand": 2},
    ),
    "bamba": Client("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "falcon-h1": Client("FalconH1", {**_MAMBA, "mamba_d_ssm": 64}),
    "granite-hybrid": Client(
        "GraniteMoeHybrid",
        {**MOE, **_MAMBA, "layer_types": _LIST, "shared_intermediate_size": 16},
    ),
    "zamba2": Client(
        "Zamba2",
        {"mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 4, "chunk_size": 8}
        | {"mamba_expand": 2, "layers_block_type": ["linear_attention", "hybrid"]}
        | {"num_mem_blocks": 1, "adapter_rank": 4, "use_mem_rope": True},
    ),
    "nemotron-h": Client(
        "NemotronH",
        {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
        | {"chunk_size": 8, "expand": 2, "moe_shared_expert_intermediate_size": 16}
        | {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    ),
}
CLIENTS |= MAMBAS
# With position_ids alone, transformers separates documents in attention, not in recurrent layers.
BATCHES: dict[str, dict[str, Any]] = {
    "mask": {},
    "padded": {"padding": "right"},
    "none": {"masked": False},
    "positions": {"documents": [9, 5, 13]},
}
LAYOUTS = ("Sequential", "HeadTail")
PLAIN_CASES = [
    ("qwen3-next", 2, "mask", "HeadTail"),
    ("mamba2", 2, "padded", "Sequential"),
    ("bamba", 3, "none", "HeadTail"),
]
CASES = pairs(CLIENTS, (1, 2, 3, 4), BATCHES, LAYOUTS, also=PLAIN_CASES)


def checks(
    group: dist.ProcessGroup,
    client: Client,
    length: int,
    kind: str,
    layout: str = "Sequential",
    **how: Any,
) -> None:
    check_client(group, client, causal_batch(length, **BATCHES[kind]), layout=layout, **how)


@pytest.mark.parametrize(("name", "world_size", "kind", "layout"), some(*PLAIN_CASES, of=CASES))
def test_clients(ranks: Ranks, name: str, world_size: int, kind: str, layout: str) -> None:
    ranks.run(world_size, checks, CLIENTS[name], 27, kind, layout)


# On 2 ranks one document spans both; on 3 and 4 some hold several, and one may hold no whole one.
DOCUMENTS = [9, 1, 2, 15, 5, 8]


def packed_batch() -> dict[str, torch.Tensor]:
    """Documents in one sample, as transformers' collators mark them."""
    lengths = torch.tensor(DOCUMENTS)
    batch = causal_batch(sum(DOCUMENTS), samples=1, documents=DOCUMENTS)
    edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
    return {**batch, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "seq_idx": numbers[None]}


def each_alone(client: Client, batch: dict[str, torch.Tensor]) -> Result:
    """Runs each document by itself in one process."""
    model = client.make(client.reference)
    logits = torch.cat(
        [model(input_ids=ids, **client.call).logits
         for ids in batch["input_ids"].split(DOCUMENTS, 1)], 1
    )  # fmt: skip
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    loss = target_loss(logits, labels)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Result(loss.detach(), logits.detach(), grads)


def by_parts(group: dist.ProcessGroup, model: torch.nn.Module) -> Any:
    """Calls Mamba 2's backbone and head apart: the whole model does not pass documents on."""

    def call(use_cache: bool, **batch: torch.Tensor) -> Any:
        if group.size() > 1:  # one rank computes as without a context
            message = "cu_seq_lens_q, which it does not pass on to its recurrent layers"
            with pytest.raises(NotImplementedError, match=message):
                model(**batch)
        hidden = model.backbone(**batch, use_cache=use_cache).last_hidden_state
        return types.SimpleNamespace(logits=model.lm_head(hidden))

    return call


PLAIN = [("qwen3-next", 3, "HeadTail"), ("bamba", 2, "PerDocumentHeadTail")]
PACKED = pairs(CLIENTS, (1, 2, 3, 4), (*LAYOUTS, "PerDocumentHeadTail"), also=PLAIN)


@pytest.mark.parametrize(("name", "world_size", "layout"), some(*PLAIN, of=PACKED))
@pytest.mark.ranks
def test_packed_documents(
    group: dist.ProcessGroup, name: str, world_size: int, layout: str
) -> None:
    client = CLIENTS[name]
    batch, ranks = packed_batch(), group.size()
    balancer = {
        "Sequential": symm_cp.Sequential(sum(DOCUMENTS), ranks),
        "HeadTail": symm_cp.HeadTail(sum(DOCUMENTS), ranks),
        "PerDocumentHeadTail": symm_cp.PerDocumentHeadTail(DOCUMENTS, ranks),
    }[layout]
    how: dict[str, Any] = {}
    if client.name == "Mamba2":
        how["prepare"] = functools.partial(by_parts, group)
    with WideTensors():
        expected = each_alone(client, batch)
        actual = under_context_parallel(group, client, batch, balancer=balancer, **how)
    assert_same(actual, expected, batch, client.wide_tolerance)


@exhaustive
def test_parts_longer_than_a_chunk_and_shorter_than_the_convolution(ranks: Ranks) -> None:
    for layout in LAYOUTS:
        ranks.run(2, checks, CLIENTS["qwen3-next"], 150, "mask", layout)
    ranks.run(4, checks, CLIENTS["qwen3-next"], 7, "mask")


@exhaustive
def test_with_a_cache_of_its_own(ranks: Ranks) -> None:
    client = CLIENTS["qwen3-next"]
    with_cache = Client(client.name, client.options, call={"use_cache": True})
    ranks.run(2, checks, with_cache, 27, "mask")


def compiled(group: dist.ProcessGroup, name: str, layout: str) -> None:
    torch._dynamo.reset()
    # Not with aot_eager, which cannot run this transformers layer even without symm_cp.
    # Experts and attention are compiled in test_compiled.py.
    client = CLIENTS[name]
    if name == "qwen3-next":
        client = client.having(mlp_only_layers=[0, 1])

    def prepare(model: torch.nn.Module) -> None:
        model.get_submodule("model.layers.0").compile(fullgraph=True)

    checks(group, client, 48, "mask", layout, prepare=prepare)


@exhaustive
@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3-next", "Sequential"), ("qwen3-next", "HeadTail"), ("bamba", "HeadTail")],
)
def test_a_layer_compiled(ranks: Ranks, name: str, layout: str) -> None:
    ranks.run(2, compiled, name, layout, timeout=600)


@exhaustive
@pytest.mark.ranks(2)
def test_compiled_outside_first(group: dist.ProcessGroup) -> None:
    """A layer's graph that was compiled outside of a context is not reused within one."""
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
@pytest.mark.parametrize("name", ["qwen3-next", "mamba2", "zamba2"])
def test_recomputed_activations(ranks: Ranks, name: str) -> None:
    ranks.run(2, checks, CLIENTS[name], 27, "mask", "HeadTail", prepare=recomputing)


@pytest.mark.parametrize("name", some("qwen3-next", of=["qwen3-next", "bamba", "zamba2"]))
@pytest.mark.ranks(2)
def test_trains_in_the_balanced_layout(group: dist.ProcessGroup, name: str) -> None:
    """Takes a training step without a given layout, which is then balanced."""
    client, mesh, batch = CLIENTS[name], mesh_of(group), causal_batch(32)
    model, tolerance = client.make("sdpa"), client.wide_tolerance
    with WideTensors():
        expected = model(**batch, use_cache=False).loss
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with WideTensors(), symm_cp.training_step(model, batch, mesh) as step:
        step.loss.backward()
    assert_near("loss", step.loss, expected, tolerance)
    for each, parameter in model.named_parameters():
        assert_near(each, parameter.grad, wanted[each], tolerance, largest=1e-3)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", some("qwen3-next", of=["qwen3-next", "bamba", "falcon-h1"]))
@pytest.mark.ranks(2)
def test_refuses_documents_that_it_cannot_tell(group: dist.ProcessGroup, name: str) -> None:
    client = CLIENTS[name]
    batch, mesh = causal_batch(32), mesh_of(group)
    model = client.make("sdpa")
    sequential = symm_cp.Sequential(32, group.size())
    local, _ = symm_cp.shard_batch(
        mesh, {"input_ids": batch["input_ids"]}, load_balancer=sequential
    )
    edges, numbers = torch.tensor([0, 10, 32]), torch.zeros_like(local["input_ids"])
    for packed, message in (
        ({"cu_seq_lens_q": edges}, "with cu_seq_lens_q and 2 samples: pack documents into one"),
        ({"seq_idx": numbers}, "with seq_idx alone.*Pass the cu_seq_lens_q of the whole batch"),
    ):
        context = symm_cp.context_parallel(mesh, model=model, load_balancer=sequential)
        with pytest.raises(NotImplementedError, match=message), context:
            model(**local, **packed)


@pytest.mark.ranks(1)
def test_one_rank(group: dist.ProcessGroup) -> None:
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
