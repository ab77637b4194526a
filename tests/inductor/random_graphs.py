"""Random graphs of views, casts, slices, matmuls and collectives: compiled and eager ones agree.

A program is drawn step by step, on meta tensors, from a seed that all ranks share. A step takes
values of earlier steps; what no step has taken is returned, so that every input gets a gradient.

    python -m tests.inductor.random_graphs --count 1000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from symm_cp.inductor.options import Options
from symm_cp.ranks import positive
from symm_cp.testing import RankError, Ranks
from tests.inductor.graphs import compare, draw, gather, scatter, through_passes

Tensors = list[torch.Tensor]
#: Takes the group, None on meta tensors, and the operands.
Call = Callable[[Any, Tensors], torch.Tensor]

_MOST_ELEMENTS = 4096


def _with_length(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


@dataclass
class Drawn:
    """A program: the shapes of its inputs, and steps with the numbers of their operands."""

    W: int
    draw: random.Random
    grad: bool  # torch has no gradients of averages
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[tuple[Call | None, list[int]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    values: Tensors = field(default_factory=list)  # on the meta device
    free: list[int] = field(default_factory=list)  # taken by no step

    def input(self, *shape: int) -> int:
        self.inputs.append(shape)
        self.steps.append((None, []))
        self.text.append(f"input{list(shape)}")
        self.values.append(torch.empty(shape, dtype=torch.float64, device="meta"))
        self.free.append(len(self.values) - 1)
        return len(self.values) - 1

    def add(self, text: str, call: Call, *operands: int) -> None:
        self.steps.append((call, list(operands)))
        self.text.append(f"{text} of {list(operands)}")
        self.values.append(call(None, [self.values[n] for n in operands]))
        self.free = [n for n in self.free if n not in operands] + [len(self.values) - 1]

    def take(self) -> tuple[int, torch.Tensor]:
        """Draws a value, mostly one that no step has taken."""
        n = (
            self.draw.choice(self.free)
            if self.draw.random() < 0.8
            else self.draw.randrange(len(self.values))
        )
        return n, self.values[n]

    # --- steps ---------------------------------------------------------------------------------

    def matmul(self) -> None:
        n, x = self.take()
        weight = self.input(x.shape[-1], self.draw.randrange(1, 9))
        self.add("matmul", lambda _, t: t[0] @ t[1], n, weight)

    def multiply_each_other(self) -> None:
        n, x = self.take()
        fit = [m for m, y in enumerate(self.values) if y.dim() == 2 and y.shape[0] == x.shape[-1]]
        if fit:
            self.add("matmul", lambda _, t: t[0] @ t[1], n, self.draw.choice(fit))

    def add_bias(self) -> None:
        n, x = self.take()
        self.add("add", lambda _, t: t[0] + t[1], n, self.input(x.shape[-1]))

    def add_equal(self) -> None:
        n, x = self.take()
        same = [m for m, y in enumerate(self.values) if y.shape == x.shape]
        self.add("add", lambda _, t: t[0] + t[1], n, self.draw.choice(same))

    def compute(self) -> None:
        n, _ = self.take()
        name = self.draw.choice(["tanh", "relu", "double", "narrow"])
        calls: dict[str, Call] = {
            "tanh": lambda _, t: t[0].tanh(),
            "relu": lambda _, t: t[0].relu(),
            "double": lambda _, t: t[0] * 2,
            "narrow": lambda _, t: t[0].float().double(),
        }
        self.add(name, calls[name], n)

    def view(self) -> None:
        n, x = self.take()
        dim = self.draw.randrange(x.dim())
        half = x.shape[dim] // 2
        calls: dict[str, Call] = {
            "transpose": lambda _, t: t[0].transpose(0, -1),
            "flatten": lambda _, t: t[0].reshape(-1, t[0].shape[-1]),
            "clone": lambda _, t: t[0].contiguous().clone(),
            "flip": lambda _, t: t[0].flip(dim),
        }
        if half:
            calls |= {
                "first half": lambda _, t: t[0].narrow(dim, 0, half),
                "second half": lambda _, t: t[0].narrow(dim, x.shape[dim] - half, half),
                "halves swapped": lambda _, t: torch.cat(list(t[0].split(half, dim))[::-1], dim),
                "halves in order": lambda _, t: torch.cat(list(t[0].split(half, dim)), dim),
            }
        if x.dim() == 2 and half and x.shape[dim] % 2 == 0:
            calls["unflatten"] = lambda _, t: t[0].unflatten(dim, (2, half))
        name = self.draw.choice(list(calls))
        self.add(f"{name} {dim}", calls[name], n)

    def collective(self) -> None:
        n, x = self.take()
        W, dim = self.W, self.draw.randrange(x.dim())
        op = self.draw.choice(["sum", "sum" if self.grad else "avg"])

        def gathered(group: Any, t: Tensors) -> torch.Tensor:
            return gather(t[0], dim, group) if group else _with_length(x, dim, W * x.shape[dim])

        def scattered(group: Any, t: Tensors) -> torch.Tensor:
            if group is None:
                return _with_length(x, dim, x.shape[dim] // W)
            return scatter(t[0], dim, group, op)

        def summed(group: Any, t: Tensors) -> torch.Tensor:
            return funcol.all_reduce(t[0], op, group) if group else torch.empty_like(x)

        def exchanged(group: Any, t: Tensors) -> torch.Tensor:
            if group is None:
                return torch.empty_like(x)
            rows = t[0].contiguous()
            return funcol.all_to_all_single_autograd(rows, None, None, group)

        calls: dict[str, Call] = {"all-reduce": summed}
        if x.numel() * W <= _MOST_ELEMENTS:
            calls["all-gather"] = gathered
        if x.shape[dim] % W == 0:
            calls["reduce-scatter"] = scattered
        if x.shape[0] % W == 0:
            calls["all-to-all"] = exchanged
        name = self.draw.choice(list(calls))
        self.add(f"{name} {dim} {op}", calls[name], n)


def drawn(seed: int, W: int) -> Drawn:
    draw = random.Random(seed)
    program = Drawn(W, draw, grad=draw.random() < 0.75)
    program.input(*(draw.choice([1, 2, 3, W, 2 * W]) for _ in range(draw.choice([2, 2, 3]))))
    kinds = [program.matmul, program.multiply_each_other, program.add_bias, program.add_equal]
    kinds += [program.compute, program.view, program.view]
    kinds += [program.collective, program.collective, program.matmul]
    for _ in range(draw.randrange(3, 12)):
        draw.choice(kinds)()
    return program


def program_of(program: Drawn, group: dist.ProcessGroup) -> Callable[..., Tensors]:
    def fn(*inputs: torch.Tensor) -> Tensors:
        given, values = iter(inputs), []
        for call, operands in program.steps:
            values.append(
                next(given) if call is None else call(group, [values[n] for n in operands])
            )
        return [values[n] for n in program.free]

    return fn


def refused(fn: Any, inputs: Tensors) -> bool:
    try:
        through_passes(fn, inputs, Options(strict=True))
    except Exception as error:  # Dynamo's, around ours
        if "strict: " not in str(error):
            raise
        return True
    return False


def check(group: dist.ProcessGroup, seed: int) -> int:
    """Compares a compiled program with eager mode; returns the number of fused collectives."""
    program = drawn(seed, group.size())
    seeds = torch.initial_seed() + seed
    inputs = draw(group, seeds, *program.inputs, requires_grad=program.grad)
    fn = program_of(program, group)
    # Products of different shapes round differently, and casts to float32 magnify that.
    narrow = any(step.startswith("narrow") for step in program.text)
    compiled = compare(fn, inputs, within=1e-4 if narrow else 1e-11)
    left = [d for d in compiled.report.left if not d.runs_as]
    ran = [op for op in compiled.ops if "_c10d_functional" in op and "wait" not in op]
    assert len(ran) == len(left), (ran, str(compiled.report))
    if seed % 3 == 0:
        assert refused(fn, inputs) == any(d.critical for d in compiled.report.left)
    return len(compiled.report.fused)


def many(group: dist.ProcessGroup, seeds: range) -> int:
    fused = 0
    for seed in seeds:
        try:
            fused += check(group, seed)
        except Exception as error:
            text = "\n".join(
                f"{n}: {step}" for n, step in enumerate(drawn(seed, group.size()).text)
            )
            raise AssertionError(f"program {seed}:\n{text}\n{error}") from error
    return fused


#: Number of programs in one call of the ranks.
AT_ONCE = 25


def main() -> int:
    """The command: it stops at the first program that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=positive, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--ranks", type=positive, help="2, 3 and 4 in turn without it")
    given = parser.parse_args()
    ranks, start, fused = Ranks(given.seed), time.monotonic(), 0
    try:
        for turn, begin in enumerate(range(0, given.count, AT_ONCE)):
            seeds = range(given.seed + begin, given.seed + min(begin + AT_ONCE, given.count))
            W = given.ranks or 2 + turn % 3
            fused += min(ranks.run(W, many, seeds, timeout=20.0 * AT_ONCE))
            print(f"{begin + len(seeds)} programs from {given.seed}, {fused} fused collectives,",
                  f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    except RankError as error:
        print(error)
        return 1
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
