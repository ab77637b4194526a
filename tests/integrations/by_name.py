"""Programs of frameworks that start groups by a backend's name, and import nothing of `symm_cp`.

    python -m tests.integrations.by_name lightning symm_cp result.json
    torchrun --nproc-per-node 2 -m tests.integrations.by_name deepspeed symm_cp result.json

Each trains the same small network on two ranks; rank 0 writes the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def samples() -> torch.Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def own_batches() -> tuple[torch.Tensor, ...]:
    return samples().chunk(dist.get_world_size())[dist.get_rank()].split(8)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def write(model: nn.Module, loss: torch.Tensor, output: str) -> None:
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        weights = [parameter.tolist() for parameter in model.parameters()]
        found = {"backend": dist.get_backend(), "loss": loss.item(), "weights": weights}
        Path(output).write_text(json.dumps(found))


def lightning(backend: str, output: str) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.last = network(), torch.zeros(())

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            self.last = loss_of(self.model, x)
            return self.last

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Regression()
    data: Any = torch.utils.data.DataLoader(samples(), batch_size=8)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, data)
    write(module, module.last, output)


def ray(backend: str, output: str) -> None:
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    def train(config: dict[str, str]) -> None:
        model = prepare_model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in own_batches():
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
        write(model, loss, config["output"])

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    TorchTrainer(
        train,
        train_loop_config={"output": output},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    ).fit()


def deepspeed(backend: str, output: str) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend)
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    for x in own_batches():
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()
    write(model, loss, output)


if __name__ == "__main__":
    {f.__name__: f for f in (lightning, ray, deepspeed)}[sys.argv[1]](*sys.argv[2:])
