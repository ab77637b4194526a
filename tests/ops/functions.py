"""Public functions with the options that the example calls of their ops leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp import moe
from symm_cp.ops.recurrent.recurrence import Summary
from symm_cp.tensors.shards import Split
from tests.ops.calls import OPS, Call, Tensors

Rand = Callable[..., torch.Tensor]


def functions(group: dist.ProcessGroup, dtype: torch.dtype = torch.float64) -> dict[str, Call]:
    """Calls of functions that have gradients, on inputs that differ between ranks."""

    generator = torch.Generator().manual_seed(torch.initial_seed() % (1 << 40) + group.rank())

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return (
        matmuls(group, rand)
        | uneven_parts(group, rand)
        | attention(group, rand)
        | heads(group, rand)
        | recurrences(group, rand)
        | experts(group, rand)
    )


def matmuls(group: dist.ProcessGroup, rand: Rand) -> dict[str, Call]:
    """The fused matmuls in three dimensions, along each."""
    W, found = group.size(), {}
    for dim in range(3):
        inner = 3 * W if dim == 2 else 3
        inputs = [rand(2 * W, 3 * W, 3), rand(inner, 5 * W)]
        found[f"gather {dim}"] = Call(
            lambda x, w, dim=dim: symm_cp.all_gather_matmul(
                x, [w, w * 2], gather_dim=dim, group=group
            ),
            inputs,
        )
        inputs = [rand(2 * W, 3 * W, 3), rand(3, 5 * W)]
        found[f"scatter {dim}"] = Call(
            lambda x, w, dim=dim: [
                symm_cp.matmul_reduce_scatter(
                    x, w, scatter_dim=dim, reduce_op="avg" if dim else "sum", group=group
                )
            ],
            inputs,
        )
    inputs = [rand(2, 3, 4), rand(4, 5), torch.ones(5).to(inputs[0])]
    return found | {
        "all-reduce": Call(lambda *x: [symm_cp.matmul_all_reduce(*x, group=group)], inputs),
        "average": Call(
            lambda *x: [symm_cp.matmul_all_reduce(*x, reduce_op="avg", group=group)], inputs
        ),
    }


def uneven_parts(group: dist.ProcessGroup, rand: Rand) -> dict[str, Call]:
    """5 rows, and 7 columns, in nearly equal parts; rows of which ranks have none."""
    W, rank = group.size(), group.rank()
    rows, columns = Split.nearly_equal(5, W), Split.nearly_equal(7, W, 1)
    few, eye = Split((0,) * (W - 1) + (3,), 1), torch.eye(7).to(rand(1))

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Tensors:
        hidden = symm_cp.all_gather_matmul(x, up, group=group, sizes=rows.sizes).tanh()
        part = symm_cp.matmul_reduce_scatter(
            hidden, down, scatter_dim=1, group=group, sizes=columns.sizes
        )
        whole = symm_cp.all_gather_matmul(
            part, eye, gather_dim=-1, group=group, sizes=columns.sizes
        )
        own = symm_cp.low_contention_reduce_scatter(whole, group=group, sizes=rows.sizes)
        return [symm_cp.low_contention_all_gather(own * 2, group=group, sizes=rows.sizes) + 1]

    def gather_kv(key: torch.Tensor, value: torch.Tensor) -> Tensors:
        return list(symm_cp.all_gather_kv(key, value, seq_dim=1, group=group, sizes=few.sizes))

    return {
        "uneven parts": Call(block, [rand(rows.sizes[rank], 8), rand(8, 6), rand(6, 7)]),
        "keys on one rank": Call(gather_kv, [rand(2, few.sizes[rank], 3, n) for n in (4, 5)]),
        "halo": Call(
            lambda x: [symm_cp.exchange_halo(x, 3, 1, -1, group=group, sizes=rows.sizes)],
            [rand(2, rows.sizes[rank])],
        ),
    }


def attention(group: dist.ProcessGroup, rand: Rand) -> dict[str, Call]:
    """Attention with all options, by keys and by heads; and to a spread cache."""
    S, W = 6, group.size()
    positions = torch.arange(S * W)
    ids = positions.expand(2, -1) // 4
    options: dict[str, Any] = {
        "softcap": 1.5,
        "dropout_p": 0.25,
        "dropout_seed": torch.tensor([3]),
        "document_ids": ids,
        "key_mask": ids != 1,
        "is_causal": True,
        "chunk_lengths": [S] * W,
        "query_chunk_lengths": [S] * W,
    }

    def attend(method: str, **options: Any) -> Callable[..., Tensors]:
        def run(q: Any, k: Any, v: Any, *terms: Any) -> Tensors:
            given = options | dict(zip(("sinks", "bias"), terms, strict=False))
            out, lse = OPS.fused_all_gather_attention(
                q, k, v, group.group_name, method=method, **given
            )
            return [out, lse.nan_to_num(neginf=0)]  # some rows see nothing

        return run

    same = torch.Generator().manual_seed(S)
    sinks, bias = (
        torch.randn(shape, generator=same).to(rand(1)) for shape in ((W,), (W, 2 * S * W - 1))
    )
    inputs = [rand(2, W, S, 4), rand(2, W, S, 4), rand(2, W, S, 3), sinks, bias]
    cached = {"group": group, "scatter_heads": True, "scale": 0.3, "first_query": S * W - 3}
    own = positions[positions // 2 % W == group.rank()]
    query = torch.randn(2, 2 * W, 3, 4, generator=same).to(rand(1))
    keys = [rand(2, 2, len(own), n) for n in (4, 3)]
    sunk = [rand(2, W, S, 4), rand(2, W, S, 4), rand(2, W, S, 4), sinks]
    methods = "allgather", "ulysses"
    return (
        {f"attention, {method}": Call(attend(method, **options), inputs) for method in methods}
        | {
            f"attention, causal, {method}": Call(attend(method, is_causal=True), sunk)
            for method in methods
        }
        | {
            "spread cache": Call(
                lambda *x: list(symm_cp.spread_cache_attention(*x, key_positions=own, **cached)),
                [query, *keys],
            )
        }
    )


def heads(group: dist.ProcessGroup, rand: Rand) -> dict[str, Call]:
    """Exchanges of heads, of which ranks have unequal numbers, with layouts; projections."""
    W, rank = group.size(), group.rank()
    balancer = symm_cp.HeadTail(4 * W + 2, W)
    split, length = Split.nearly_equal(2 * W + 1, W), balancer.lengths[rank]
    layout: dict[str, Any] = {"group": group, "load_balancer": balancer}
    same = torch.Generator().manual_seed(W)
    shapes = (6, 4 * W), (6, 8 * W), (6, 4 * W), (4,), (4,), (4 * W, 5)
    weights = [torch.randn(shape, generator=same).to(rand(1)) for shape in shapes]
    tables = torch.rand(2, length, 4).to(rand(1))

    def there_and_back(x: torch.Tensor) -> Tensors:
        y = symm_cp.sequence_to_heads(x * 2, heads=split, **layout)
        return [symm_cp.heads_to_sequence(y.sin(), heads=split, **layout).flatten(2)]

    def layer(x: Any, q: Any, k: Any, v: Any, of_q: Any, of_v: Any, out: Any) -> Tensors:
        q, k, v = symm_cp.ulysses_projection(
            x, [q, k, v], features=4, norms=[of_q, None, of_v], rope=(tables[0], tables[1]),
            rotated=[True, True, False], **layout,
        )  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k[:, ::2], v)
        return [symm_cp.ulysses_output_projection(mixed, out, **layout)]

    return {
        "heads there and back": Call(there_and_back, [rand(2, 2 * W + 1, length, 3)]),
        "projections": Call(layer, [rand(1, length, 6), *weights]),
        "projections without norms": Call(
            lambda x, q, k, *biases: list(
                symm_cp.ulysses_projection(x, [q, k], features=4, biases=biases, **layout)
            ),
            [rand(1, length, 6), *weights[:2], weights[0][0].clone(), weights[1][1].clone()],
        ),
    }


def users(r: Any, w: Any, k: Any, v: Any, u: Any, **options: Any) -> Tensors:
    """As in symm_cp/ops/README.md."""

    def summary(decay: Any, r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Summary:
        bonus = (r * u.to(r.dtype) * k).sum(-1, keepdim=True) * v
        return Summary(k * decay.to_end, v, kept=(r, decay.pairs_before(r, k), bonus))

    def local(
        decay: Any, before: torch.Tensor, written: torch.Tensor, r: torch.Tensor,
        attended: torch.Tensor, bonus: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return (r * decay.before) @ before + attended @ written + bonus

    return symm_cp.recurrence(summary, local, (r, k, v), w, **options)


def recurrences(group: dist.ProcessGroup, rand: Rand) -> dict[str, Call]:
    """Packed documents in the head-tail layout, and unequal parts in order."""
    W, rank = group.size(), group.rank()
    layout = symm_cp.HeadTail(8 * W, W).layout
    sizes = list(range(2, W + 2))
    options: dict[str, Any] = {
        "group": group, "cu_seqlens": [0, 5, 8 * W], "layout": layout, "chunk_size": 3
    }  # fmt: skip

    def unit(*shape: int) -> torch.Tensor:
        return F.normalize(rand(*shape), dim=-1)

    def decays(*shape: int) -> torch.Tensor:
        return -rand(*shape).abs()

    q, k, key = unit(2, 8, 2, 5), unit(2, 8, 2, 5), unit(2, 8, 2, 5)
    v, by_head, by_feature = rand(2, 8, 2, 3), decays(2, 8, 2), decays(2, 8, 2, 5)
    rate = rand(2, 8, 2).sigmoid()
    parameter = torch.randn(5, generator=torch.Generator().manual_seed(5)).to(v)
    matrix = unit(2, 4, 4)
    functions: dict[str, tuple[Callable[..., Any], Tensors]] = {
        "delta rule": (symm_cp.gated_delta_rule, [q, k, v, by_head, rate]),
        "delta rule by feature": (symm_cp.gated_delta_rule, [q, k, v, by_feature, rate]),
        "linear attention": (symm_cp.gated_linear_attention, [q, k, v, by_head]),
        "linear attention by feature": (symm_cp.gated_linear_attention, [q, k, v, by_feature]),
        "rwkv7": (symm_cp.rwkv7, [q, by_feature, k, v, -key, key * rate[..., None]]),
        "recurrence of a user": (users, [q, by_feature, k, v, parameter]),
    }
    return {
        name: Call(lambda *x, op=op: list(op(*x, **options)), inputs)
        for name, (op, inputs) in functions.items()
    } | {
        "convolution": Call(
            lambda *x: [
                symm_cp.causal_convolution(
                    *x, group=group, cu_seqlens=[0, 2, sum(sizes)], sizes=sizes
                )
            ],
            [rand(2, 3, sizes[rank]), rand(3, 4), rand(3)],
        ),
        "scan of matrices": Call(
            lambda x, m: [symm_cp.scan_states(x, transition=m, group=group, reverse=True)],
            [rand(2, 4, 3), matrix],
        ),
        "scan of decays": Call(
            lambda x, d: [symm_cp.scan_states(x, decay=d, group=group)], [rand(2, 4), rand(2, 1)]
        ),
    }  # fmt: skip


def experts(group: dist.ProcessGroup, rand: Rand) -> dict[str, Call]:
    """Layers of experts, by rows and with matmuls; a choice of no expert."""
    W = group.size()
    chosen = torch.arange(12).view(6, 2) % (2 * W)
    chosen[1, 0] = -1
    factors, tokens = rand(6, 2), rand(6, 5)

    def rows(x: torch.Tensor, factors: torch.Tensor) -> Tensors:
        sent, routing = moe.dispatch(x, chosen, 2 * W, group=group, capacity=5)
        return [moe.combine(sent.square(), factors, routing)]

    def matmuls(x: Any, gate: Any, up: Any, down: Any, factors: Any) -> Tensors:
        (a, b), routing = moe.dispatch_matmul(x, [gate, up], chosen, 2 * W, group=group)
        return [moe.matmul_combine(F.silu(a) * b, down, factors, routing)]

    weights = [rand(2, 5, 3), rand(2, 5, 3), rand(2, 3, 5)]
    return {
        "rows of experts": Call(rows, [tokens, factors]),
        "matmuls of experts": Call(matmuls, [tokens, *weights, factors]),
    }
