"""Training steps: data parallel with torch's DDP and FSDP2, and tensor parallel.

    python benchmarks/training.py --json benchmarks/results/training.json

The data-parallel programs differ only in the backend of the process group; FSDP2 also runs with
`symm_cp.fsdp.use` over gloo, which then all-reduces only losses. Their Llama has 10 M parameters.
For tensor parallelism, transformers or this package splits a larger one: llama.py. The
limit is the step without any communication.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp.fsdp
from benchmarks.harness import Case, main
from benchmarks.llama import ONE_PROCESS, has_result, in_one_process, llama, variants
from symm_cp.commands.bench.jobs import groups_over

#: Of the model for data parallelism, which has 10 M parameters.
SMALL = {
    "vocab_size": 256,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
}
SEQUENCE, BATCH = 128, 2  # on each rank
TOKENS = 256  # of the tensor-parallel training step, one sequence

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]
Step = Callable[[], torch.Tensor]


def _ddp(model: nn.Module, over: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=over)


def _fsdp(model: nn.Module, over: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(over, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp_used(model: nn.Module, over: dist.ProcessGroup) -> nn.Module:
    sharded = _fsdp(model, over)
    symm_cp.fsdp.use(sharded)
    return sharded


def _step(model: nn.Module, tokens: torch.Tensor, rate: float = 0.1) -> Step:
    """Returns a training step, which returns the loss of these tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> torch.Tensor:
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _case(
    group: dist.ProcessGroup, name: str, wrap: Wrap, more: Mapping[str, Wrap] | None = None
) -> Case:
    """Makes a case; `more` are other ways to wrap the model, over gloo."""
    model = llama(torch.float32, **SMALL)
    draw = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(SMALL["vocab_size"], (BATCH, SEQUENCE + 1), generator=draw)

    def step(wrap: Wrap, over: dist.ProcessGroup) -> Step:
        return _step(wrap(copy.deepcopy(model), over), tokens, 1e-3)

    over = {**groups_over(group, "symm_cp"), "gloo": group}
    steps = {backend: step(wrap, of) for backend, of in over.items()}
    steps |= {way: step(other, group) for way, other in (more or {}).items()}

    def check() -> None:
        """Three steps: the third loss depends on sums of gradients of all ranks."""
        losses = {
            backend: torch.stack([step() for _ in range(3)]) for backend, step in steps.items()
        }
        for loss in losses.values():
            torch.testing.assert_close(loss, losses["gloo"], rtol=1e-4, atol=1e-4)

    return Case(name, {"limit": step(lambda whole, _: whole, group), **steps}, check)


def _llama_case(group: dist.ProcessGroup, dtype: torch.dtype) -> Case:
    whole = llama(dtype)
    ways = {"apply": {}, "apply, sequence parallel": {"sequence_parallel": True}}
    tokens = torch.randint(whole.config.vocab_size, (1, TOKENS + 1))
    dist.broadcast(tokens, 0, group)
    steps = {name: _step(model, tokens) for name, model in variants(whole, group, ways)}
    steps |= in_one_process(lambda: _step(copy.deepcopy(whole), tokens), group)
    with torch.no_grad():
        logits = whole(input_ids=tokens[:, :-1]).logits
        untrained = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def check() -> None:
        """Two steps: the first loss is that of the whole model, the second shows its gradients."""
        losses = {
            name: torch.stack([step() for _ in range(2)])
            for name, step in steps.items()
            if has_result(name, group)
        }
        # Losses are means over tokens, in which most rounding errors cancel out.
        rtol = 1e-5 if dtype == torch.float32 else 2e-3
        for loss in losses.values():
            torch.testing.assert_close(loss[0], untrained, rtol=rtol, atol=0.0)
            torch.testing.assert_close(loss, losses["transformers (gloo)"], rtol=rtol, atol=0.0)
            assert loss[1] < (1 - 2 * rtol) * loss[0], loss

    name = f"Llama, training step of {TOKENS} tokens, {str(dtype)[6:]}"
    return Case(name, steps, check, threaded=[ONE_PROCESS])


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for dtype in (torch.float32, torch.bfloat16):
        yield _llama_case(group, dtype)
    ways = (("DDP", _ddp, None), ("FSDP2", _fsdp, {"fsdp.use": _fsdp_used}))
    for name, wrap, more in ways:
        case = _case(group, f"{name}, training step of 10 M parameters", wrap, more)
        case.most = 30
        yield case


if __name__ == "__main__":
    main(cases, __doc__)
