"""Bad input of attention: refused on every rank before anything is sent; the next call works."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import set_rotate_method, tuning
from symm_cp.ops.attention import kernels as attention_kernels
from symm_cp.schedule import head_tail_order
from tests.ops.refusals import check_refusals

OP = torch.ops.symm_mem.fused_all_gather_attention


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


Q = (1, 4, 8, 16)
SHORT = (1, 4, 6, 16)

# query, key, value, options, error, message
CASES: list[tuple[Any, Any, Any, dict[str, Any], type[Exception], str]] = [
    (x(*Q), x(*SHORT), x(*SHORT), {"is_causal": True}, ValueError, "8 rows and key 6"),
    (x(*Q), x(*SHORT), x(*SHORT), {"window_left": 2}, ValueError, "8 rows and key 6"),
    (x(*Q), x(*SHORT), x(*SHORT), {"cu_seqlens": torch.tensor([0, 12])}, ValueError, "8 rows"),
    (x(*Q), x(1, 2, 8, 16), x(1, 2, 8, 16), {}, ValueError, "4 heads and key 2: .*enable_gqa"),
    (x(*Q), x(1, 3, 8, 16), x(1, 3, 8, 16), {"enable_gqa": True}, ValueError, "3 key heads"),
    (x(*Q), x(1, 0, 8, 16), x(1, 0, 8, 16), {"enable_gqa": True}, ValueError, "0 key heads"),
    (x(*Q), x(*Q), x(*SHORT), {}, ValueError, r"key \[1, 4, 8, 16\] and value \[1, 4, 6, 16\]"),
    (x(*Q), x(1, 4, 8, 8), x(1, 4, 8, 8), {}, ValueError, "must have batch 1 and 16 features"),
    (x(*Q), x(2, 4, 8, 16), x(2, 4, 8, 16), {}, ValueError, "must have batch 1 and 16 features"),
    (x(4, 8, 16), x(*Q), x(*Q), {}, ValueError, r"query must be .*\[4, 8, 16\]"),
    (x(*Q), x(*Q, dtype=torch.float64), x(*Q), {}, TypeError, "key is torch.float64 and query"),
    (*(x(*Q, dtype=torch.int32),) * 3, {}, TypeError, "query is torch.int32"),
    (*(x(*Q),) * 3, {"window_left": -1}, ValueError, "window_left=-1"),
    (*(x(*Q),) * 3, {"window_right": -2}, ValueError, "window_right=-2"),
    (*(x(*Q),) * 3, {"chunk_order": [0, 0]}, ValueError, r"chunk_order=\[0, 0\] must be a perm"),
    (
        *(x(*Q),) * 3,
        {"chunk_order": [0, 1, 2]},
        ValueError,
        "3 chunks, must have a positive multiple",
    ),
    (*(x(*Q),) * 3, {"chunk_order": [*range(6)]}, ValueError, "split into its 3 chunks"),
    (
        *(x(*Q),) * 3,
        {"chunk_lengths": [8, 8, 8]},
        ValueError,
        "3 chunks, must have a positive multiple",
    ),
    (*(x(*Q),) * 3, {"chunk_lengths": [7, 7]}, ValueError, "7 keys, key has 8"),
    (*(x(*Q),) * 3, {"chunk_lengths": [9, -1]}, ValueError, "must not be negative"),
    (*(x(*Q),) * 3, {"chunk_order": [0, 1], "chunk_lengths": [8]}, ValueError, "1 entries for 2"),
    (*(x(*Q),) * 3, {"cu_seqlens": torch.tensor([0, 9, 5, 16])}, ValueError, "must ascend from 0"),
    (*(x(*Q),) * 3, {"cu_seqlens": torch.tensor([0, 9])}, ValueError, "to 16, the length"),
    (*(x(*Q),) * 3, {"document_edges": [0, 9]}, ValueError, "to 16, the length"),
    (
        *(x(*Q),) * 3,
        {"cu_seqlens": torch.tensor([0, 16]), "document_edges": [0, 16]},
        ValueError,
        "pass only one",
    ),
    (*(x(*Q),) * 3, {"cu_seqlens": torch.tensor([1, 16])}, ValueError, "must ascend from 0"),
    (*(x(*Q),) * 3, {"cu_seqlens": torch.tensor([0.0, 16])}, ValueError, "int32 or int64"),
    (
        *(x(*Q),) * 3,
        {"cu_seqlens": torch.tensor([[0, 16]])},
        ValueError,
        r"is torch.int64 \[1, 2\]",
    ),
]
SEED = torch.tensor([3])
CROSS = (x(*Q), x(*SHORT), x(*SHORT))
# options, error, message; for queries, keys and values of shape Q
OPTION_CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"softcap": wrong}, ValueError, f"softcap={wrong} must be positive and finite")
        for wrong in (0.0, -1.0, float("inf"), float("nan"))
    ),
    ({"sinks": x(3)}, ValueError, r"sinks has shape \[3\], must be \[4\]"),
    ({"sinks": x(4, 1)}, ValueError, r"sinks has shape \[4, 1\], must be \[4\]"),
    ({"sinks": x(4, dtype=torch.int32)}, TypeError, "sinks is torch.int32"),
    ({"sinks": x(4).to("meta")}, ValueError, "sinks is on meta and query on cpu"),
    ({"bias": x(4)}, ValueError, r"bias has shape \[4\], must be \[4, S_q \+ S_k - 1\]"),
    ({"bias": x(3, 31)}, ValueError, r"bias has shape \[3, 31\], must be \[4, "),
    ({"bias": x(4, 32)}, ValueError, r"bias has shape \[4, 32\], must be \[4, 31\].* 16 queries"),
    ({"bias": x(4, 31, dtype=torch.bool)}, TypeError, "bias is torch.bool"),
    *(
        ({"dropout_p": wrong, "dropout_seed": SEED}, ValueError, f"dropout_p={wrong} must be at")
        for wrong in (-0.1, 1.0, 2.0, float("nan"))
    ),
    ({"dropout_p": 0.1}, ValueError, "dropout_p=0.1 requires dropout_seed, an int64 tensor of one"),
    ({"dropout_seed": SEED.int()}, ValueError, "dropout_seed is torch.int32"),
    ({"dropout_seed": SEED.expand(2)}, ValueError, r"dropout_seed is torch.int64 \[2\]"),
    ({"dropout_seed": SEED.to("meta")}, ValueError, "on meta, must be an int64 tensor"),
    ({"document_ids": x(1, 8, dtype=torch.int64)}, ValueError, r"must be \[1 or 1, 16\]"),
    ({"key_mask": x(1, 16)}, TypeError, "key_mask is torch.float32, must be bool"),
    ({"query_chunk_order": [0, 0]}, ValueError, r"query_chunk_order=\[0, 0\] must be a perm"),
    ({"query_chunk_lengths": [7, 7]}, ValueError, "7 queries, query has 8"),
    ({"query_chunk_order": [*range(6)]}, ValueError, "8 queries .* pass query_chunk_lengths"),
]
CASES += [(*(x(*Q),) * 3, *case) for case in OPTION_CASES]
CASES += [
    (*CROSS, {"bias": x(4, 27)}, ValueError, "8 rows and key 6: bias requires equal lengths, or q"),
    (*CROSS, {"dropout_p": 0.5, "dropout_seed": SEED}, ValueError, "dropout_p requires equal"),
    (
        *CROSS,
        {"query_chunk_lengths": [8, 8], "document_edges": [0, 12]},
        ValueError,
        "16 queries and 12 keys in the whole sequences: document_edges require",
    ),
]


@pytest.mark.ranks(2)
def test_bad_arguments_are_refused_on_every_rank(group: dist.ProcessGroup) -> None:
    good = [torch.randn(Q) for _ in range(3)]

    def attend(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return OP(*tensors or good, group.group_name, **options)[0]

    wrong = [
        (error, message, partial(attend, *tensors, **options))
        for *tensors, options, error, message in CASES
    ]
    # Peers hear nothing of tensors on meta, whose calls have no ranks.
    of_meta = [case for case in wrong if "meta" in case[1]]
    told = [case for case in wrong if case not in of_meta]
    check_refusals(group, attend, told, "fused_all_gather_attention")
    for error, message, call in of_meta:
        with pytest.raises(error, match=f"fused_all_gather_attention: .*{message}"):
            call()
    assert torch.equal(attend(), OP(*good, group.group_name)[0])
    with pytest.raises(ValueError, match="no process group named 'nobody'"):
        OP(*good, "nobody")
    with pytest.raises(ValueError, match="'ring' must be one of"):
        set_rotate_method("ring")


@pytest.mark.parametrize(
    "options",
    [
        [{}, {"is_causal": True}],
        [{"chunk_order": list(head_tail_order(3))}, {}],
        [{"window_left": 3}, {"window_left": 4}],
        [{}, {"shorter": 2}],
        [{}, {"softcap": 2.0}],
        [{"sinks": torch.zeros(2)}, {}],
        [{}, {}, {"bias": torch.zeros(2, 47)}],
        [{"dropout_p": 0.5, "dropout_seed": SEED}, {"dropout_p": 0.4, "dropout_seed": SEED}],
        [{"narrow": 2}, {}],
    ],
)
@pytest.mark.ranks(3)
def test_ranks_that_disagree_all_raise(
    group: dist.ProcessGroup, options: list[dict[str, Any]]
) -> None:
    length = 8
    q = torch.randn(1, 2, length, 8)
    mine = options[group.rank() % len(options)]
    shorter, narrow = mine.pop("shorter", 0), mine.pop("narrow", 0)
    value = q[:, :, shorter:, narrow:]
    with pytest.raises(RuntimeError, match="fused_all_gather_attention"):
        OP(q, q[:, :, shorter:], value, group.group_name, **mine)
    # The next call has a workspace of its own.
    dist.barrier(group)
    out, _ = OP(q, q, q, group.group_name)
    assert out.isfinite().all()


@pytest.mark.ranks(3)
def test_a_failing_kernel_is_an_error_on_all_ranks(group: dist.ProcessGroup) -> None:
    """A kernel that fails on one rank is an error on all."""
    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    out, _ = OP(q, q, q, group.group_name)
    kernel = attention_kernels.backward

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory for this kernel")

    if group.rank() == 1:
        attention_kernels.backward = broken
    try:
        with (
            tuning.forced("pipeline"),
            pytest.raises((MemoryError, RuntimeError), match="no memory for this kernel"),
        ):
            out.sum().backward(retain_graph=True)
    finally:
        attention_kernels.backward = kernel
    dist.barrier(group)
    out.sum().backward()
    assert q.grad is not None


@pytest.mark.ranks(3)
def test_a_failing_native_kernel_is_an_error_on_all_ranks(group: dist.ProcessGroup) -> None:
    """One rank fails between the exchanges of keys and of gradients, which peers have begun."""
    q = torch.randn(1, 2, 8, 8)
    out, lse = OP(q, q, q, group.group_name)
    backward = torch.ops.symm_mem.fused_all_gather_attention_backward
    wrong = lse[..., :4] if group.rank() == 1 else lse
    begin = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match=r"lse must be|size"):
        backward(q, q, q, q, out, wrong, group.group_name, grad_logsumexp=lse)
    assert time.monotonic() - begin < 5
    dist.barrier(group)
    grads = backward(q, q, q, q, out, lse, group.group_name, grad_logsumexp=lse)
    assert all(grad.isfinite().all() for grad in grads[:3])
