"""Calls of ops on small tensors, each with the unsharded op that its result is compared with.

Matrices hold small integers, so products are exact and are compared by all bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp

#: A call, and a function that computes the expected result from values known to all ranks.
Case = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]

#: Those of which graphs are captured.
CAPTURED = ("gather", "scatter", "all-reduce", "keys", "attention", "ulysses", "gradient")
#: Those whose results are pending.
BACKGROUND = ("background gather", "background scatter")
_INEXACT = ("attention", "ulysses", "gradient")

wait = torch.ops._c10d_functional.wait_tensor


def zeros(world_size: int, rows: int = 3, tokens: int = 8) -> dict[str, torch.Tensor]:
    """Room for the inputs of all ranks."""
    W = world_size
    return {
        "weight": torch.zeros(8, 5), "rows": torch.zeros(W, rows, 8),
        "full": torch.zeros(W, rows * W, 8), "heads": torch.zeros(W, 3, 1, 2 * W, tokens, 16),
    }  # fmt: skip


def refill(
    values: dict[str, torch.Tensor], generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Draws new inputs, the same on all ranks."""
    for name, value in values.items():
        if name == "heads":
            value.copy_(torch.randn(value.shape, generator=generator))
        else:
            value.copy_(torch.randint(-8, 9, value.shape, generator=generator))
    return values


def check(name: str, case: Case, out: torch.Tensor) -> None:
    """Compares the result of a call, when it is there, with the unsharded op."""
    tolerance = 1e-4 if name in _INEXACT else 0.0
    torch.testing.assert_close(wait(out), case[1](), rtol=tolerance, atol=tolerance)


def cases(group: dist.ProcessGroup, values: dict[str, torch.Tensor]) -> dict[str, Case]:
    """Returns cases by op name; the ops' inputs are this rank's parts of `values`."""
    return _matmuls(group, values) | _attention(group, values["heads"])


def _matmuls(group: dist.ProcessGroup, values: dict[str, torch.Tensor]) -> dict[str, Case]:
    W, rank, name = group.size(), group.rank(), group.group_name
    weight, rows, full = values["weight"], values["rows"], values["full"]
    ops = torch.ops.symm_mem

    def begun(op: Callable[..., torch.Tensor], x: torch.Tensor, *options: str) -> torch.Tensor:
        given = x.clone()
        pending = op(given, *options, name)
        given.fill_(torch.nan)  # the input may be overwritten at once
        return pending

    return {
        "gather": (
            lambda: symm_cp.all_gather_matmul(rows[rank], weight, gather_dim=0, group=group),
            lambda: rows.flatten(0, 1) @ weight,
        ),
        "scatter": (
            lambda: symm_cp.matmul_reduce_scatter(full[rank], weight, scatter_dim=0, group=group),
            lambda: (full.sum(0) @ weight).chunk(W)[rank],
        ),
        "all-reduce": (
            lambda: symm_cp.matmul_all_reduce(full[rank], weight, group=group),
            lambda: full.sum(0) @ weight,
        ),
        "keys": (
            lambda: torch.cat(
                symm_cp.all_gather_kv(rows[rank], -rows[rank], seq_dim=0, group=group)
            ),
            lambda: torch.cat([rows, -rows]).flatten(0, 1),
        ),
        "background gather": (
            lambda: begun(ops._low_contention_all_gather, rows[rank]),
            lambda: rows.flatten(0, 1),
        ),
        "background scatter": (
            lambda: begun(ops._low_contention_reduce_scatter, full[rank], "sum"),
            lambda: full.sum(0).chunk(W)[rank],
        ),
    }


def _attention(group: dist.ProcessGroup, heads: torch.Tensor) -> dict[str, Case]:
    W, rank = group.size(), group.rank()

    def dense(which: int) -> torch.Tensor:
        return torch.cat(list(heads[:, which]), 2)

    def attend(method: str) -> torch.Tensor:
        q, k, v = heads[rank]
        out = symm_cp.all_gather_attention(q, k, v, group=group, method=method)
        assert isinstance(out, torch.Tensor)
        return out

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(heads[rank, 0], dense(1), dense(2))

    def gradient() -> torch.Tensor:
        q, k, v = (t.detach().requires_grad_() for t in heads[rank])
        out = symm_cp.all_gather_attention(q, k, v, group=group)
        assert isinstance(out, torch.Tensor)
        (found,) = torch.autograd.grad(out.sum(), [k])
        return found

    def dense_gradient() -> torch.Tensor:
        k = heads[rank, 1].detach().requires_grad_()
        keys = torch.cat([k if r == rank else heads[r, 1] for r in range(W)], 2)
        out = F.scaled_dot_product_attention(dense(0), keys, dense(2))
        (found,) = torch.autograd.grad(out.sum(), [k])
        return found

    return {
        "attention": (lambda: attend("allgather"), attention),
        "ulysses": (lambda: attend("ulysses"), attention),
        "gradient": (gradient, dense_gradient),
    }
