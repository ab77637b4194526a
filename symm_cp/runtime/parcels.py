"""An exchange of parcels by messages that are given and taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.group.memory import Group
from symm_cp.runtime.api import Parcels, Runtime


def exchange_parcels(
    runtime: Runtime,
    group: Group,
    parcels: Parcels,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    call_name: bytes,
) -> None:
    """`Runtime.exchange` by a runtime's `exchange_and_consume`: each part is copied twice."""
    runtime.exchange_and_consume(
        group,
        lambda to, memory: parcels.give(tensors, to, memory),
        lambda: parcels.keep(tensors, outputs),
        lambda source, memory: parcels.take(outputs, source, memory),
        tensors[0].device,
        call_name,
        sizes=parcels.sizes,
    )
