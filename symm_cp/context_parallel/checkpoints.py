"""Checkpoints of a region recompute in that region, wherever the backward pass runs.

They draw the same random numbers again, also with `preserve_rng_state=False`.

`torch.utils.checkpoint` calls its function again in the backward pass, which a program may run
after the context: attention would then see this rank's part of the sequence only. No torch function
mode sees a checkpoint, so while a region is active, both forms of checkpoint get a function that
enters the region again if it is not active.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from symm_cp.context_parallel import random_numbers
from symm_cp.context_parallel.flex_hook import current_mode
from symm_cp.context_parallel.while_used import WhileUsed

# The classes that call the function again: with `use_reentrant=True`, and without. The second is
# private; if torch drops it, recomputing outside the region raises CheckpointError, because it
# saves fewer tensors.
_REENTRANT: Any = torch_checkpoint.CheckpointFunction
_FRAME: Any = getattr(torch_checkpoint, "_CheckpointFrame", None)


def _in_its_region(body: Callable[..., Any], *, forward: bool) -> Callable[..., Any]:
    """Returns a function that recomputes in the innermost region of this thread, if there is one.

    `forward`: the first call is the forward pass.
    """
    mode = current_mode()
    if mode is None:
        return body
    state = random_numbers.state()

    def within(*args: Any, **kwargs: Any) -> Any:
        nonlocal forward
        if forward:
            forward = False
            return body(*args, **kwargs)
        active = current_mode()
        again = nullcontext() if active and active.region is mode.region else mode.again()
        with again, random_numbers.recomputing(state):
            return body(*args, **kwargs)

    return within


def _replace() -> Callable[[], None]:
    """Replaces torch's functions; returns a function that restores them."""
    forward, init = _REENTRANT.forward, _FRAME and _FRAME.__init__

    def run(ctx: Any, body: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _in_its_region(body, forward=True), *args)

    def remember(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(frame, _in_its_region(recompute, forward=False), *args, **kwargs)

    def restore() -> None:
        _REENTRANT.forward = staticmethod(forward)
        if _FRAME is not None:
            _FRAME.__init__ = init

    _REENTRANT.forward = staticmethod(run)
    if _FRAME is not None:
        _FRAME.__init__ = remember
    return restore


#: Has checkpoints recompute in the region of their forward pass; those of threads without a region
#: are unchanged.
checkpoint_hook = WhileUsed(_replace)
