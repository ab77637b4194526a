"""Decoding and prefill with tensor parallelism: fused, over this backend, vLLM's kernel and gloo.

    python benchmarks/inference.py --against gloo,vllm --rivals rivals \\
        --json benchmarks/results/inference.json

Four layers of 1024 features, whose weights are split over the ranks. Decoding sums the activations
of one token of each sequence after attention and after the feed-forward part. Prefill has the
sequence split between these parts (sequence parallelism), and gathers and scatters it around them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import wait_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from benchmarks.llama import (
    ONE_PROCESS,
    has_result,
    in_one_process,
    llama,
    next_logits,
    static_cache,
    variants,
)
from benchmarks.rivals import Rival
from symm_cp.commands.bench.jobs import groups_over
from symm_cp.ops.common import unfused_all_gather

DIM, HEADS, HIDDEN, LAYERS = 1024, 16, 2816, 4
CACHED = 256  # tokens that decoding attends to

Step = Callable[[], torch.Tensor]

Rivals = Mapping[str, Rival]
#: Maps the activations to this rank's features, or back; takes the activations and the weight.
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """The weights of a rank, (in, out) each, and its keys and values of earlier tokens."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    cache: torch.Tensor  # (2, B, heads of the rank, CACHED, E)


def layers(ranks: int, dtype: torch.dtype, batch: int) -> list[Layer]:
    def weight(rows: int, columns: int) -> torch.Tensor:
        # As nn.Linear has them: the rows of `weight` are the features of its result.
        return (torch.randn(columns, rows) * rows**-0.5).to(dtype).t()

    part, hidden = DIM // ranks, HIDDEN // ranks
    cache = (2, batch, HEADS // ranks, CACHED, DIM // HEADS)
    return [
        Layer(
            weight(DIM, 3 * part),
            weight(part, DIM),
            weight(DIM, 2 * hidden),
            weight(hidden, DIM),
            torch.randn(cache).to(dtype),
        )
        for _ in range(LAYERS)
    ]


def _forward(
    x: torch.Tensor, stack: list[Layer], batch: int, inward: Product, outward: Product
) -> torch.Tensor:
    """Runs the layers on x, (tokens, DIM) or this rank's part; `batch` 0 means no cache."""
    for layer in stack:
        q, k, v = inward(F.rms_norm(x, (DIM,)), layer.qkv).chunk(3, -1)
        if batch:
            heads = (t.view(batch, 1, -1, DIM // HEADS).transpose(1, 2) for t in (q, k, v))
            q, k, v = heads
            keys, values = (torch.cat(pair, 2) for pair in zip(layer.cache, (k, v), strict=True))
            mixed = F.scaled_dot_product_attention(q, keys, values)
        else:
            heads = (t.view(1, len(t), -1, DIM // HEADS).transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(-1, layer.out.shape[0])
        x = x + outward(mixed, layer.out)
        gate, up = inward(F.rms_norm(x, (DIM,)), layer.up).chunk(2, -1)
        x = x + outward(F.silu(gate) * up, layer.down)
    return x


def _decode_case(group: dist.ProcessGroup, rivals: Rivals, dtype: torch.dtype, batch: int) -> Case:
    stack = layers(group.size(), dtype, batch)
    x = torch.randn(batch, DIM).to(dtype)
    dist.broadcast(x, 0, group)
    name, one_shot = group.group_name, torch.ops.symm_mem.one_shot_all_reduce.default

    def step(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        @torch.inference_mode()
        def run() -> torch.Tensor:
            return _forward(x, stack, batch, torch.mm, lambda a, w: reduce(a @ w))

        return run

    def in_place(reduce: Callable[[torch.Tensor], object]) -> Callable[[], torch.Tensor]:
        def reduced(partial: torch.Tensor) -> torch.Tensor:
            reduce(partial)
            return partial

        return step(reduced)

    variants = {
        "limit": step(lambda partial: partial),
        "op": step(lambda partial: one_shot(partial, "sum", name)),
    }
    for backend, over in groups_over(group, "symm_cp").items():
        variants[f"dist, {backend}"] = in_place(
            lambda partial, over=over: dist.all_reduce(partial, group=over)
        )
    for rival_name, rival in rivals.items():
        if rival.all_reduce(x) is not None:
            variants[rival_name] = in_place(
                lambda partial, rival=rival: rival.all_reduce(partial)()
            )

    def check() -> None:
        want = variants["op"]().float()
        for result in variants.values():
            if result is not variants["limit"]:
                torch.testing.assert_close(result().float(), want, rtol=0.1, atol=0.2)

    return Case(f"decode {batch} tokens {str(dtype)[6:]}", variants, check, most=200)


def _prefill_case(
    group: dist.ProcessGroup, rivals: Rivals, dtype: torch.dtype, tokens: int
) -> Case:
    ranks = group.size()
    stack = layers(ranks, dtype, 1)
    shard = torch.randn(tokens // ranks, DIM).to(dtype)
    gathered = torch.randn(tokens, DIM).to(dtype)

    def step(inward: Product, outward: Product) -> Callable[[], torch.Tensor]:
        @torch.inference_mode()
        def run() -> torch.Tensor:
            return _forward(shard, stack, 0, inward, outward)

        return run

    def unfused(over: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
        name, scatter = over.group_name, torch.ops._c10d_functional.reduce_scatter_tensor
        return step(
            lambda x, w: unfused_all_gather(x, 0, name) @ w,
            lambda a, w: wait_tensor(scatter(a @ w, "sum", ranks, name)),
        )

    def over_rival(rival: Rival) -> Callable[[], torch.Tensor]:
        def gather(x: torch.Tensor) -> torch.Tensor:
            whole = x.new_empty(tokens, DIM)
            call = rival.all_gather(whole, x)
            assert call is not None
            call()
            return whole

        def scatter(partial: torch.Tensor) -> torch.Tensor:
            # vLLM has no reduce-scatter; it sums everything everywhere.
            call = rival.all_reduce(partial)
            assert call is not None
            call()
            return partial.chunk(ranks)[group.rank()]

        return step(lambda x, w: gather(x) @ w, lambda a, w: scatter(a @ w))

    variants = {
        "limit": step(lambda x, w: gathered @ w, lambda a, w: (a @ w).chunk(ranks)[group.rank()]),
        "fused": step(
            lambda x, w: symm_cp.all_gather_matmul(x, w, group=group),
            lambda a, w: symm_cp.matmul_reduce_scatter(a, w, group=group),
        ),
    }
    for backend, over in groups_over(group, "symm_cp").items():
        variants[f"unfused ({backend})"] = unfused(over)
    if "vllm" in rivals:
        variants["unfused (vllm)"] = over_rival(rivals["vllm"])
    variants["unfused (gloo)"] = unfused(group)

    def check() -> None:
        want = variants["unfused (gloo)"]().float()
        for variant, run in variants.items():
            if variant != "limit":
                torch.testing.assert_close(run().float(), want, rtol=0.1, atol=0.2)

    return Case(f"prefill {tokens} tokens {str(dtype)[6:]}", variants, check)


def _decode_step(model: nn.Module, tokens: torch.Tensor) -> Step:
    """Returns the step that processes the last token, with the others in a cache."""
    cached = tokens.shape[1] - 1
    cache = static_cache(model, cached + 1)

    # Without gradients as in `generate`: transformers has a shorter way for this.
    @torch.no_grad()
    def step() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(cached)
        return next_logits(model, cache, tokens[:, -1:], cached)

    with torch.no_grad():
        next_logits(model, cache, tokens[:, :-1], 0)
    return step


def _prefill_step(model: nn.Module, tokens: torch.Tensor) -> Step:
    """Returns the step that processes a prompt, for the logits of its last token."""

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(input_ids=tokens, logits_to_keep=1).logits[:, -1]

    return step


def _llama_cases(group: dist.ProcessGroup, dtype: torch.dtype) -> Iterator[Case]:
    whole = llama(dtype).eval()
    models = dict(variants(whole, group, {"apply": {"sequence_parallel": False}}))
    tokens = torch.randint(whole.config.vocab_size, (1, 512))
    dist.broadcast(tokens, 0, group)
    for name, make, count in (
        ("decode", _decode_step, CACHED + 1),
        ("prefill", _prefill_step, 128),
        ("prefill", _prefill_step, 512),
    ):
        steps = {variant: make(model, tokens[:, :count]) for variant, model in models.items()}
        steps |= in_one_process(partial(make, whole, tokens[:, :count]), group)
        want = make(whole, tokens[:, :count])()

        def check(steps: Mapping[str, Step] = steps, want: torch.Tensor = want) -> None:
            # 50 units in the last place of the largest logits, which are about 3.
            atol = 200 * torch.finfo(dtype).eps
            for variant, step in steps.items():
                if has_result(variant, group):
                    torch.testing.assert_close(step(), want, rtol=0.0, atol=atol)

        size = f"{count} tokens" if name == "prefill" else f"after {CACHED} tokens"
        yield Case(
            f"Llama, {name} {size}, {str(dtype)[6:]}",
            steps,
            check,
            most=100,
            threaded=[ONE_PROCESS],
        )


def cases(group: dist.ProcessGroup, rivals: Rivals) -> Iterator[Case]:
    """Yields all cases."""
    for batch in (1, 4):
        yield _decode_case(group, rivals, torch.bfloat16, batch)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (128, 512, 2048):
            yield _prefill_case(group, rivals, dtype, tokens)
    for dtype in (torch.float32, torch.bfloat16):
        yield from _llama_cases(group, dtype)


if __name__ == "__main__":
    main(cases, __doc__, against=True)
