"""Programs of torch.distributed, as users write them; each returns results to compare.

They run on every rank of the world, do not refer to symm_cp, and draw all random numbers from
torch's generator, which starts from the same seed on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

STEPS = 3
Results = Any  # tensors, in lists and dictionaries


class Net(nn.Module):
    """Two layers, and one that only some steps use."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(features, 2 * features)
        self.norm = nn.BatchNorm1d(2 * features)
        self.second = nn.Linear(2 * features, features)
        self.seldom = nn.Linear(features, features)

    def forward(self, x: torch.Tensor, *, seldom: bool = False) -> torch.Tensor:
        x = self.second(self.norm(self.first(x)).relu())
        return self.seldom(x) if seldom else x


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def batches(features: int = 8, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each step's batch."""
    whole = [
        (torch.randn(dist.get_world_size(), rows, features), torch.randn(rows, features))
        for _ in range(STEPS)
    ]
    return [(x[dist.get_rank()], y) for x, y in whole]


# --- DistributedDataParallel ---


def train(model: nn.Module, step: Callable[[int, nn.Module, torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.mse_loss(step(index, model, x), y).backward()
        optimizer.step()


def plain(index: int, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def sometimes(index: int, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x, seldom=index % 2 == dist.get_rank() % 2)


def ddp() -> Results:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001, find_unused_parameters=True)
    train(model, sometimes)
    return state_of(model)


def ddp_views() -> Results:
    net = Net()
    net.seldom.requires_grad_(False)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    train(model, plain)
    return state_of(model)


def ddp_no_sync() -> Results:
    net = Net()
    net.seldom.requires_grad_(False)
    model = DistributedDataParallel(net)
    gradients = []
    for index, (x, y) in enumerate(batches()):
        if index < STEPS - 1:
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
        else:
            nn.functional.mse_loss(model(x), y).backward()
        gradients.append({k: p.grad.clone() for k, p in net.named_parameters() if p.requires_grad})
    return gradients


def in_bfloat16(state, bucket):  # torch compares annotations with types, not with their names
    """Compresses like torch's bf16_compress_hook, which requires NCCL."""
    work = dist.all_reduce(bucket.buffer().to(torch.bfloat16), async_op=True)
    assert work is not None
    size = dist.get_world_size()
    return work.get_future().then(lambda total: total.value()[0].float() / size)


class Embedded(nn.Module):
    """An embedding and an embedding bag with sparse gradients, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.bags = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        self.last = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows(ids).sum(1) + self.bags(ids % 10))


def ddp_sparse() -> Results:
    """Ranks look up different rows, some of them several times."""
    net = Embedded()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for _ in range(STEPS):
        ids = torch.randint(0, 20, (dist.get_world_size(), 3, 5))[dist.get_rank()]
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        assert net.rows.weight.grad is not None
        assert net.rows.weight.grad.is_sparse
        gradients += [p.grad.to_dense().clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
    return [gradients, state_of(net)]


def ddp_hooks() -> Results:
    states = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        in_bfloat16,
        powerSGD_hook.powerSGD_hook,
    ):
        net = Net()
        net.seldom.requires_grad_(False)
        model = DistributedDataParallel(net)
        state = None
        if hook is powerSGD_hook.powerSGD_hook:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2
            )
        model.register_comm_hook(state, hook)
        train(model, plain)
        states.append(state_of(model))
    return states


def ddp_uneven() -> Results:
    """Trains on ranks with different numbers of batches."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    with Join([model]):
        for x, _ in batches()[: 1 + dist.get_rank() % STEPS]:
            model(x).square().mean().backward()
    return state_of(model)


def zero_redundancy() -> Results:
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    return state_of(model)


def sampler() -> Results:
    mine = list(DistributedSampler(range(10), shuffle=True, seed=5))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [torch.tensor(part) for part in every]


# --- Objects, messages, barriers and groups ---


def objects() -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (100 * rank)}
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine)
    collected = [None] * size if rank == size - 1 else None
    dist.gather_object(mine, collected, dst=size - 1)
    shared = [mine, 7] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([mine], dst=1)
    elif rank == 1:
        dist.recv_object_list(received, src=0)
    return [every, collected, shared, part, received]


def messages() -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    out, tagged = torch.randn(3) + rank, torch.randn(2) * rank
    received, other = torch.zeros(3), torch.zeros(2)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, received, before)]
    ):
        work.wait()
    sent = dist.isend(tagged, after, tag=5)
    dist.recv(other, before, tag=5)
    assert sent is not None
    sent.wait()
    anyone = torch.zeros(size)
    if rank == 0:
        for _ in range(size - 1):
            value = torch.zeros(1)
            sender = dist.recv(value)
            anyone[sender] = value
    else:
        dist.send(torch.full((1,), 10.0 * rank), 0)
    return [received, other, anyone]


def barriers() -> Results:
    world, size = dist.group.WORLD, dist.get_world_size()
    assert world is not None
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    timeout = dist.distributed_c10d._get_default_timeout(dist.get_backend())
    dist.distributed_c10d._store_based_barrier(
        dist.get_rank(), store, world.group_name, size, timeout
    )
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    return []


def subgroups() -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, groups = dist.new_subgroups(group_size=size // 2)
    backwards = dist.new_group(list(range(size))[::-1])
    lone = dist.new_group([size - 1])
    results = []
    for group in (mine, backwards, lone):
        if dist.get_rank(group) < 0:
            continue
        total = torch.randn(5) * (rank + 1)
        dist.all_reduce(total, group=group)
        results.append(total)
        dist.destroy_process_group(group)
    return [len(groups), results]


def coalesced() -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [torch.randn(n) * (rank + 1) for n in (3, 5, 8)]
    whole = [torch.zeros(size * n) for n in (3, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for gradient in gradients:
            dist.all_reduce(gradient)
    manager.wait()
    with dist._coalescing_manager():
        for out, gradient in zip(whole, gradients, strict=False):
            dist.all_gather_into_tensor(out, gradient)
    return [gradients, whole]


def differentiable() -> Results:
    """torch.distributed.nn: collectives with gradients."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    results = []

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        leaf = (torch.randn(size * 2, 3) * (rank + 1)).requires_grad_()
        out = function(leaf)
        out.square().sum().backward()
        results.extend([out.detach(), leaf.grad])

    run(lambda x: dist_nn.all_reduce(x * 2, group=world))
    run(lambda x: torch.stack(dist_nn.all_gather(x, world)))
    run(lambda x: dist_nn.broadcast(x * 1, 0, world))
    run(lambda x: dist_nn.all_to_all_single(torch.empty_like(x), x, group=world))
    run(
        lambda x: torch.cat(
            dist_nn.all_to_all([torch.empty(2, 3) for _ in range(size)], list(x.split(2)), world)
        )
    )
    return results


SMALL: dict[str, Callable[[], Results]] = {
    function.__name__: function
    for function in (
        ddp,
        ddp_views,
        ddp_no_sync,
        ddp_sparse,
        ddp_hooks,
        ddp_uneven,
        zero_redundancy,
        sampler,
        objects,
        messages,
        barriers,
        subgroups,
        coalesced,
        differentiable,
    )
}
