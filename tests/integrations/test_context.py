"""`context_parallel(model=...)`: what it sets and restores, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import symm_cp
import symm_cp.integrations.transformers
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import some
from tests.integrations.common import (
    Client,
    WideTensors,
    assert_near,
    assert_same,
    causal_batch,
    check_client,
    in_one_process,
    summed_grads,
    target_loss,
    under_context_parallel,
)

LLAMA = Client("Llama")
GEMMA = Client("Gemma2").having(sliding_window=9)
GPT_OSS = Client("GptOss").having(
    sliding_window=9, num_local_experts=4, num_experts_per_tok=2, layer_types=None
)


def implementations(model: nn.Module) -> set[str]:
    found = {
        part.config._attn_implementation for part in model.modules() if hasattr(part, "config")
    }
    nested = [getattr(model.config, name) for name in model.config.sub_configs]
    return found | {config._attn_implementation for config in nested if config is not None}


# --- equal to one process ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", some("HeadTail", "Sequential", of=["HeadTail", "Sequential"]))
@pytest.mark.ranks(2)
def test_models_compute_what_they_do_in_one_process(group: dist.ProcessGroup, layout: str) -> None:
    check_client(group, LLAMA, causal_batch(30, padding="left"), layout=layout)
    mistral = Client("Mistral").having(sliding_window=9)
    check_client(group, mistral, causal_batch(30, documents=[7, 8, 15]), layout=layout)
    # As users call models: in training, with the cache that is on by default.
    used = Client("Mistral", call={}).having(sliding_window=9)
    prepare = nn.Module.train
    check_client(group, used, causal_batch(30, masked=False), layout=layout, prepare=prepare)


def packs_by_cu_seq_lens(group: dist.ProcessGroup) -> None:
    batch = causal_batch(30, samples=1, documents=[7, 8, 15])
    expected = in_one_process(LLAMA, batch)
    batch["position_ids"] = torch.arange(30)[None]  # no documents in these
    edges = torch.tensor([0, 7, 15, 30], dtype=torch.int32)
    call = {"use_cache": True, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    client = Client("Llama", call=call)
    balancer = symm_cp.HeadTail(30, group.size())
    assert_same(
        under_context_parallel(group, client, batch, balancer=balancer), expected, batch, 2e-5
    )
    two = causal_batch(30, samples=2)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q with 2 samples"):
        under_context_parallel(group, client, two, balancer=balancer)
    call["cu_seq_lens_k"] = edges[:-1]
    with pytest.raises(ValueError, match="4 boundaries and cu_seq_lens_k 3"):
        under_context_parallel(group, client, batch, balancer=balancer)


def test_documents_by_cu_seq_lens(ranks: Ranks) -> None:
    ranks.run(2, packs_by_cu_seq_lens)


@pytest.mark.ranks(2)
def test_masks_of_the_whole_sequence(group: dist.ProcessGroup) -> None:
    batch = causal_batch(24, masked=False)
    expected = in_one_process(LLAMA, batch)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 24, 24, device="cpu")
    for mask in (causal[None, None], blocks):
        client = Client("Llama", call={"use_cache": False, "attention_mask": mask})
        balancer = symm_cp.HeadTail(24, group.size())
        assert_same(
            under_context_parallel(group, client, batch, balancer=balancer), expected, batch, 2e-5
        )
        capped = Client("Gemma2", call=client.call).having(sliding_window=64)
        expected_capped = in_one_process(Client("Gemma2").having(sliding_window=64), batch)
        found = under_context_parallel(
            group, capped, batch, balancer=balancer, implementation="eager"
        )
        assert_same(found, expected_capped, batch, 2e-5)


# --- set and restored --------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_implementations_are_set_and_restored(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    bart = Client("Bart", head="Model").having(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16
    )
    models = [LLAMA.make("sdpa"), LLAMA.make("eager"), bart.make("sdpa")]
    before = [implementations(model) for model in models]

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = models[0]

    ignore: dict[str, Any] = {"on_unfused": "ignore"}
    with symm_cp.context_parallel(mesh, model=[Wrapped(), *models[1:]], **ignore):
        assert all(implementations(model) == {"symm_cp"} for model in models)
        with symm_cp.context_parallel(mesh, model=models[0], **ignore):
            assert implementations(models[0]) == {"symm_cp"}
        assert all(implementations(model) == {"symm_cp"} for model in models)
    assert [implementations(model) for model in models] == before
    with pytest.raises(KeyError), symm_cp.context_parallel(mesh, model=models, **ignore):
        raise KeyError
    assert [implementations(model) for model in models] == before
    # If one of several models is refused, the others keep their settings.
    bloom = transformers.BloomModel(transformers.BloomConfig(hidden_size=8, n_head=2, n_layer=1))
    with (
        pytest.raises(
            NotImplementedError, match=r"BloomModel has config.model_type='bloom': it is not"
        ),
        symm_cp.context_parallel(mesh, model=[*models, bloom]),
    ):
        pass
    assert [implementations(model) for model in models] == before
    permanent = LLAMA.make("symm_cp")
    with symm_cp.context_parallel(mesh, model=permanent, **ignore):
        pass
    assert implementations(permanent) == {"symm_cp"}


@pytest.mark.ranks(2)
def test_threads_share_a_model(group: dist.ProcessGroup) -> None:
    model, mesh = LLAMA.make("sdpa"), mesh_of(group)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with symm_cp.context_parallel(mesh, model=model, on_unfused="ignore"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with symm_cp.context_parallel(mesh, model=model, on_unfused="ignore"):
        thread.start()
        assert entered.wait(60)
    assert implementations(model) == {"symm_cp"}  # the other thread still uses it
    ids = torch.randint(3, 60, (1, 8))
    expected = LLAMA.make("sdpa")(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, expected)  # this thread has no context
    leave.set()
    thread.join()
    assert implementations(model) == {"sdpa"}


# --- refused -----------------------------------------------------------------------------------

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: nn.Linear(2, 2), ValueError, "model=Linear has no model of transformers"),
    (lambda: ["model"], TypeError, "model is a str, must be a module"),
]


@pytest.mark.ranks(2)
def test_models_that_are_refused(group: dist.ProcessGroup) -> None:
    for make, kind, message in REFUSED:
        model = make()
        with (
            pytest.raises(kind, match=message),
            symm_cp.context_parallel(mesh_of(group), model=model),
        ):
            raise AssertionError("the context was entered")


@pytest.mark.ranks(2)
def test_calls_that_are_refused(group: dist.ProcessGroup) -> None:
    mesh, model = mesh_of(group), LLAMA.make("sdpa")
    ids = torch.randint(3, 60, (2, 8))
    whole = {"input_ids": ids, "position_ids": torch.arange(8).expand(2, -1)}
    # `logits_to_keep` would keep another token on each rank.
    calls: list[tuple[str, dict[str, Any]]] = [
        ("LlamaModel was called without position_ids.*shard_batch", {"input_ids": ids}),
        ("output_attentions.*outside of the context", {**whole, "output_attentions": True}),
        ("cache, as generate does.*outside", {**whole, "cache": transformers.DynamicCache()}),
        ("LlamaForCausalLM .*logits_to_keep=1:", {**whole, "logits_to_keep": 1}),
        ("logits_to_keep=positions:", {**whole, "logits_to_keep": torch.tensor([-1])}),
    ]
    with symm_cp.context_parallel(mesh, model=model):
        with pytest.raises(NotImplementedError, match=r"as generate does.*outside"):
            model.generate(ids, max_new_tokens=1)
        for message, options in calls:
            with pytest.raises(NotImplementedError, match=message):
                model(**options)
        model(**whole, logits_to_keep=0)


def one_rank_has_no_mask(group: dist.ProcessGroup) -> str:
    """If ranks call a model differently, each gets an error, and none waits."""
    model, ids = LLAMA.make("sdpa"), torch.randint(3, 60, (1, 8))
    mask = {"attention_mask": torch.ones_like(ids)} if group.rank() == 0 else {}
    try:
        with symm_cp.context_parallel(mesh_of(group), model=model):
            model(input_ids=ids, position_ids=torch.arange(8)[None], use_cache=True, **mask)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_call_a_model_differently(ranks: Ranks) -> None:
    for error in ranks.run(2, one_rank_has_no_mask):
        assert "ranks disagree" in error, error
    ranks.run(2, packs_by_cu_seq_lens)  # later calls are not affected


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("client", [LLAMA, GEMMA], ids=lambda client: client.name)
@pytest.mark.ranks(2)
def test_checkpoints_recomputed_outside_of_the_context(
    group: dist.ProcessGroup, client: Client, reentrant: bool
) -> None:
    batch = causal_batch(24, padding="right")
    expected = in_one_process(client, batch)
    mesh, balancer = mesh_of(group), symm_cp.HeadTail(24, group.size())
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, load_balancer=balancer)
    labels = local.pop("labels")
    for implementation in ("symm_cp", "eager"):
        model = client.make(implementation).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with symm_cp.context_parallel(mesh, model=model, load_balancer=balancer):
            loss = reduce_loss(target_loss(model(**local, use_cache=False).logits, labels))
        assert model.config._attn_implementation == implementation
        loss.backward()
        assert model.config._attn_implementation == implementation
        for name, grad in summed_grads(group, model).items():
            want = expected.grads[name]
            assert grad is not None
            assert want is not None
            assert_near(name, grad, want, 2e-5)


# --- outside of a context ----------------------------------------------------------------------


@pytest.mark.parametrize("client", [LLAMA, GEMMA, GPT_OSS], ids=lambda client: client.name)
def test_outside_of_a_context_models_compute_as_usual(client: Client) -> None:
    ours, theirs = client.make("symm_cp"), client.make("eager")
    ids = torch.randint(3, 60, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        with WideTensors(), torch.no_grad():
            got, want = (model(**batch).logits for model in (ours, theirs))
        assert_near("logits", got[:, 5:], want[:, 5:], 2e-5)
    with WideTensors():
        got, want = (
            model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            for model in (ours, theirs)
        )
    assert torch.equal(got, want)
