"""Each declared op as a function of its floating inputs, for tests that run all of them."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.ops.common import WITH_SIZES
from symm_cp.ops.op import Caller, Op, declared
from symm_cp.schedule import SequenceLayout
from symm_cp.testing import Ranks

OPS = torch.ops.symm_mem
Tensors = list[torch.Tensor]


def causal(b: Any, h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return q_idx >= kv_idx


def distance(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
    return score - 0.1 * (q_idx - kv_idx)


@dataclass
class Call:
    """An op: `run(inputs)` returns its floating outputs."""

    run: Callable[..., Tensors]
    inputs: Tensors


def alone(ranks: Ranks, function: Any, *args: Any) -> Any:
    """The result of a function in a process of its own, with a group of one rank."""
    with ranks.own(1, function, *args) as running:
        (outcome,) = running.outcomes(60)
    assert not outcome.failure, outcome.failure
    return outcome.result


def waited(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def caller(
    group: dist.ProcessGroup,
    rand: Callable[..., torch.Tensor] = torch.randn,
    sizes: list[int] | None = None,
) -> Caller:
    sizes = [*range(1, group.size() + 1)] if sizes is None else sizes
    return Caller(group.group_name, group.rank(), group.size(), sizes, rand)


def completed(op: Op, result: Any) -> Any:
    """The result of an op, which may have to be waited for."""
    return result if op.complete is None else op.complete(result)


def call_of(op: Op, on: Caller) -> Call:
    """The example call of a declared op, as a function of its floating tensors."""
    assert op.example is not None
    given, spec = tree_flatten(tuple(op.example(on)))
    places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and is_real(x)]

    def run(*inputs: torch.Tensor) -> Tensors:
        filled = list(given)
        for place, tensor in zip(places, inputs, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        result = completed(op, op.overload(*args, **kwargs))
        return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]

    return Call(run, [given[place] for place in places])


def is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def calls(group: dist.ProcessGroup, dtype: torch.dtype = torch.float64) -> dict[str, Call]:
    """Ops that have a gradient, on inputs that differ between ranks by a factor only."""
    W, name = group.size(), group.group_name

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * (1 + group.rank())).to(dtype)

    on = caller(group, rand)
    found = {
        op.name: call_of(op, on)
        for op in declared()
        if op.differentiable and (not op.internal or op.name in WITH_SIZES.values())
    }
    q, k, v = (rand(1, 2, 20, 4) for _ in range(3))
    layout = SequenceLayout(W, tuple(range(W)), (20,) * W)

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return list(
            flex_all_gather_attention(
                q, k, v, group=resolve(name), layout=layout, mask_mod=causal, score_mod=distance
            )
        )

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return list(OPS.fused_all_gather_attention(q, k, v, name, is_causal=True))

    def of_copy(x: torch.Tensor) -> Tensors:
        return [OPS.one_shot_all_reduce_copy(x.new_empty(2 * W * 4), x, "sum", name)]

    def first(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
        return lambda *inputs: run(*inputs)[:1]

    collect = found["project_from_heads"]
    # These need longer sequences, a mask, a buffer that is not an input, or a copy to overwrite.
    return found | {
        "project_from_heads": Call(first(collect.run), collect.inputs),
        "one_shot_all_reduce_copy": Call(of_copy, [rand(2 * W, 4)]),
        "two_shot_all_reduce_": Call(
            lambda x: [OPS.two_shot_all_reduce_(x * 1, "avg", name)], [rand(2 * W, 4)]
        ),
        "fused_all_gather_attention": Call(attention, [q, k, v]),
        "flex_all_gather_attention": Call(flex, [q, k, v]),
    }


ATTENTION = ("fused_all_gather_attention", "flex_all_gather_attention")


def leaves(tensors: Tensors) -> Tensors:
    return [t.detach().clone().requires_grad_() for t in tensors]


def trained(call: Call, inputs: Tensors | None = None) -> tuple[Tensors, Tensors]:
    """Outputs of a forward pass and gradients of a backward pass of a call."""
    given = leaves(call.inputs) if inputs is None else inputs
    outputs = call.run(*given)
    loss: Any = sum(out.square().sum() for out in outputs)
    return [out.detach() for out in outputs], list(torch.autograd.grad(loss, given))


def python_calls(run: Callable[[], object]) -> list[str]:
    """The functions of this project that run in a call."""
    seen: list[str] = []

    def on_call(frame: Any, event: str, _: object) -> None:
        if event == "call" and "symm_cp" in frame.f_code.co_filename:
            seen.append(frame.f_code.co_name)

    sys.setprofile(on_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


class CountedOps(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class CountedFunctions(TorchFunctionMode):
    """Counts torch's functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def symmetric(like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A copy in symmetric memory, at a different offset on each rank."""
    block = symm_mem.empty(like.numel() + group.size(), dtype=like.dtype, device="cpu")
    symm_mem.rendezvous(block, group)
    return block.narrow(0, group.rank(), like.numel()).view(like.shape).copy_(like)


def reduced(parts: Tensors, reduce_op: str = "sum") -> torch.Tensor:
    """The sum or mean in rank order, computed in float32 for 16-bit types."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    if reduce_op == "avg" and dtype.is_complex:  # torch divides by a complex number
        return torch.view_as_complex(torch.view_as_real(total) / len(parts))
    return (total / len(parts) if reduce_op == "avg" else total).to(dtype)


class Memory:
    """Symmetric memory, in which each rank places tensors at random, or not at all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.block = symm_mem.empty(1 << 20, dtype=torch.uint8, device="cpu")
        symm_mem.rendezvous(self.block, group)
        self.end = 0

    def place(self, x: torch.Tensor, *, symmetric: bool = True) -> torch.Tensor:
        """The same values in a layout that `random` draws, differently on each rank."""
        kind = random.choice(["plain", "transposed", "gaps", "symmetric", "symmetric", "cut"])
        if kind == "transposed" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == "gaps":
            return torch.stack([x, x], -1)[..., 0]
        nbytes = 2 * x.numel() * x.itemsize
        if kind not in ("symmetric", "cut") or not symmetric or nbytes > len(self.block) // 8:
            return x.clone()
        wide = [*x.shape[:-1], x.shape[-1] + (3 if kind == "cut" else 0)]
        begin = self.end + 8 * random.randrange(100)
        if begin + nbytes + 4096 > len(self.block):  # an op has fewer and smaller tensors
            begin = 0
        self.end = begin + torch.Size(wide).numel() * x.itemsize
        part = self.block[begin : self.end].view(x.dtype).view(wide)[..., : x.shape[-1]]
        self.end += -self.end % 8
        return part.copy_(x)
