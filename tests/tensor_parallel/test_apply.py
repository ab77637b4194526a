"""`apply` against the same model in one process: logits, and the gradients of all parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from symm_cp.tensor_parallel import apply
from symm_cp.tensor_parallel.features import chunks
from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import exhaustive, in_turns, pairs, some
from tests.tensor_parallel.common import Recorder, mesh_of, whole
from tests.tensor_parallel.models import FAMILIES, model_of, tokens_of


def same_gradients(model: nn.Module, dense: nn.Module, rtol: float, atol: float) -> None:
    others = dict(dense.named_parameters())
    for name, mine in model.named_parameters():
        expected = whole(others.pop(name).grad)
        torch.testing.assert_close(
            whole(mine.grad).view_as(expected),  # packed experts have a dimension more
            expected,
            rtol=rtol,
            atol=atol,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    assert not others


def as_in_one_process(
    group: dist.ProcessGroup, family: str, sequence_parallel: bool, **changes: Any
) -> None:
    dense = model_of(family, **changes)
    model = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    split = {n: p for n, p in model.named_parameters() if not p.placements[0].is_replicate()}
    assert sum("layers" in name for name in split) >= 2 * 2  # of two layers
    for parameter in split.values():
        sizes = chunks(parameter.shape[parameter.placements[0].dim], group.size()).sizes
        rows = parameter.numel() // sum(sizes)
        assert parameter.to_local().numel() == sizes[group.rank()] * rows
    # Norms and rotary embeddings of transformers compute in float32, routers choose by them.
    single = next(dense.parameters()).dtype == torch.float32
    limits = {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-6, "atol": 1e-7}
    for _ in range(2):  # gradients add up
        tokens = tokens_of(dense)
        outputs = [m(tokens, labels=tokens, use_cache=False) for m in (model, dense)]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, **limits)
        for output in outputs:
            output.loss.backward()
    same_gradients(model, dense, **limits)


PLAIN = [("llama", 2, False), ("qwen3", 2, True)]


@pytest.mark.parametrize(
    ("family", "world_size", "sequence_parallel"),
    some(*PLAIN, of=pairs(FAMILIES, (1, 2, 4), (False, True), also=PLAIN)),
)
def test_models(ranks: Ranks, family: str, world_size: int, sequence_parallel: bool) -> None:
    ranks.run(world_size, as_in_one_process, family, sequence_parallel)


#: Heads, features and vocabularies that no world size divides.
UNEVEN = {
    "hidden_size": 40,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "intermediate_size": 37,
    "vocab_size": 61,
}


PLAIN_UNEVEN = [("qwen3", 3, False), ("qwen3", 3, True)]
UNEVEN_FAMILIES = ("llama", "tied llama", "qwen3", "gemma3", "phi3")


@pytest.mark.parametrize(
    ("family", "world_size", "sequence_parallel"),
    some(*PLAIN_UNEVEN, of=pairs(UNEVEN_FAMILIES, (2, 3, 4), (False, True), also=PLAIN_UNEVEN)),
)
def test_uneven(ranks: Ranks, family: str, world_size: int, sequence_parallel: bool) -> None:
    ranks.run(world_size, as_in_one_process, family, sequence_parallel, **UNEVEN)


#: Key heads that ranks share: each rank's query heads use one, or (8 heads, 2 key heads, 3 ranks)
#: a rank's query heads use different ones.
SHARED = [
    ("llama", 4, False, 8, 2),
    ("llama", 4, True, 8, 2),
    ("qwen3", 3, True, 8, 2),
    ("qwen3", 3, False, 4, 1),
]
SHARED_FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "mistral")


@pytest.mark.parametrize(
    ("family", "world_size", "sequence_parallel", "queries", "keys"),
    some(
        *SHARED[1:3],
        of=[
            *SHARED,
            *((family, 4, False, 6, 2) for family in SHARED_FAMILIES),
            *((family, 3, True, 6, 2) for family in SHARED_FAMILIES),
        ],
    ),
)
@pytest.mark.ranks
def test_ranks_share_key_heads(
    group: dist.ProcessGroup,
    world_size: int,
    family: str,
    sequence_parallel: bool,
    queries: int,
    keys: int,
) -> None:
    changes = {
        "num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 8 * queries,
        "head_dim": 8,
    }  # fmt: skip
    as_in_one_process(group, family, sequence_parallel, **changes)
    dense = model_of(family, **changes)
    model = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    attention = model.model.layers[0].self_attn
    own = attention.q_proj.features.count // attention.k_proj.features.count
    assert attention.num_key_value_groups == own
    assert attention.k_proj.weight.shape == dense.model.layers[0].self_attn.k_proj.weight.shape
    if not sequence_parallel:
        tokens, options = tokens_of(dense, 5), {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(tokens, **options), dense.generate(tokens, **options))


@exhaustive
@pytest.mark.ranks(2)
def test_ranks_share_key_heads_compiled(group: dist.ProcessGroup) -> None:
    dense = model_of("llama", num_key_value_heads=1, num_hidden_layers=1)
    model = apply(copy.deepcopy(dense), mesh_of(group))
    compiled = torch.compile(model, backend="aot_eager")
    tokens = tokens_of(dense)
    for m in (compiled, dense):
        m(tokens, labels=tokens, use_cache=False).loss.backward()
    same_gradients(model, dense, 1e-6, 1e-7)


# --- other common uses of models -------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(("llama", 2), of=in_turns(FAMILIES, (2, 4))),
)
@pytest.mark.ranks
def test_generates(group: dist.ProcessGroup, world_size: int, family: str) -> None:
    dense = model_of(family)
    model = apply(copy.deepcopy(dense), mesh_of(group))
    tokens = tokens_of(dense, 7)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), dense.generate(tokens, **options))


@pytest.mark.ranks(2)
def test_generates_in_continuous_batches(group: dist.ProcessGroup) -> None:
    dense = model_of("llama", attn_implementation="sdpa")
    prompts = [tokens_of(dense, length)[0].tolist() for length in (3, 9, 5)]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        num_blocks=16, page_size=16, max_batch_tokens=16, max_memory_percent=0.01
    )
    with world(group, "symm_cp") as inner:
        model = apply(copy.deepcopy(dense), mesh_of(inner))
        made = model.generate_batch(prompts, config, batching)
    for prompt, result in zip(prompts, made.values(), strict=True):
        expected = dense.generate(torch.tensor([prompt]), generation_config=config)
        assert [*prompt, *result.generated_tokens] == expected[0].tolist()


@pytest.mark.parametrize(
    ("world_size", "sequence_parallel", "recompute"),
    some((2, True, True), of=pairs((2, 4), (True, False), (True, False))),
)
@pytest.mark.ranks
def test_trains(
    group: dist.ProcessGroup, world_size: int, sequence_parallel: bool, recompute: bool
) -> None:
    """Three training steps of a copy equal one process, with clipping and maybe recomputation."""
    dense = model_of("qwen3")
    applied = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    model = copy.deepcopy(applied)
    del applied
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The large eps keeps the rounding of small gradients (norms compute in float32) small.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (model, dense)]
    for _ in range(3):
        tokens = tokens_of(dense)
        losses = []
        for m, optimizer in zip((model, dense), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


@exhaustive
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_autocast(group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    dense = model_of("qwen3").float()
    model = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    tokens = tokens_of(dense)
    errors = []
    exact = dense(tokens, use_cache=False).logits
    for m in (model, dense):
        with torch.autocast("cpu", torch.bfloat16):
            output = m(tokens, labels=tokens, use_cache=False)
        output.loss.backward()
        errors.append((output.logits.float() - exact).abs().max())
    assert errors[0] <= 2 * errors[1]  # the error of torch's own products in bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("world_size", "sequence_parallel"),
    [(1, False), (2, True), (3, False), (3, True)],
)
@pytest.mark.exhaustive
@pytest.mark.ranks
def test_compiled(group: dist.ProcessGroup, world_size: int, sequence_parallel: bool) -> None:
    dense = model_of("qwen3", num_hidden_layers=1)  # the first and the last block
    model = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    # transformers' masks break graphs, so only the block is compiled.
    model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
    tokens = tokens_of(dense)
    for m in (model, dense):
        m(tokens, labels=tokens, use_cache=False).loss.backward()
    same_gradients(model, dense, rtol=1e-6, atol=1e-7)
    torch._dynamo.reset()


# --- communication ---------------------------------------------------------------------------


def communicates(group: dist.ProcessGroup, sequence_parallel: bool) -> tuple[list[str], list[str]]:
    model = apply(model_of("llama"), mesh_of(group), sequence_parallel=sequence_parallel)
    tokens = tokens_of(model)
    lengths = []
    for block in model.model.layers:
        block.post_attention_layernorm.register_forward_hook(
            lambda module, inputs, output: lengths.append(output.shape[1])
        )
    with Recorder() as forward:
        loss = model(tokens, labels=tokens, use_cache=False).loss
    with Recorder() as backward:
        loss.backward()
    share = group.size() if sequence_parallel else 1
    assert lengths == [tokens.shape[1] // share] * 2
    ours = "symm_mem::"
    return [
        [name.removeprefix(ours) for name in recorder.communicating()]
        for recorder in (forward, backward)
    ]


def test_what_communicates(ranks: Ranks) -> None:
    # Logits, and the sequence after the last block, are gathered by the same ops without a weight.
    logits = {"_all_gather_matmul_split": 1}
    whole = {"fused_matmul_all_reduce": 4, **logits}
    parts = {"fused_all_gather_matmul": 4 + 1, "fused_matmul_reduce_scatter": 4, **logits}
    for sequence_parallel, inside in ((False, whole), (True, parts)):
        forward, backward = ranks.run(2, communicates, sequence_parallel)[0]
        assert {name: forward.count(name) for name in inside} == inside
        for name in (*forward, *backward):  # only our ops, and waits for collectives
            assert "::" not in name or "_c10d_functional" in name, name


# --- errors ----------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.up = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.table(ids)) * 2


@pytest.mark.ranks(2)
def test_errors(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    replaced = Tiny()
    replaced.up.forward = replaced.up.forward
    narrow = model_of("llama", num_attention_heads=1, num_key_value_heads=1)
    tied = model_of("tied llama")
    mixtral, gpt_oss = model_of("mixtral"), model_of("gpt_oss")
    experts = "model.layers.*.mlp.experts"
    weights = dict(gpt_oss.model.layers[0].mlp.experts.named_parameters())
    by_feature = {f"{experts}.{name}": "rowwise" for name in weights}
    cases: list[tuple[nn.Module, Any, dict[str, Any], type[Exception], str]] = [
        (Tiny(), "manual", {}, ValueError, "'manual'"),
        (Tiny(), "auto", {}, ValueError, "Tiny has no tensor-parallel plan of its own"),
        (Tiny(), {"up": 3}, {}, TypeError, "'up' to 3"),
        (Tiny(), {"down": "colwise"}, {}, ValueError, r"\['down'\] of the plan name no module"),
        (
            Tiny(),
            {"up": "mla_kv_a_proj"},
            {},
            NotImplementedError,
            "gives up .Linear. the kind 'mla_kv_a_proj'.*leave the rule out",
        ),
        (
            Tiny(),
            {"up": "sequence_parallel"},
            {},
            NotImplementedError,
            "leave the rule out: sequence_parallel=True splits",
        ),
        (Tiny(), {"table": "colwise"}, {}, NotImplementedError, "table .*must be an nn.Linear"),
        (Tiny(), {"up": "embedding_rowwise"}, {}, NotImplementedError, "must be an nn.Embedding"),
        (
            Tiny(),
            {"scale": "colwise"},
            {},
            NotImplementedError,
            "only if the plan gives its module",
        ),
        (replaced, {"up": "colwise"}, {}, NotImplementedError, "forward of up was replaced"),
        (
            Tiny(),
            {"up": "colwise"},
            {"sequence_parallel": True},
            ValueError,
            "names no module in a ModuleList of Tiny",
        ),
        (narrow, "auto", {}, ValueError, "q_proj .* has 1 heads.*mesh of at most 1 ranks"),
        (
            tied,
            {"lm_head": "colwise_gather_output"},
            {},
            ValueError,
            "tied parameters must be split in the same way",
        ),
        (
            mixtral,
            {experts: "ep_dispatch_experts", f"{experts}.down_proj": "grouped_gemm"},
            {},
            NotImplementedError,
            "needs a rule for its parameter gate_up_proj with the kind 'grouped_gemm'",
        ),
        (
            mixtral,
            {experts: "moe_tp_experts", f"{experts}.gate_up_proj": "packed_colwise"},
            {},
            NotImplementedError,
            "needs a rule for its parameter down_proj",
        ),
        (
            gpt_oss,
            {experts: "moe_tp_experts", **by_feature},
            {},
            NotImplementedError,
            "split these by expert",
        ),
        (
            apply(Tiny(), mesh, {"up": "colwise"}),
            {"up": "colwise"},
            {},
            ValueError,
            "is already a DTensor",
        ),
    ]
    for model, plan, options, error, message in cases:
        before = [(name, type(p), type(p.data)) for name, p in model.named_parameters()]
        with pytest.raises(error, match=message):
            apply(model, mesh, plan, **options)
        assert before == [(name, type(p), type(p.data)) for name, p in model.named_parameters()]
    parts = apply(model_of("llama"), mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"\[2, 7, 32\], must be .* divisible by world size 2"):
        parts(tokens_of(parts, 7), use_cache=False)
    assert parts(tokens_of(parts), use_cache=False).logits.shape[1] == 12  # all is well after it
    table = apply(Tiny(), mesh, {"table": "embedding_rowwise"})
    with pytest.raises(IndexError, match="index out of range"):
        table(torch.tensor([[1, 6]]))


@pytest.mark.ranks(2)
def test_an_optimizer_that_was_made_before_is_refused(group: dist.ProcessGroup) -> None:
    """An optimizer made before `apply` raises: the model no longer has its parameters."""
    model = model_of("llama")
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    apply(model, mesh_of(group))
    ids = tokens_of(model)
    model(ids, labels=ids, use_cache=False).loss.backward()
    with pytest.raises(
        RuntimeError, match=r"SGD was made before apply, which has replaced its par"
    ):
        early.step()
    other.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
