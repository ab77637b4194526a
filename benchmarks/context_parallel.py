"""Training steps of a Llama of transformers: the sequence spread over ranks, and in one process.

    python benchmarks/context_parallel.py --json benchmarks/results/context_parallel.json

A step is forward, loss, backward, and the sum of all gradients over the ranks, of one sequence of
4096 tokens and weights in bfloat16. "one process" is rank 0 alone, with one thread, while the other
ranks wait; "one process, all threads" has as many threads as there are ranks (or cores), which is
what a user has without ranks. Before the case is timed, the loss and the gradient of every
parameter are compared with those of the same weights in float32 in one process: they must be as
near to these as bfloat16 results of one process are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from benchmarks.llama import ONE_PROCESS, in_one_process
from symm_cp.commands.bench.jobs import groups_over

TOKENS, VOCABULARY = 4096, 8192
FEW = 8
IGNORED = -100

Step = Callable[[], torch.Tensor]
Batch = dict[str, torch.Tensor]


def _model() -> nn.Module:
    """Returns the model with the same random weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=2 * TOKENS,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def _batch() -> Batch:
    """Returns a batch of one sequence, the same for every call and rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (1, TOKENS), generator=generator)
    # Labels are given shifted: label t is what token t predicts.
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = dict(batch)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def _in_one_process(model: nn.Module, batch: Batch) -> Step:
    def step() -> torch.Tensor:
        model.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        return loss.detach()

    return step


def _spread(
    model: nn.Module, batch: Batch, group: dist.ProcessGroup, balancer: symm_cp.LoadBalancer
) -> Step:
    """Returns the step on this rank's part of the sequence; gradients end up the same on all."""
    local, reduce_loss = symm_cp.shard_batch(
        group, batch, load_balancer=balancer, shift_labels=False
    )

    def step() -> torch.Tensor:
        model.zero_grad()
        with symm_cp.context_parallel(group, model=model, load_balancer=balancer):
            loss = reduce_loss(_loss(model, local))
            loss.backward()
        grads = (p.grad for p in model.parameters() if p.grad is not None)
        works = [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]
        for work in works:
            assert work is not None
            work.wait()
        return loss.detach()

    return step


def _errors(model: nn.Module, exact: nn.Module) -> torch.Tensor:
    """The relative error of each parameter's gradient, in the Frobenius norm.

    Leaves out parameters with a few elements (a router's bias), where one rounding decides.
    """
    return torch.stack(
        [
            torch.linalg.vector_norm(p.grad.float() - q.grad) / torch.linalg.vector_norm(q.grad)
            for p, q in zip(model.parameters(), exact.parameters(), strict=True)
            if p.grad is not None and q.grad is not None and p.numel() >= FEW
        ]
    )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the case."""
    batch = _batch()
    (over,) = groups_over(group, "symm_cp").values()
    alone = _model()
    models = {"one process": alone}
    steps = {"one process": _in_one_process(alone, batch)}
    for name, balancer in (
        ("head-tail", symm_cp.HeadTail(TOKENS, group.size())),
        ("sequential", symm_cp.Sequential(TOKENS, group.size())),
    ):
        model = models[name] = copy.deepcopy(alone)
        steps[name] = _spread(model, batch, over, balancer)

    if group.rank() > 0:
        steps["one process"] = lambda: torch.zeros(())
    models[ONE_PROCESS] = copy.deepcopy(alone)
    steps |= in_one_process(lambda: _in_one_process(models[ONE_PROCESS], batch), group)

    def check() -> None:
        losses = {name: step() for name, step in steps.items()}
        if group.rank() > 0:
            return
        exact = copy.deepcopy(alone).float()
        want = _in_one_process(exact, batch)()
        off = {name: abs(float(loss - want)) for name, loss in losses.items()}
        errors = {name: _errors(model, exact) for name, model in models.items()}
        for name in steps:
            assert off[name] <= 2 * off["one process"] + 1e-3, (name, off)
            worst = float((errors[name] / errors["one process"]).max())
            assert worst < 1.5, (name, worst)

    yield Case("Llama, training step, bfloat16", steps, check, threaded=[ONE_PROCESS])


if __name__ == "__main__":
    main(cases, __doc__)
