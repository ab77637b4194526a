"""Generates greedily with all variants, one token each in turn; compares tokens and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from symm_cp import inductor
from symm_cp.commands.demo.decoding import variants
from symm_cp.commands.demo.decoding.options import DecodeOptions, config_of
from symm_cp.commands.demo.decoding.report import (
    Agreement,
    DecodeResult,
    compare,
    show,
    tolerance_of,
)
from symm_cp.commands.demo.decoding.variants import DecodeVariant
from symm_cp.commands.harness import llama
from symm_cp.commands.harness.measure import slowest
from symm_cp.commands.harness.paired import COMPUTE, FUSED, dense_with, unfused_over
from symm_cp.commands.harness.progress import Progress
from symm_cp.ranks import quick_barrier, threads, threads_of

T = TypeVar("T")


class Generator:
    """Generates with one variant; holds its tokens so far, and the seconds that each took."""

    def __init__(self, variant: DecodeVariant, prompt: torch.Tensor, tokens: int) -> None:
        self.variant = variant
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []  # of each token, (vocabulary,)
        self.seconds: list[float] = []
        self._prompt = prompt
        self._cache = llama.static_cache(variant.model, prompt.shape[1] + tokens)

    def prefill(self) -> None:
        """Processes the prompt, which gives the first token."""
        # Uncompiled, even for compiled variants: the prompt's shape occurs only once.
        self._take(self.variant.model, self._prompt, 0)

    def step(self, token: int) -> None:
        """Processes a token, which gives the next one."""
        position = self._prompt.shape[1] + len(self.tokens) - 1
        self._take(self.variant.run, torch.tensor([[token]]), position)

    @torch.no_grad()
    def _take(self, run: Callable[..., Any], ids: torch.Tensor, position: int) -> None:
        start = time.perf_counter()
        logits = llama.next_logits(self.variant.model, run, self._cache, ids, position)[0]
        self.tokens.append(int(logits.argmax()))
        self.seconds.append(time.perf_counter() - start)
        self.logits.append(logits.float())


class DecodeRun:
    """The whole demo on one rank."""

    def __init__(
        self, options: DecodeOptions, group: dist.ProcessGroup, *, quiet: bool = False
    ) -> None:
        self.options = options
        self.group = group
        self.barrier = quick_barrier(group)
        self.config = config_of(options)
        self.model = llama.make(self.config, options.dtype, options.seed)
        generator = torch.Generator().manual_seed(options.seed)
        size = (1, options.prompt)
        self.prompt = torch.randint(self.config.vocab_size, size, generator=generator)
        self.spread = _spread(self.model, group, compile=options.compile)
        self.all_threads = threads_of(group.size())
        steps = (len({1, self.all_threads}) + len(self.spread)) * options.tokens
        self.progress = Progress(steps) if group.rank() == 0 and not quiet else None

    def result(self) -> DecodeResult:
        """Generates with all variants; returns the same result on all ranks."""
        dense, *threaded = map(self.generate_dense, sorted({1, self.all_threads}))
        tokens = self.first(dense.tokens)
        spread = self.generate_spread(tokens)
        if self.progress is not None:
            self.progress.close()
        tolerance = max(
            (tolerance_of(logits, self.options.dtype) for logits in dense.logits), default=0.0
        )
        checked = [g for g in spread if g.variant.name != COMPUTE]
        agreements = {g.variant.name: self.agreement(g, dense, tolerance) for g in checked}
        generators = (dense, *threaded, *spread)
        return DecodeResult(
            options=self.options,
            config=self.config,
            parameters=sum(p.numel() for p in self.model.parameters()),
            agreements=self.first(agreements),
            seconds={g.variant.name: slowest(g.seconds, self.group) for g in generators},
            tolerance=self.first(tolerance),
        )

    def generator(self, variant: DecodeVariant) -> Generator:
        """Returns a generator in its initial state."""
        return Generator(variant, self.prompt, self.options.tokens)

    def generate_dense(self, count: int) -> Generator:
        """Generates with the whole model on rank 0, with `count` threads, while the others wait."""
        generator = self.generator(variants.eager(dense_with(count), self.model))
        if self.group.rank() == 0:
            with threads(count):
                generator.prefill()
                self.advance(generator)
                while len(generator.tokens) < self.options.tokens:
                    generator.step(generator.tokens[-1])
                    self.advance(generator)
        else:
            generator.seconds = [0.0] * self.options.tokens
        dist.barrier(self.group)
        return generator

    def generate_spread(self, tokens: list[int]) -> list[Generator]:
        """Generates with the other variants; each receives `tokens` one by one.

        They take turns, so that drift of the machine's speed affects them equally.
        """
        generators = [self.generator(variant) for variant in self.spread]
        for index in range(len(tokens)):
            first = index % len(generators)
            for generator in (*generators[first:], *generators[:first]):
                self.barrier()
                if index == 0:
                    generator.prefill()
                else:
                    generator.step(tokens[index - 1])
                self.advance(generator)
        return generators

    def agreement(self, own: Generator, dense: Generator, tolerance: float) -> Agreement:
        """Compares a variant's tokens on all ranks, and on rank 0 with the one process's tokens."""
        tokens = torch.tensor(own.tokens)
        everywhere = [torch.empty_like(tokens) for _ in range(self.group.size())]
        dist.all_gather(everywhere, tokens, group=self.group)
        ranks_agree = all(torch.equal(tokens, of) for of in everywhere)
        if self.group.rank() != 0:
            return Agreement(0, 0, 0, 0.0, ranks_agree)
        return Agreement(*compare(own.tokens, own.logits, dense.logits, tolerance), ranks_agree)

    def first(self, value: T) -> T:
        """Returns rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def advance(self, generator: Generator) -> None:
        """Shows a generated token."""
        if self.progress is not None:
            token = f"token {len(generator.tokens)}"
            seconds = generator.seconds[-1]
            self.progress.advance(f"{generator.variant.name}: {token}, {seconds:.3f} s")


def _spread(
    model: torch.nn.Module, group: dist.ProcessGroup, *, compile: bool
) -> list[DecodeVariant]:
    parts = llama.Parts(model, group.rank(), group.size())
    backends = {
        name: dist.new_group(dist.get_process_group_ranks(group), backend=name)
        for name in ("symm_cp", "gloo")
        if name in dist.Backend.backend_list
    }
    alone = parts.with_exchanges(variants.none(group))
    if compile:
        passes = inductor.compile_options()
        functional = {name: variants.functional(over) for name, over in backends.items()}
        # The passes leave the gather of the logits to the backend.
        quick = next(iter(functional.values()), variants.functional(group))
        return [
            *(
                variants.compiled(unfused_over(name), parts.with_exchanges(exchanges))
                for name, exchanges in functional.items()
            ),
            variants.compiled(FUSED, parts.with_exchanges(quick), passes),
            variants.compiled(COMPUTE, alone),
        ]
    return [
        *(
            variants.eager(unfused_over(name), parts.with_exchanges(variants.over(over)))
            for name, over in backends.items()
        ),
        variants.eager(FUSED, variants.fused(parts, group)),
        variants.eager(COMPUTE, alone),
    ]


def run_rank(options: DecodeOptions, group: dist.ProcessGroup) -> int:
    """Runs the demo as one rank of a group; returns the exit code."""
    result = DecodeRun(options, group).result()
    if group.rank() == 0:
        show(result)
    # All ranks have the same result; torchrun uses the exit code of any rank.
    return 0 if result.agree() else 1
