"""Flex attention over ranks against a dense float64 reference with masks written out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from symm_cp import (
    HeadTail,
    LoadBalancer,
    PerDocumentHeadTail,
    ProcessingTimeRoundRobin,
    Sequential,
    set_rotate_method,
)
from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex import mask as flex_mask
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.ops.attention.methods import ALLGATHER, Method
from symm_cp.schedule import SequenceLayout
from symm_cp.testing import Ranks
from tests.exhaustive import some

# Rounding of 16-bit weights and outputs, of values of size 1; 600 terms for the others.
TOLERANCE = {
    torch.float64: 600 * 2.0**-53,
    torch.float32: 600 * 2.0**-24,
    torch.bfloat16: 4 * 2.0**-8,
    torch.float16: 4 * 2.0**-11,
}


@dataclass
class Case:
    """A mask as `mask_mod` and written out; a `score_mod` and its effect on all scores."""

    visible: torch.Tensor  # (B or 1, H or 1, S_q, S_k)
    mask_mod: Callable[..., torch.Tensor] | None = None
    block_size: int | tuple[int, int] | None = None
    score_mod: Callable[..., torch.Tensor] | None = None
    written: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda scores: scores)
    learnt: tuple[torch.Tensor, ...] = ()
    keys: int | None = None  # number of keys, if it differs from the queries'

    def block_mask(self) -> BlockMask | None:
        if self.block_size is None or self.mask_mod is None:
            return None
        B, H, Q, K = self.visible.shape
        return create_block_mask(
            self.mask_mod, B, H, Q, K, device="cpu", BLOCK_SIZE=self.block_size
        )


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = case.written(scores).masked_fill(~case.visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    seen = lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)
    return torch.exp(scores - seen) @ v, lse


def balancers(length: int, W: int, mask: BlockMask | None) -> list[LoadBalancer]:
    sizes = (length, *([0] * (2 * W - 1)))
    parts = [length // 3, 0, 5, length - length // 3 - 5]
    found: list[LoadBalancer] = [
        Sequential(length, W),
        HeadTail(length, W),
        PerDocumentHeadTail(parts, W),
        LoadBalancer(SequenceLayout(W, tuple(reversed(range(2 * W))), sizes)),  # all on one rank
    ]
    if mask is not None and mask.seq_lengths[0] == mask.seq_lengths[1]:
        found.append(ProcessingTimeRoundRobin(mask, W))
    return found


def check(
    name: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, times: float = 1
) -> None:
    assert actual.shape == expected.shape, f"{name}: {actual.shape=}, expected {expected.shape}"
    if actual.numel() == 0:
        return
    assert torch.equal(actual == -math.inf, expected == -math.inf), f"{name}: other rows are -inf"
    actual, expected = (t.double().masked_fill(t == -math.inf, 0) for t in (actual, expected))
    error = (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    limit = times * TOLERANCE[dtype]
    assert error <= limit, f"{name}: {error=:.3g} of {limit:.3g}"


def compare(
    group: dist.ProcessGroup,
    case: Case,
    balancer: LoadBalancer,
    mask: BlockMask | None,
    *,
    shape: tuple[int, int, int, int] = (2, 4, 2, 8),
    dtype: torch.dtype = torch.float64,
    with_lse: bool = False,
    scale: float | None = None,
    method: Method = ALLGATHER,
) -> None:
    """Forward and all gradients of one call; `shape` is (B, H, G, E)."""
    (B, H, G, E), rank = shape, group.rank()
    length = balancer.seq_length
    keys = balancer if case.keys is None else Sequential(case.keys, group.size())
    q, k, v = (
        torch.randn(B, heads, size, E).to(dtype)
        for heads, size in ((H, length), (G, keys.seq_length), (G, keys.seq_length))
    )
    wide = torch.promote_types(dtype, torch.float32)
    grads = torch.randn(B, H, length, E).to(dtype), torch.randn(B, H, length).to(wide)
    full = [t.double().requires_grad_() for t in (q, k, v)]
    expected = dense(*full, case, scale)
    count = 2 if with_lse else 1
    weights = [g.double() for g in grads]
    if with_lse:  # rows that see nothing have no lse to differentiate
        weights[1] = weights[1].masked_fill(expected[1] == -math.inf, 0)
        grads = grads[0], grads[1].masked_fill(expected[1] == -math.inf, 0)
    loss = sum((w * e.masked_fill(e == -math.inf, 0)).sum()
               for w, e in zip(weights[:count], expected[:count], strict=True))  # fmt: skip
    wanted = torch.autograd.grad(loss, [*full, *case.learnt], retain_graph=True)

    rows, key_rows = balancer.positions(rank), keys.positions(rank)
    local = [t[:, :, at].requires_grad_() for t, at in ((q, rows), (k, key_rows), (v, key_rows))]
    options: dict[str, Any] = {
        "layout": balancer.layout,
        "kv_layout": keys.layout,
        "mask_mod": case.mask_mod,
        "score_mod": case.score_mod,
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": H != G,
        "method": method,
    }
    results = flex_all_gather_attention(*local, group=resolve(group), **options)
    check("out", results[0], expected[0][:, :, rows], dtype)
    check("lse", results[1], expected[1][:, :, rows], wide)
    given = [g[:, :, rows] for g in grads[:count]]
    found = torch.autograd.grad(results[:count], [*local, *case.learnt], given, retain_graph=True)
    for name, actual, exact, at in zip(
        "qkv", found, wanted, (rows, key_rows, key_rows), strict=False
    ):
        # A score's gradient has the sum over a row of the output, as it was rounded, and its own.
        times = 3 if name != "v" and dtype.itemsize == 2 else 1
        check(f"gradient of {name}", actual, exact[:, :, at], dtype, times)
    # One element has terms of all rows, which cancel: their roundings do not.
    times = max(1.0, (B * H * length) ** 0.5 / 4)
    for actual, exact in zip(found[3:], wanted[3:], strict=True):
        total = actual.clone()
        dist.all_reduce(total, group=group)
        check("gradient of a captured tensor", total, exact, dtype, times)


def plain(
    group: dist.ProcessGroup,
    cases: Callable[[], Iterator[tuple[str, Case]]],
    by: Method = ALLGATHER,
) -> None:
    """Runs each case with two balancers; balancers and options take turns."""
    turn = group.size()
    for name, case in cases():
        mask = case.block_mask()
        found = balancers(case.visible.shape[2], group.size(), mask)
        for balancer in (found[turn % len(found)], found[(turn + 2) % len(found)]):
            method = ("allgather", "alltoall")[turn % 2]
            shape = (case.visible.shape[0], 4, (4, 2, 1)[turn % 3], 8)
            set_rotate_method(method)
            try:
                compare(
                    group, case, balancer, mask, shape=shape, with_lse=turn % 5 == 1,
                    scale=(None, 0.3)[turn // 2 % 2], method=by,
                )  # fmt: skip
            except AssertionError as error:
                raise AssertionError(
                    f"{name}, {balancer}, {turn=}, {method}, {by}: {error}"
                ) from error
            finally:
                set_rotate_method("allgather")
            turn += 1


def masks() -> Iterator[tuple[str, Case]]:
    S = 303
    q, k = torch.arange(S)[:, None], torch.arange(S)[None]
    causal = (q >= k)[None, None]
    yield "no mask", Case(torch.ones(1, 1, S, S, dtype=torch.bool))
    yield "causal", Case(causal, lambda b, h, i, j: i >= j)
    yield "causal, blocks", Case(causal, lambda b, h, i, j: i >= j, 32)
    document = torch.bucketize(torch.arange(S), torch.tensor([50, 51, 200, 290]), right=True)
    same = (document[:, None] == document[None])[None, None]
    yield (
        "documents",
        Case(same & causal, lambda b, h, i, j: (document[i] == document[j]) & (i >= j), (64, 32)),
    )
    window = ((q - k).abs() <= 20)[None, None]
    yield "window", Case(window, lambda b, h, i, j: (i - j).abs() <= 20, 16)
    prefix = ((k < 130) | (q >= k))[None, None]
    yield "prefix", Case(prefix, lambda b, h, i, j: (j < 130) | (i >= j), 128)
    drawn = torch.rand(S, S) < 0.3
    drawn[7:200] = False  # rows that see nothing
    drawn[:, 100:250] = False
    yield "drawn", Case(drawn[None, None], lambda b, h, i, j: drawn[i, j], 64)
    yield "drawn, no blocks", Case(drawn[None, None], lambda b, h, i, j: drawn[i, j])
    lengths = torch.tensor([301, 77])
    by_batch = (k < lengths[:, None, None])[:, None].expand(2, 1, S, S)
    yield "by batch", Case(by_batch, lambda b, h, i, j: j < lengths[b], 32)
    yield "by batch, no blocks", Case(by_batch, lambda b, h, i, j: j < lengths[b])
    reach = torch.tensor([0, 3, 50, 1000])
    by_head = (q - k <= reach[:, None, None]) & (q >= k)
    yield (
        "by head",
        Case(by_head[None], lambda b, h, i, j: (i - j <= reach[h]) & (i >= j), (32, 64)),
    )
    cross = (q % 7 == torch.arange(90)[None] % 7)[None, None]
    yield "cross", Case(cross, lambda b, h, i, j: i % 7 == j % 7, 32, keys=90)
    stripes = ((k // 128) % 2 == 0)[None, None].expand(1, 1, S, S)
    yield "stripes", Case(stripes, lambda b, h, i, j: (j // 128) % 2 == 0, 128)
    nothing = torch.zeros(1, 1, S, S, dtype=torch.bool)
    yield "nothing", Case(nothing, lambda b, h, i, j: (i < 0) & (j < 0), 128)


def scores() -> Iterator[tuple[str, Case]]:
    S = 150
    q, k = torch.arange(S)[:, None], torch.arange(S)[None]
    everything, causal = torch.ones(1, 1, S, S, dtype=torch.bool), (q >= k)[None, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    distance = (k - q).double()

    def alibi(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + slopes[h] * (j - i)

    def alibi_written(s: torch.Tensor) -> torch.Tensor:
        return s + slopes[:, None, None] * distance

    yield "alibi", Case(causal, lambda b, h, i, j: i >= j, 32, alibi, alibi_written)
    yield (
        "soft cap",
        Case(everything, None, None, lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
             lambda s: 2 * torch.tanh(s / 2)),
    )  # fmt: skip
    yield (
        "mask in score_mod",
        Case(everything, None, None, lambda s, b, h, i, j: torch.where(i > j, s, -math.inf),
             lambda s: s.masked_fill(~(q > k), -math.inf)),
    )  # fmt: skip
    table = torch.randn(4, 2 * S, dtype=torch.float64, requires_grad=True)
    gain = torch.randn((), dtype=torch.float64, requires_grad=True)

    def biased(bias: torch.Tensor, s: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return gain * s + bias[h, i - j + S]

    def biased_written(bias: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return gain * s + bias[:, q - k + S]

    yield (
        "table",
        Case(causal, lambda b, h, i, j: i >= j, 32, functools.partial(biased, table),
             functools.partial(biased_written, table), (table, gain)),
    )  # fmt: skip
    computed = table.tanh()  # not a leaf: what it comes from is reached through it
    yield (
        "computed table",
        Case(causal, lambda b, h, i, j: i >= j, None, functools.partial(biased, computed),
             functools.partial(biased_written, computed), (table,)),
    )  # fmt: skip
    yield (
        "both tables",
        Case(everything, None, None,
             lambda s, b, h, i, j: s + table[h, i - j + S] * computed[h, j - i + S],
             lambda s: s + table[:, q - k + S] * computed[:, k - q + S], (table,)),
    )  # fmt: skip
    yield (
        "global",
        Case(everything, None, None, lambda s, b, h, i, j: s * _GAIN[h],
             lambda s: s * _GAIN[:, None, None], (_GAIN,)),
    )  # fmt: skip
    module = _Bias(S)
    yield (
        "module",
        Case(everything, None, None, module.modify, lambda s: s + module.bias[q - k],
             (module.bias,)),
    )  # fmt: skip


_GAIN = torch.tensor([1.0, 0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)


class _Bias(torch.nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(length, dtype=torch.float64))

    def modify(self, score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + self.bias[i - j]


@pytest.mark.parametrize("world_size", some(1, 2, of=[1, 2, 3, 4]))
def test_masks(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, plain, masks)


@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
@pytest.mark.exhaustive
def test_score_mods(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, plain, scores)


@pytest.mark.exhaustive
@pytest.mark.ranks(3)
def test_dtypes(group: dist.ProcessGroup) -> None:
    for (_, case), dtype in zip(
        list(masks())[2:6] + list(scores())[1:3],
        [torch.float32, torch.bfloat16, torch.float16] * 2,
        strict=True,
    ):
        mask = case.block_mask()
        balancer = HeadTail(case.visible.shape[2], group.size())
        for with_lse in (False, True):
            compare(group, case, balancer, mask, dtype=dtype, with_lse=with_lse)


@contextmanager
def recorded() -> Iterator[list[tuple[int, int, int]]]:
    """Records the numbers of queries, keys and elements of each evaluation of a mask."""
    calls: list[tuple[int, int, int]] = []
    original = flex_mask.evaluate

    def evaluate(
        mod: Any, B: int, H: int, q: torch.Tensor, k: torch.Tensor, *first: int
    ) -> torch.Tensor:
        visible = original(mod, B, H, q, k, *first)
        calls.append((len(q), len(k), visible.numel()))
        return visible

    flex_mask.evaluate = evaluate
    try:
        yield calls
    finally:
        flex_mask.evaluate = original


def test_runs_of_keys() -> None:
    some, every = torch.ones(700, dtype=torch.bool), torch.ones(700, dtype=torch.bool)
    every[130:300] = False
    some[384:512] = every[384:512] = False
    runs = list(flex_mask._runs(some, every))
    kinds = (flex_mask.FULL, flex_mask.PARTIAL, flex_mask.EMPTY, flex_mask.FULL)
    assert runs == list(zip((0, 128, 384, 512), (128, 384, 512, 700), kinds, strict=True))


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_evaluates_only_undecided_tiles(group: dist.ProcessGroup) -> None:
    W, S = group.size(), 2048 * group.size()
    balancer = Sequential(S, W)
    local = [torch.randn(1, 2, S // W, 8, requires_grad=True) for _ in range(3)]

    def count(mask_mod: Any, B: int, H: int, blocks: bool) -> list[tuple[int, int, int]]:
        mask = create_block_mask(mask_mod, B, H, S, S, device="cpu") if blocks else None
        with recorded() as calls:
            out, _ = flex_all_gather_attention(
                *local, group=resolve(group), layout=balancer.layout, mask_mod=mask_mod,
                block_mask=mask,
            )  # fmt: skip
            out.sum().backward()
        assert calls[0][:2] == (1, 1)  # finds out what the mask depends on
        assert all(elements <= flex_mask.AREA for _, _, elements in calls)
        return calls[1:]

    # Whole blocks of 128: the mask is not evaluated again.
    assert not count(lambda b, h, i, j: i // 2048 == j // 2048, 1, 1, True)
    assert not count(lambda b, h, i, j: (i // 512 + j // 128) % 2 == 0, 1, 1, True)
    # A causal mask is evaluated on the diagonal only: eight squares, forward and backward.
    causal = count(lambda b, h, i, j: i >= j, 1, 1, True)
    assert causal == [(256, 256, 256 * 256)] * 16
    # Without blocks, all elements once; then only parts that are neither empty nor full.
    unknown = count(lambda b, h, i, j: i >= j, 1, 1, False)
    assert sum(elements for _, _, elements in unknown) == 2048 * S + 8 * 256 * 256
    assert max(count(lambda b, h, i, j: i + h >= j, 1, 2, False))[2] == flex_mask.AREA


@pytest.mark.ranks(2)
def test_hand_made_blocks(group: dist.ProcessGroup) -> None:
    S, size = 96, 16
    states = torch.randint(0, 3, (1, 1, S // size, S // size))
    order = [torch.argsort((states == kind).int(), dim=-1, descending=True, stable=True).int()
             for kind in (1, 2)]  # fmt: skip
    counts = [(states == kind).sum(-1).int() for kind in (1, 2)]
    wide = states.repeat_interleave(size, 2).repeat_interleave(size, 3)
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    for mask_mod, visible in (
        (None, wide > 0),
        (lambda b, h, i, j: i >= j, (wide == 2) | ((wide == 1) & causal)),
    ):
        mask = BlockMask.from_kv_blocks(
            counts[0], order[0], counts[1], order[1], BLOCK_SIZE=size, mask_mod=mask_mod
        )
        case = Case(visible, mask.mask_mod)
        for balancer in balancers(S, group.size(), mask):
            compare(group, case, balancer, mask)


@pytest.mark.ranks(2)
def test_some_of_the_heads(group: dist.ProcessGroup) -> None:
    """The last heads alone give their part of the attention and gradients of all heads."""
    first, length = 2, 8 * group.size()
    at = torch.tensor(list(HeadTail(length, group.size()).layout.positions(group.rank())))
    generator = torch.Generator().manual_seed(group.size())
    q, k, v, grad = torch.randn(4, 1, 4, length, 8, generator=generator).unbind()
    modifiers = [
        {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + h},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score * (h + 1)},
        {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)},
    ]

    def results(heads: slice, **given: Any) -> list[torch.Tensor]:
        inputs = [t[:, heads, at].contiguous().requires_grad_() for t in (q, k, v)]
        layout = HeadTail(length, group.size()).layout
        out, lse = flex_all_gather_attention(*inputs, group=resolve(group), layout=layout, **given)
        return [out, lse, *torch.autograd.grad(out, inputs, grad[:, heads, at])]

    for given in modifiers:
        parts = results(slice(first, None), head_offset=first, **given)
        for part, whole in zip(parts, results(slice(None), **given), strict=True):
            torch.testing.assert_close(part, whole[:, first:])


def repeats(group: dist.ProcessGroup) -> None:
    S, rank = 600, group.rank()
    balancer = HeadTail(S, group.size())
    table = torch.randn(7, requires_grad=True)  # many threads add to few numbers
    local = [torch.randn(1, 4, balancer.lengths[rank], 16, requires_grad=True) for _ in range(3)]
    for score_mod in (None, lambda s, b, h, i, j: s + table[(i - j) % 7]):
        inputs = local if score_mod is None else [*local, table]
        runs = []
        for _ in range(3):
            out, lse = flex_all_gather_attention(
                *local, group=resolve(group), layout=balancer.layout, score_mod=score_mod,
                mask_mod=lambda b, h, i, j: i >= j,
            )  # fmt: skip
            runs.append([out, lse, *torch.autograd.grad(out.square().sum(), inputs)])
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.ranks(2)
def test_same_bits_every_time(group: dist.ProcessGroup) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        repeats(group)
    finally:
        torch.set_num_threads(threads)


def nothing(group: dist.ProcessGroup) -> None:
    layout = Sequential(0, group.size()).layout
    for shape in ((2, 2, 0, 8), (0, 2, 0, 8)):
        local = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        out, lse = flex_all_gather_attention(
            *local, group=resolve(group), layout=layout, mask_mod=lambda b, h, i, j: i >= j,
            score_mod=lambda s, b, h, i, j: s * 2,
        )  # fmt: skip
        out.sum().backward()
        assert (out.shape, lse.shape) == (shape, shape[:3])
        assert all(t.grad is not None and t.grad.shape == shape for t in local)
    layout = Sequential(8 * group.size(), group.size()).layout
    local = [torch.randn(0, 2, 8, 4, requires_grad=True) for _ in range(3)]
    out, _ = flex_all_gather_attention(*local, group=resolve(group), layout=layout)
    out.sum().backward()
    assert out.shape == local[0].shape


def test_no_rows_and_no_batch(ranks: Ranks) -> None:
    ranks.run(2, nothing)


@pytest.mark.ranks(2)
def test_errors(group: dist.ProcessGroup) -> None:
    W, state = group.size(), resolve(group)
    layout = Sequential(8 * W, W).layout
    t = torch.randn(1, 2, 8, 4)
    options: dict[str, Any] = {"group": state, "layout": layout}
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 3, 8 * W, 8 * W, "cpu", 4)
    other = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 8 * W, 4, "cpu", 4)
    for args, more, kind, text in [
        ((t, *(torch.randn(1, 2, 8, 5),) * 2), {}, ValueError, "features"),
        ((t, t, t), {"layout": Sequential(8, W + 1).layout}, ValueError, "ranks"),
        ((t, t, t), {"layout": Sequential(9 * W, W).layout}, ValueError, "query has 8"),
        ((t, t, t), {"kv_layout": Sequential(9 * W, W).layout}, ValueError, "key has 8"),
        ((t, t, t), {"block_mask": mask}, ValueError, "batch and heads"),
        ((t, t, t), {"block_mask": other}, ValueError, "whole sequence"),
        ((t, t, t), {"mask_mod": lambda b, h, i, j: i - j}, TypeError, "bool"),
        ((t, t[:, :1], t[:, :1]), {}, ValueError, "enable_gqa"),
    ]:
        with pytest.raises(kind, match=text):
            flex_all_gather_attention(*args, **{**options, **more})
    out, lse = flex_all_gather_attention(t, t, t, **options)  # the group is as good as before
    assert out.shape == t.shape
    assert lse.shape == t.shape[:3]


def negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-x)


def not_yet_here(x: torch.Tensor) -> torch.Tensor:
    """The values as the result of a functional collective that has not been waited for."""
    return AsyncCollectiveTensor(x.clone())


@pytest.mark.ranks(2)
def test_values_that_are_elsewhere(group: dist.ProcessGroup) -> None:
    """Tensors whose values are not in their memory; other ops leave these to the dispatcher."""
    state, layout = resolve(group), Sequential(8 * group.size(), group.size()).layout
    options: dict[str, Any] = {"group": state, "layout": layout}
    plain = torch.randn(3, 1, 2, 8, 4)
    for mods in ({"mask_mod": lambda b, h, i, j: i >= j}, {"score_mod": lambda s, *at: s * 2}):
        for place in range(3):
            for make in (negated, not_yet_here):
                given = [make(x) if i == place else x for i, x in enumerate(plain)]
                found = flex_all_gather_attention(*given, **options, **mods)
                wanted = flex_all_gather_attention(*plain, **options, **mods)
                assert all(map(torch.equal, found, wanted)), (mods, place, make)
        leaves = [x.clone().requires_grad_() for x in plain]
        out, _ = flex_all_gather_attention(*leaves, **options, **mods)
        grads = [
            torch.autograd.grad(out, leaves, make(torch.ones_like(out)), retain_graph=True)
            for make in (torch.clone, negated)
        ]
        assert all(map(torch.equal, *grads)), mods
    freed = plain[0].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"key .* needs 256 bytes of storage, which has 0"):
        flex_all_gather_attention(plain[0], freed, plain[2], **options)
    with pytest.raises(NotImplementedError, match=r"value is .*to_dense\(\)"):
        flex_all_gather_attention(plain[0], plain[1], plain[2].to_sparse(), **options)
