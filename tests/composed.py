"""What test_composed.py composes: a small decoder, its training in one process, and the programs.

The model computes in float64, so that only the order of sums differs between one process and ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp import moe
from symm_cp.group.memory import GroupLike

VOCABULARY = 29  # no world size but 1 divides it
WIDTH, HEADS, KEY_HEADS, LENGTH, SAMPLES = 32, 4, 2, 16, 4
EXPERTS, CHOSEN = 8, 2
EMPTY = (6, 7)  # experts that get no token: on 4 ranks, all experts of the last one
STEPS, IGNORED = 3, -100

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Features:
    """Variations of the model and of its training; each program of the table has each."""

    accumulating: bool = False
    unsynced: bool = False  # FSDP2 and DDP reduce the gradients of both micro batches at once
    tied: bool = False
    frozen: bool = False
    experts: bool = False
    recompute: bool = False

    @property
    def micro_batches(self) -> int:
        """How many backward passes there are before a step of the optimizer."""
        return 2 if self.accumulating else 1


class Experts(nn.Module):
    """Routed experts; `group` is set where the ranks divide them among themselves."""

    group: GroupLike | None = None

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        with torch.no_grad():
            self.router.bias[list(EMPTY)] = -1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        if self.group is None:
            hot = F.one_hot(chosen, EXPERTS).to(x) * weights.unsqueeze(-1)
            hidden = torch.einsum("td,edh->teh", tokens, self.up).relu()
            out = torch.einsum("teh,ehd,tke->td", hidden, self.down, hot)
        else:
            up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
            hidden, routing = moe.dispatch_matmul(tokens, up, chosen, EXPERTS, group=self.group)
            out = moe.matmul_combine(hidden.relu(), down, weights, routing)
        return out.view(x.shape)


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * WIDTH // HEADS) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention, a feed-forward part, and maybe experts."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), FeedForward()
        self.experts = Experts() if experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        normed = self.norm2(x)
        x = x + self.mlp(normed)
        return x if self.experts is None else x + self.experts(normed)


class Decoder(nn.Module):
    """A language model with learned positions; stages of a pipeline lack `embed` or `head`."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.positions: nn.Embedding | None = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(features.experts) for _ in range(4))
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = features.recompute
        if features.tied:
            self.head.weight = self.embed.weight
        if features.frozen:
            for part in (self.positions, self.layers[1], self.layers[2].attention.q):
                part.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids
        if self.embed is not None and self.positions is not None:
            x = self.embed(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x if self.head is None else self.head(x)


def decoder(features: Features) -> Decoder:
    """A model with the same weights on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Decoder(features).double()


def batch_of(replica: int, step: int, micro: int) -> Batch:
    """One replica's samples; the number of labels that count differs between parts."""
    generator = torch.Generator().manual_seed(100 * replica + 10 * step + micro)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, : LENGTH // 3] = IGNORED
    return {"input_ids": ids, "labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """The loss over labels that are shifted already."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def whole_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a whole batch."""
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    positions = torch.arange(LENGTH).expand(SAMPLES, -1)
    return loss_of(model(batch["input_ids"], position_ids=positions), labels)


@dataclass(frozen=True)
class Outcome:
    """Of each step its loss, gradients and their norm; and the parameters in the end."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    grads: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a DTensor; a copy."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by the names that they have in one process, tied ones twice."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield re.sub(r"^(module|stages\.\d+)\.", "", name), parameter


def train(
    model: nn.Module,
    step_of: Callable[[int], torch.Tensor],
    clip: Callable[[nn.Module, float], torch.Tensor],
) -> Outcome:
    """Trains a model for some steps; `step_of` makes the backward passes of one, `clip` clips."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # The large eps keeps the rounding of small gradients small.
    optimizer = torch.optim.AdamW(trained, lr=0.05, eps=1e-3)
    outcome = Outcome([], [], [], {})
    for step in range(STEPS):
        outcome.losses.append(step_of(step))
        outcome.grads.append({n: whole(p.grad) for n, p in named(model) if p.grad is not None})
        outcome.norms.append(whole(clip(model, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights.update({n: whole(p) for n, p in named(model)})
    return outcome


def in_one_process(features: Features, replicas: int) -> Outcome:
    """The outcome of training on the samples of all replicas."""
    model: Any = decoder(features)

    def step_of(step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(features.micro_batches):
            for replica in range(replicas):
                loss = whole_loss(model, batch_of(replica, step, micro))
                loss = loss / (replicas * features.micro_batches)
                loss.backward()
                total += loss.detach()
        return total

    return train(model, step_of, lambda m, limit: nn.utils.clip_grad_norm_(m.parameters(), limit))


# --- compositions ------------------------------------------------------------------------------


def as_it_is(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return model


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_over_all(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return sharded(model, mesh["dp", "cp"]._flatten("dp_cp"))


def fsdp_in_background(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    wrapped = fsdp_over_all(model, mesh)
    symm_cp.fsdp.use(wrapped)
    return wrapped


def fsdp_summing(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 told to divide by the number of replicas only."""
    wrapped = fsdp_over_all(model, mesh)
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(mesh["dp"].size()))
    return wrapped


def fsdp_over_replicas(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return sharded(model, mesh["dp"])


def hsdp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return sharded(model, mesh["dp", "cp"])


def ddp_over_all(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_over_replicas(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.up")
ROWS = ("attention.o", "mlp.down")
PLAN = {f"layers.*.{name}": "colwise" for name in COLUMNS}
PLAN |= {f"layers.*.{name}": "rowwise" for name in ROWS}
PLAN |= {"embed": "embedding_rowwise", "head": "colwise_gather_output"}


def our_tp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return symm_cp.tensor_parallel.apply(model, mesh["tp"], plan=PLAN)


def our_sp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return symm_cp.tensor_parallel.apply(model, mesh["tp"], plan=PLAN, sequence_parallel=True)


def torch_tp(model: Any, mesh: DeviceMesh) -> nn.Module:
    tied = model.head.weight is model.embed.weight
    for layer in model.layers:
        plan = {**{n: ColwiseParallel() for n in COLUMNS}, **{n: RowwiseParallel() for n in ROWS}}
        parallelize_module(layer, mesh["tp"], plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    if tied:
        model.head.weight = model.embed.weight
    return model


def and_fsdp(first: Change, dim: str) -> Change:
    def change(model: Decoder, mesh: DeviceMesh) -> nn.Module:
        first(model, mesh)
        return sharded(model, mesh[dim])

    return change


def experts_over(dim: str, model: Any, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Divides the experts; returns the parameters that are divided."""
    divided = []
    for layer in model.layers:
        layer.experts.group = mesh[dim]
        for name in ("up", "down"):
            old = getattr(layer.experts, name)
            part = nn.Parameter(
                distribute_tensor(old.detach(), mesh[dim], [Shard(0)]), old.requires_grad
            )
            setattr(layer.experts, name, part)
            divided.append(part)
    return divided


def ep(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    experts_over("cp", model, mesh)
    return model


def ep_and_fsdp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    divided = experts_over("cp", model, mesh)
    return sharded(model, mesh["cp"], ignored_params=set(divided))


def ep_and_fsdp_that_divides(model: Any, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan does: the program gives the divisor of the experts' gradients."""
    ep_and_fsdp_of_experts(model, mesh)
    for layer in model.layers:
        layer.experts.set_gradient_divide_factor(float(mesh.size()))
    return model  # type: ignore[no-any-return]


def ep_and_fsdp_of_experts(model: Any, mesh: DeviceMesh) -> nn.Module:
    experts_over("cp", model, mesh)
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["dp"])
    return fsdp_over_all(model, mesh)


DIVIDED = ("experts.up", "experts.down")
Change = Callable[[Decoder, DeviceMesh], nn.Module]


@dataclass(frozen=True)
class Program:
    """A composition: the mesh, how a model is changed for it, and what is left to its training."""

    change: Change
    sizes: Mapping[str, int]
    #: How FSDP2 or DDP reduces gradients over the ranks of "cp": "mean", "sum" or not.
    reduces: str = ""
    #: The schedule of a pipeline.
    schedule: Any = None
    needs: str = ""  # a feature without which it is nothing
    #: Ends of the names of parameters that FSDP2 does not reduce over "cp".
    apart: tuple[str, ...] = ()
    #: Whether the program has FSDP2 divide the gradients of these by all ranks.
    divides: bool = False


DP_CP, CP_TP, DP_TP = ({a: 2, b: 2} for a, b in (("dp", "cp"), ("cp", "tp"), ("dp", "tp")))
PROGRAMS = {
    "fsdp x cp": Program(fsdp_over_all, DP_CP, reduces="mean"),
    "fsdp of 4 x cp": Program(fsdp_over_all, {"dp": 1, "cp": 4}, reduces="mean"),
    "fsdp in background x cp": Program(fsdp_in_background, DP_CP, reduces="mean"),
    "fsdp that sums x cp": Program(fsdp_summing, DP_CP, reduces="sum"),
    "fsdp of replicas x cp": Program(fsdp_over_replicas, DP_CP),
    "hsdp x cp": Program(hsdp, DP_CP, reduces="mean"),
    "ddp x cp": Program(ddp_over_all, DP_CP, reduces="mean"),
    "ddp of replicas x cp": Program(ddp_over_replicas, DP_CP),
    "tp x cp": Program(our_tp, CP_TP),
    "sp x cp": Program(our_sp, CP_TP),
    "torch's tp x cp": Program(torch_tp, CP_TP),
    "tp x fsdp, cp": Program(and_fsdp(our_tp, "cp"), CP_TP, reduces="mean"),
    "torch's tp x fsdp, cp": Program(and_fsdp(torch_tp, "cp"), CP_TP, reduces="mean"),
    "fsdp x tp": Program(and_fsdp(our_tp, "dp"), DP_TP),
    "fsdp x sp": Program(and_fsdp(our_sp, "dp"), DP_TP),
    "fsdp x torch's tp": Program(and_fsdp(torch_tp, "dp"), DP_TP),
    "ep x cp": Program(ep, {"cp": 4}, needs="experts"),
    "ep x fsdp, cp": Program(
        ep_and_fsdp, {"cp": 4}, reduces="mean", needs="experts", apart=DIVIDED
    ),
    "ep x fsdp of experts, cp": Program(
        ep_and_fsdp_of_experts,
        DP_CP,
        reduces="mean",
        needs="experts",
        apart=(*DIVIDED, "router.weight", "router.bias"),
    ),
    "ep x fsdp that divides, cp": Program(
        ep_and_fsdp_that_divides,
        DP_CP,
        reduces="mean",
        needs="experts",
        apart=("router.weight", "router.bias"),
        divides=True,
    ),
    "cp x gpipe": Program(as_it_is, {"pp": 2, "cp": 2}, schedule=ScheduleGPipe),
    "cp x 1f1b": Program(as_it_is, {"pp": 2, "cp": 2}, schedule=Schedule1F1B),
    "cp x interleaved": Program(as_it_is, {"pp": 2, "cp": 2}, schedule=ScheduleInterleaved1F1B),
}
