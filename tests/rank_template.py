"""The process that rank processes are forked from: it has imported what each of them needs.

Python's fork server (`multiprocessing`) imports this module, once, before it forks anything. Triton
must not be among the imports: ranks may choose its interpreter, which has to happen before.
"""

from __future__ import annotations

import contextlib
import os

import torch.distributed.tensor  # noqa: F401 - what gradients import at first use

from symm_cp import native
from tests.rank_process import die_with

die_with(os.getppid())
with contextlib.suppress(native.BuildError):  # each rank says why
    native.load()
    native.build_glue()
