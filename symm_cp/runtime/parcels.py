"""An exchange of parcels as one of messages that are produced and taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.memory import Group
from symm_cp.runtime.api import Parcels, Runtime


def exchange_parcels(
    runtime: Runtime,
    group: Group,
    parcels: Parcels,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    call_name: bytes,
) -> None:
    """`Runtime.exchange` by a runtime's `produce_and_exchange`: each part is copied twice."""
    runtime.produce_and_exchange(
        group,
        lambda to, memory: parcels.give(tensors, to, memory),
        lambda: parcels.keep(tensors, outputs),
        lambda source, memory: parcels.take(outputs, source, memory),
        tensors[0],
        call_name,
        counts=parcels.counts,
    )
