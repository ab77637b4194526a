"""`fused_all_gather_attention`: every mask and layout, forward and backward, against dense."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_cp import set_rotate_method, tuning
from symm_cp.cuda import has_streams
from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests import device
from tests.attention_reference import Problem, check
from tests.exhaustive import some

pytestmark = device.devices(*device.NAMES)

OP = torch.ops.symm_mem.fused_all_gather_attention
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    layout: SequenceLayout
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    features: int = 32
    dtype: torch.dtype = torch.float32
    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None
    queries: int | None = None  # per rank, if they are not of the keys' sequence
    scale: float | None = None
    with_lse: bool = False
    rotate: str = "allgather"
    strided: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def visible(self, queries: int) -> torch.Tensor:
        offset = torch.arange(self.layout.length) - torch.arange(queries).unsqueeze(1)
        mask = torch.ones_like(offset, dtype=torch.bool)
        if self.causal:
            mask &= offset <= 0
        if self.left is not None:
            mask &= offset >= -self.left
        if self.right is not None:
            mask &= offset <= self.right
        if self.documents is not None:
            edges = torch.tensor(self.documents)
            number = torch.bucketize(torch.arange(self.layout.length), edges, right=True)
            mask &= number.unsqueeze(1) == number
        return mask

    def arguments(self) -> dict[str, Any]:
        edges: dict[str, Any] = {}
        if self.documents is not None:
            as_ints = len(self.documents) % 2 == 0
            edges = {"document_edges": list(self.documents)}
            edges = edges if as_ints else {"cu_seqlens": torch.tensor(self.documents)}
        return {
            "is_causal": self.causal,
            "scale": self.scale,
            "enable_gqa": self.heads != self.kv_heads,
            "chunk_order": list(self.layout.chunk_order),
            "chunk_lengths": list(self.layout.chunk_lengths),
            **edges,
            "window_left": self.left,
            "window_right": self.right,
            **self.options,
        }


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another memory layout."""
    if how == "rows first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "features apart":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    return tensor.clone()


def results_of(
    call: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    inputs: list[torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The results of a call, and the gradients of query, key and value."""
    out, lse = call()
    outputs, grads = [out], [grad_out]
    if grad_lse is not None:
        outputs.append(lse)
        grads.append(grad_lse.to(lse.dtype))
    found = torch.autograd.grad(outputs, inputs, grads)
    return dict(zip(("out", "lse", "q", "k", "v"), (out, lse, *found), strict=True))


def run(group: dist.ProcessGroup, case: Case, seed: int) -> None:
    generator = torch.Generator(device.name()).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    W, rank, length = group.size(), group.rank(), case.layout.length
    queries = length if case.queries is None else case.queries * W
    q = draw(case.batch, case.heads, queries, case.features)
    k, v = (draw(case.batch, case.kv_heads, length, case.features) for _ in range(2))
    grad_out = draw(*q.shape)
    grad_lse = draw(*q.shape[:3]) if case.with_lse else None
    q, k, v, grad_out = (t.to(case.dtype).double() for t in (q, k, v, grad_out))
    problem = Problem(q, k, v, case.visible(queries), grad_out, grad_lse, case.scale)
    exact, dense = problem.solve(torch.float64), problem.solve(case.dtype)

    keys = torch.tensor(list(case.layout.positions(rank)), dtype=torch.int64)
    rows = keys if case.queries is None else torch.arange(queries).chunk(W)[rank]
    inputs = [
        strided(t[:, :, at].to(case.dtype), case.strided).requires_grad_()
        for t, at in ((q, rows), (k, keys), (v, keys))
    ]
    sent = grad_out[:, :, rows].to(case.dtype)
    sent_lse = None if grad_lse is None else grad_lse[:, :, rows]
    call = partial(OP, *inputs, group.group_name, **case.arguments())
    set_rotate_method(case.rotate)
    try:
        results = results_of(call, inputs, sent, sent_lse)
        # Few tokens are gathered at once on CPU.
        for algorithm in ("pipeline", "together")[: 2 if has_streams(inputs[0].device) else 1]:
            with tuning.forced(algorithm):
                forced = results_of(call, inputs, sent, sent_lse)
            results |= {f"{algorithm} {name}": result for name, result in forced.items()}
    finally:
        set_rotate_method("allgather")
    assert results["lse"].dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    sizes = problem.terms()
    for which, result in results.items():
        name = which.rpartition(" ")[2]
        at = rows if name in ("out", "lse", "q") else keys
        # The log-sum-exp is computed from float32 products even if inputs have 16 bits.
        dtype = result.dtype
        size = sizes.get(name, 1.0)
        check(f"{which} of {case}", result, exact[name], dense[name], at, dtype, size=size)


def run_all(group: dist.ProcessGroup, cases: list[Case], seed: int) -> None:
    for number, case in enumerate(cases):
        run(group, case, seed + number)


def masks(layout: SequenceLayout) -> list[dict[str, Any]]:
    length = layout.length
    documents = tuple(sorted({0, length // 3, length // 2, length}))
    return [
        {},
        {"causal": True},
        {"causal": True, "documents": documents},
        {"documents": documents},
        {"left": 5, "right": 2},
        {"left": 0, "causal": True},
        {"right": 3},
        {"left": 7, "documents": documents},
    ]


def layouts(world_size: int) -> list[SequenceLayout]:
    """Even, uneven and unusual layouts."""
    order = list(range(3 * world_size))
    random.Random(world_size).shuffle(order)
    lengths = [(5, 0, 9)[i % 3] for i in range(3 * world_size)]
    lonely = SequenceLayout(world_size, tuple(range(world_size)), (0,) * (world_size - 1) + (17,))
    return [
        sequential(8 * world_size, world_size),
        head_tail(12 * world_size, world_size),
        head_tail(12 * world_size + 5, world_size),
        SequenceLayout(world_size, tuple(order), tuple(lengths)),
        lonely,  # ranks without queries and keys
    ]


@WORLD_SIZES
def test_masks_and_layouts(ranks: Ranks, world_size: int) -> None:
    cases = [
        Case(layout, dtype=torch.float64, rotate=rotate, with_lse=number % 2 == 1, **mask)
        for number, layout in enumerate(layouts(world_size))
        for mask in masks(layout)
        for rotate in ("allgather", "alltoall")
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(*list(enumerate(DTYPES, 1))[1:3], of=itertools.product([1, 2, 3, 4], DTYPES)),
    ids=str,
)
def test_dtypes_heads_and_features(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    layout = head_tail(64 * world_size, world_size)
    cases = [
        Case(layout, batch, heads, kv_heads, features, dtype, causal, scale=scale, with_lse=lse)
        for batch, heads, kv_heads, features, causal, scale, lse in (
            (1, 2, 2, 64, False, None, False),
            (3, 4, 2, 32, True, None, False),
            (2, 6, 1, 128, True, 0.2, False),
            (1, 3, 3, 17, False, None, True),
            (2, 2, 2, 1, True, None, False),
        )
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@WORLD_SIZES
def test_other_lengths_strides_and_empty_inputs(ranks: Ranks, world_size: int) -> None:
    layout = sequential(12 * world_size, world_size)
    uneven = SequenceLayout(world_size, tuple(range(world_size)), tuple(range(1, world_size + 1)))
    cases = [
        Case(layout, queries=5, dtype=torch.float64),
        Case(uneven, queries=7, heads=4, dtype=torch.float64),
        Case(sequential(0, world_size), queries=3, dtype=torch.float64),  # nothing is seen
        Case(sequential(0, world_size)),
        Case(layout, batch=0),
        Case(layout, causal=True, strided="rows first"),
        Case(layout, causal=True, strided="features apart", with_lse=True),
        Case(layout, dtype=torch.bfloat16, strided="rows first"),
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_long_enough_for_many_blocks(ranks: Ranks, world_size: int) -> None:
    layout = head_tail(280 * world_size + 1, world_size)
    edges = (0, 100, 270, layout.length)
    cases = [
        Case(layout, causal=True, features=16),
        Case(layout, left=270, right=0, features=16),
        Case(layout, left=40, right=300, features=16, rotate="alltoall"),
        Case(layout, causal=True, documents=edges, features=16, dtype=torch.bfloat16),
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout(ranks: Ranks, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    chunks = world_size * data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(0, 11), min_size=chunks, max_size=chunks))
    layout = SequenceLayout(
        world_size, tuple(data.draw(st.permutations(range(chunks)))), tuple(lengths)
    )
    kv_heads = data.draw(st.integers(1, 2))
    case = Case(
        layout,
        batch=data.draw(st.integers(1, 2)),
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        features=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        causal=data.draw(st.booleans()),
        left=data.draw(st.none() | st.integers(0, 9)),
        rotate=data.draw(st.sampled_from(["allgather", "alltoall"])),
        with_lse=data.draw(st.booleans()),
    )
    ranks.run(world_size, run, case, data.draw(st.integers(0, 1 << 20)))


def bits(group: dist.ProcessGroup, seed: int) -> None:
    # On CUDA torch's kernels add up gradients in the order in which blocks end, unless told not to.
    torch.use_deterministic_algorithms(device.name() == "cuda")
    try:
        repeat_bits(group, seed)
    finally:
        torch.use_deterministic_algorithms(False)


def repeat_bits(group: dist.ProcessGroup, seed: int) -> None:
    W = group.size()
    generator = torch.Generator(device.name()).manual_seed(seed + group.rank())
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = (
            torch.randn(2, 4, 96, 32, generator=generator).to(dtype).requires_grad_()
            for _ in range(4)
        )
        for rotate in ("allgather", "alltoall"):
            set_rotate_method(rotate)
            runs = []
            for _ in range(3):
                order = list(head_tail(96 * W, W).chunk_order)
                out, lse = OP(q, k, v, group.group_name, is_causal=True, chunk_order=order)
                runs.append([out, lse, *torch.autograd.grad(out, (q, k, v), grad)])
            for again in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))
    set_rotate_method("allgather")


@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
def test_results_are_bitwise_the_same_from_run_to_run(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, bits, int(torch.randint(1 << 30, ())))


def error_in_bfloat16(group: dist.ProcessGroup, length: int, seed: int) -> list[float]:
    generator = torch.Generator(device.name()).manual_seed(seed)
    whole = [torch.randn(1, 2, length, 32, generator=generator).bfloat16() for _ in range(4)]
    exact = Problem(*(t.double() for t in whole[:3]), torch.ones(length, length, dtype=torch.bool),
                    whole[3].double()).solve(torch.float64)  # fmt: skip
    q, k, v, grad = (t.chunk(group.size(), 2)[group.rank()] for t in whole)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = OP(*leaves, group.group_name)
    found = torch.autograd.grad(out, leaves, grad)
    return [
        float((got.double() - exact[name].chunk(group.size(), 2)[group.rank()]).square().sum())
        for name, got in zip("qkv", found, strict=True)
    ]


def test_errors_in_16_bits_do_not_grow_with_the_number_of_ranks(ranks: Ranks) -> None:
    seed = int(torch.randint(1 << 30, ()))
    errors = {}
    for world_size in (1, 2, 4):
        found = ranks.run(world_size, error_in_bfloat16, 512, seed)
        errors[world_size] = [sum(parts) ** 0.5 for parts in zip(*found, strict=True)]
    # More parts are rounded, but each part is smaller: the mean error stays the same.
    for world_size in (2, 4):
        for alone, spread in zip(errors[1], errors[world_size], strict=True):
            assert spread <= 1.3 * alone, errors


def keys_and_values_in_one_tensor(group: dist.ProcessGroup) -> None:
    query, behind, before = (torch.randn(1, 2, 5, 8) for _ in range(3))
    both = torch.stack((before, behind))
    call = partial(OP, query, group_name=group.group_name, is_causal=True)
    for of_key, of_value in ((0, 1), (1, 0), (0, 0)):
        apart = call(both[of_key].clone(), both[of_value].clone())
        assert all(map(torch.equal, call(both[of_key], both[of_value]), apart))
        rows = both.transpose(2, 3).contiguous().transpose(2, 3)  # keys are not contiguous
        assert all(map(torch.equal, call(rows[of_key], both[of_value]), apart))


@WORLD_SIZES
def test_keys_and_values_lie_anywhere(ranks: Ranks, world_size: int) -> None:
    """Keys and values travel from where they lie, in one exchange."""
    ranks.run(world_size, keys_and_values_in_one_tensor)
