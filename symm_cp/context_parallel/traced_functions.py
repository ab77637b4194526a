"""Has Dynamo show torch's random functions to the modes of torch functions, as eager code does."""

from __future__ import annotations

import sys

import torch

# Those that take a tensor for its shape only: `torch.overrides` does not list them as overridable.
# Dynamo itself adds `torch.zeros_like` and its kin.
_MISSING = (torch.rand_like, torch.randn_like, torch.randint_like, torch.normal)


def show_random_functions() -> None:
    """Adds them to Dynamo's set of overridable functions, if Dynamo is loaded."""
    module = sys.modules.get("torch._dynamo.variables.torch")
    listed = getattr(module, "get_overridable_functions", None)
    functions = listed() if listed is not None else None
    if isinstance(functions, set):
        functions.update(_MISSING)
