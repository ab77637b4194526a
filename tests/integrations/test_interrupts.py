"""Ctrl-C in a step of a model within a context: it ends soon, and the next step is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import symm_cp
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive
from tests.integrations.common import assert_near, causal_batch, in_one_process
from tests.integrations.decoders import CLIENTS
from tests.integrations.test_faults import step
from tests.patience import patient

LENGTH = 24
CLIENT = CLIENTS["mistral"]
SOON = 0.2  # seconds
PLACES = ("forward", "backward", "wait in forward", "wait in backward")


class Strike:
    """Sends Ctrl-C, at once or while the rank waits for its peer."""

    def __init__(self, delay: float) -> None:
        self.delay, self.at = delay, 0.0

    def __call__(self, *_: Any) -> None:
        if self.delay:
            threading.Timer(self.delay, self.send).start()
        else:
            self.send()

    def send(self) -> None:
        self.at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)


def prepare(model: nn.Module, rank: int, place: str) -> Strike:
    """Interrupts rank 1 in the first layer, or in an attention that rank 0 reaches late."""
    strike = Strike(0.2 if "wait" in place else 0.0)
    backward = "backward" in place
    mlp = model.model.layers[int(backward)].mlp
    hook = mlp.register_full_backward_hook if backward else mlp.register_forward_hook
    if rank == 1:
        hook(strike)
    elif "wait" in place:
        hook(lambda *_: time.sleep(0.8))
    return strike


@exhaustive
@pytest.mark.ranks(2)
def test_ctrl_c(group: dist.ProcessGroup) -> None:
    mesh, batch, rank = mesh_of(group), causal_batch(LENGTH, masked=False), group.rank()
    expected = in_one_process(CLIENT, batch)
    balancer = symm_cp.HeadTail(LENGTH, group.size())
    local, reduce_loss = symm_cp.shard_batch(mesh, dict(batch), load_balancer=balancer)
    labels = local.pop("labels")
    for place in PLACES:
        for interrupted in (True, False):
            model = CLIENT.make("eager").train()
            region = symm_cp.context_parallel(mesh, model=model, load_balancer=balancer)
            if not interrupted:
                loss = step(model, local, labels, region, reduce_loss)
                assert_near(f"loss after {place}", loss, expected.loss, CLIENT.tolerance)
                continue
            strike = prepare(model, rank, place)
            if rank == 1:
                before = signal.signal(signal.SIGINT, signal.default_int_handler)
                with pytest.raises(KeyboardInterrupt):
                    step(model, local, labels, region, reduce_loss)
                took = time.monotonic() - strike.at
                signal.signal(signal.SIGINT, before)
                assert took < patient(SOON), (place, took)
            else:
                with pytest.raises(RuntimeError, match=r"rank 1 failed: .*(interrupt|Keyboard)"):
                    step(model, local, labels, region, reduce_loss)
