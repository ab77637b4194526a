"""Each op's variants, described once: its limit, its unfused and its fused form, on CPU.

`limit` is the compute alone, on input that is already local; for collectives, a copy of the
result's bytes. `unfused (BACKEND)` runs collectives of torch.distributed before or after torch's
kernels; without gradients, into buffers that are kept. `fused` is the op, `fused, in place` the op
on input in symmetric memory, which peers read where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp
from symm_cp.commands.harness.measure import FUSED, IN_PLACE, LIMIT, Case, unfused_over
from symm_cp.parsing import size_text
from symm_cp.tensors.dtypes import dtype_name

#: What a case times: the forward pass, the backward pass alone, or both.
FORWARD, BACKWARD, BOTH = "", ", backward", ", both passes"

Call: TypeAlias = Callable[[], Any]

#: Renamed in torch 2.13, where the old names warn.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def groups_over(group: dist.ProcessGroup, *backends: str) -> dict[str, dist.ProcessGroup]:
    """Returns a group of all ranks over each of these backends that is registered. Collective."""
    known, ranks = dist.Backend.backend_list, dist.get_process_group_ranks(group)
    return {name: dist.new_group(ranks, backend=name) for name in backends if name in known}


def unfused_groups(group: dist.ProcessGroup) -> dict[str, dist.ProcessGroup]:
    """Returns groups over this package's backend and over gloo, by name. Collective."""
    return {**groups_over(group, "symm_cp"), "gloo": group}


@dataclass(frozen=True)
class Setting:
    """The group and dtype of jobs, and the groups over whose backends they run unfused."""

    group: dist.ProcessGroup
    unfused: Mapping[str, dist.ProcessGroup]
    dtype: torch.dtype = torch.float32
    passes: str = FORWARD

    @property
    def trained(self) -> bool:
        """Whether there are gradients."""
        return self.passes != FORWARD

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Returns normally distributed random numbers."""
        return (torch.randn(*shape) * scale).to(self.dtype).requires_grad_(self.trained)

    def symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in symmetric memory. Collective."""
        copied = symm_mem.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        symm_mem.rendezvous(copied, self.group)
        return copied.copy_(tensor.detach())

    def whole(self, shard: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns all ranks' shards, concatenated."""
        full = gathered(self.group, shard.detach().movedim(dim, 0).contiguous())
        return full.movedim(0, dim).contiguous().requires_grad_(self.trained)

    def over_backends(self, make: Callable[[dist.ProcessGroup], Call]) -> dict[str, Call]:
        """Returns the unfused variants; `make` makes the one over a group."""
        return {unfused_over(backend): make(group) for backend, group in self.unfused.items()}

    def case(
        self,
        name: str,
        forwards: Mapping[str, Call],
        *,
        inputs: Sequence[torch.Tensor],
        of_limit: Sequence[torch.Tensor] = (),
        **notes: object,
    ) -> Case:
        """Returns a case, with the gradients of `inputs` (`of_limit`: the limit's) if asked.

        Its check compares all variants but the limit with each other. `notes` go into its row.
        """
        variants = {
            name: self._passes(forward, (of_limit or inputs) if name == LIMIT else inputs)
            for name, forward in forwards.items()
        }

        def check() -> None:
            runs = (run for name, run in variants.items() if name != LIMIT)
            # Copied, as a later call may write to the same memory.
            first, *others = ([t.clone() for t in _tensors(run())] for run in runs)
            for other in others:
                for got, want in zip(other, first, strict=True):
                    self.compare(got, want)

        whole = f"{name}{self.passes}, {dtype_name(self.dtype)}"
        notes = {**notes, "ranks": self.group.size(), "dtype": dtype_name(self.dtype)}
        return Case(whole, variants, check, inner=0, after=lambda row: notes)

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Raises `AssertionError` if a result is wrong by more than rounding can make it."""
        allowed = {torch.float64: 1e-10, torch.float32: 1e-4}.get(self.dtype, 2.0**-5)
        largest = want.double().abs().max().clamp_min(1e-30)
        error = float((got.double() - want.double()).abs().max() / largest)
        if not error <= allowed:
            raise AssertionError(
                f"wrong by {error:.1e} of the largest value, at most {allowed:.1e} is allowed"
            )

    def _passes(self, forward: Call, inputs: Sequence[torch.Tensor]) -> Call:
        if self.passes == FORWARD:
            return forward
        out = forward()
        grad = torch.ones_like(out)
        if self.passes == BACKWARD:
            return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
        return lambda: torch.autograd.grad(forward(), inputs, grad)


def _tensors(result: Any) -> Sequence[torch.Tensor]:
    return [result.detach()] if isinstance(result, torch.Tensor) else result


def gathered(group: dist.ProcessGroup, shard: torch.Tensor) -> torch.Tensor:
    """Returns all ranks' shards, concatenated along the first dimension."""
    out = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    gather_into(out, shard, group=group)
    return out


class _Gather(torch.autograd.Function):
    """Gathers shards along the first dimension; reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gathered(group, shard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        part = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        scatter_into(part, grad.contiguous(), group=ctx.group)
        return part, None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks; gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
        scatter_into(part, whole, group=group)
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gathered(ctx.group, grad.contiguous()), None


class _Sum(torch.autograd.Function):
    """The sum over ranks, in place; sums the gradient likewise."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        dist.all_reduce(product, group=group)
        ctx.mark_dirty(product)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def gather_matmul(setting: Setting, rows: int, inner: int, columns: int) -> Case:
    """Returns the all-gather-matmul of each rank's `rows` x `inner` with `inner` x `columns`."""
    x, weight = setting.normal(rows, inner), setting.normal(inner, columns, scale=inner**-0.5)
    full = setting.whole(x)

    def fused(shard: torch.Tensor) -> Call:
        return lambda: symm_cp.all_gather_matmul(shard, weight, group=setting.group)

    def unfused(group: dist.ProcessGroup) -> Call:
        if setting.trained:
            return lambda: _Gather.apply(x, group) @ weight
        kept = torch.empty_like(full)

        def run() -> torch.Tensor:
            gather_into(kept, x, group=group)
            return kept @ weight

        return run

    variants = {LIMIT: lambda: full @ weight, **setting.over_backends(unfused), FUSED: fused(x)}
    if not setting.trained:
        variants[IN_PLACE] = fused(setting.symmetric(x))
    return setting.case(
        f"all-gather-matmul, {rows} x {inner} a rank, {columns} columns",
        variants,
        inputs=(x, weight),
        of_limit=(full, weight),
        **_flops("all-gather-matmul", full, columns),
    )


def matmul_scatter(setting: Setting, rows: int, inner: int, columns: int) -> Case:
    """Returns the matmul-reduce-scatter of W * `rows` x `inner` with `inner` x `columns`."""
    x = setting.normal(setting.group.size() * rows, inner)
    weight = setting.normal(inner, columns, scale=inner**-0.5)

    def unfused(group: dist.ProcessGroup) -> Call:
        if setting.trained:
            return lambda: _Scatter.apply(x @ weight, group)
        kept = x.new_empty(rows, columns)

        def run() -> torch.Tensor:
            scatter_into(kept, x @ weight, group=group)
            return kept

        return run

    return setting.case(
        f"matmul-reduce-scatter, {rows} x {inner} for a rank, {columns} columns",
        {
            LIMIT: lambda: x @ weight,
            **setting.over_backends(unfused),
            FUSED: lambda: symm_cp.matmul_reduce_scatter(x, weight, group=setting.group),
        },
        inputs=(x, weight),
        **_flops("matmul-reduce-scatter", x, columns),
    )


def matmul_all_reduce(setting: Setting, rows: int, inner: int, columns: int) -> Case:
    """Returns the matmul-all-reduce of `rows` x `inner` with `inner` x `columns`."""
    x, weight = setting.normal(rows, inner), setting.normal(inner, columns, scale=inner**-0.5)

    def unfused(group: dist.ProcessGroup) -> Call:
        if setting.trained:
            return lambda: _Sum.apply(x @ weight, group)

        def run() -> torch.Tensor:
            product = x @ weight
            dist.all_reduce(product, group=group)
            return product

        return run

    return setting.case(
        f"matmul-all-reduce, {rows} x {inner}, {columns} columns",
        {
            LIMIT: lambda: x @ weight,
            **setting.over_backends(unfused),
            FUSED: lambda: symm_cp.matmul_all_reduce(x, weight, group=setting.group),
        },
        inputs=(x, weight),
        **_flops("matmul-all-reduce", x, columns),
    )


def _flops(kind: str, full: torch.Tensor, columns: int) -> dict[str, Any]:
    return {"kind": kind, "size": 2.0 * full.numel() * columns, "unit": "operations"}


def attention(
    setting: Setting,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    causal: bool = False,
) -> Case:
    """Returns attention with `tokens` of the sequence on each rank, in head-tail order if causal.

    The causal mask of all but the fused variant is a tensor, as the order demands.
    """
    group, W = setting.group, setting.group.size()
    q = setting.normal(1, heads, tokens, head_dim)
    k, v = (setting.normal(1, kv_heads, tokens, head_dim) for _ in range(2))
    whole = [setting.whole(t, 2) for t in (k, v)]
    balancer = symm_cp.HeadTail(tokens * W, W) if causal else None
    mask = None
    if balancer is not None:
        hidden = balancer.permutation() > balancer.positions(group.rank())[:, None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).to(setting.dtype)

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        grouped = heads != kv_heads
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)

    def unfused(over: dist.ProcessGroup) -> Call:
        kept = [t.new_empty(W * t.shape[0], *t.shape[1:]) for t in (k, v)]

        def run() -> torch.Tensor:
            parts = kept
            if setting.trained:
                parts = [_Gather.apply(t, over) for t in (k, v)]
            else:
                for into, shard in zip(kept, (k, v), strict=True):
                    gather_into(into, shard, group=over)
            by_rank = (part.view(W, *k.shape) for part in parts)
            return attend(*(part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in by_rank))

        return run

    def fused() -> torch.Tensor:
        return symm_cp.all_gather_attention(
            q, k, v, group=group, is_causal=causal, enable_gqa=True, load_balancer=balancer
        )

    kind = "causal attention" if causal else "attention"
    times = {FORWARD: 4.0, BACKWARD: 10.0, BOTH: 14.0}[setting.passes]
    return setting.case(
        f"{kind}, {tokens} tokens a rank, {heads} heads ({kv_heads} for keys) of {head_dim}",
        {LIMIT: lambda: attend(*whole), **setting.over_backends(unfused), FUSED: fused},
        inputs=(q, k, v),
        of_limit=(q, *whole),
        kind=f"{kind}{setting.passes}".replace(",", "").replace(" ", "-"),
        size=times * heads * W * tokens * tokens * head_dim,
        unit="operations",
    )


def all_reduce(setting: Setting, nbytes: int) -> Case:
    """Returns the one-shot all-reduce of `nbytes`."""
    x = setting.normal(_count(setting, nbytes))
    totals = []

    def unfused(group: dist.ProcessGroup) -> Call:
        totals.append(total := torch.zeros_like(x))
        return lambda: (dist.all_reduce(total, group=group), total)[1]

    op, name = torch.ops.symm_mem.one_shot_all_reduce.default, setting.group.group_name
    case = _collective(setting, "all-reduce", x, x, lambda t: op(t, "sum", name), unfused)
    check = case.check

    def check_sum() -> None:
        for total in totals:
            total.copy_(x)
        check()
        for total in totals:  # sums in place are repeated: zeros stay finite
            total.zero_()

    case.check = check_sum
    return case


def all_gather(setting: Setting, nbytes: int) -> Case:
    """Returns the low-contention all-gather of `nbytes` from each rank."""
    x = setting.normal(_count(setting, nbytes))
    full = setting.whole(x)

    def unfused(group: dist.ProcessGroup) -> Call:
        out = torch.empty_like(full)
        return lambda: (gather_into(out, x, group=group), out)[1]

    wait = torch.ops._c10d_functional.wait_tensor.default
    op = torch.ops.symm_mem._low_contention_all_gather.default
    name = setting.group.group_name
    return _collective(setting, "all-gather", x, full, lambda t: wait(op(t, name)), unfused)


def reduce_scatter(setting: Setting, nbytes: int) -> Case:
    """Returns the reduce-scatter whose result on each rank has `nbytes`."""
    count = _count(setting, nbytes)
    x, out = setting.normal(setting.group.size() * count), setting.normal(count)

    def unfused(group: dist.ProcessGroup) -> Call:
        part = torch.empty_like(out)
        return lambda: (scatter_into(part, x, group=group), part)[1]

    op, name = torch.ops.symm_mem.reduce_scatter_out.default, setting.group.group_name
    return _collective(
        setting, "reduce-scatter", x, out, lambda t: op(t, name, False, out), unfused
    )


def _count(setting: Setting, nbytes: int) -> int:
    return max(1, nbytes // setting.dtype.itemsize)


def _collective(
    setting: Setting,
    kind: str,
    x: torch.Tensor,
    result: torch.Tensor,
    op: Callable[[torch.Tensor], torch.Tensor],
    unfused: Callable[[dist.ProcessGroup], Call],
) -> Case:
    """Returns the case of a collective, whose limit is a copy of the bytes of its result."""
    shared, copied, source = setting.symmetric(x), torch.empty_like(result), result.clone()
    nbytes = x.nbytes if kind != "reduce-scatter" else result.nbytes
    variants: dict[str, Call] = {
        LIMIT: lambda: copied.copy_(source),
        **setting.over_backends(unfused),
        FUSED: lambda: op(x),
        IN_PLACE: lambda: op(shared),
    }
    name = f"{kind}, {size_text(nbytes)} a rank"
    return setting.case(name, variants, inputs=(), kind=kind, size=nbytes, unit="bytes a rank")
