"""Makes tensors that are kept for later calls, independent of the caller's modes.

A view or a mask that is kept must be an ordinary tensor. Under the caller's modes it could become
an inference tensor, which training must not write to, a fake one, or one on another default device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Makes ordinary tensors without gradients inside the `with` block.

    Disables inference mode, autograd, `TorchFunctionMode`s (`torch.device` and
    `set_default_device` among them), `TorchDispatchMode`s (`FakeTensorMode` among them).
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
    ):
        yield
