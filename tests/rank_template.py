"""The process that rank processes are forked from: it has imported what each of them needs.

Python's fork server (`multiprocessing`) imports this module, once, before it forks anything.
"""

from __future__ import annotations

import contextlib
import os

# What many tests import at first use.
import numpy.random  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.tensor  # noqa: F401
import transformers.modeling_utils
import transformers.models.llama.modeling_llama  # noqa: F401

import symm_cp.inductor  # noqa: F401
from symm_cp import native
from tests.rank_process import collect_garbage_seldom, die_with

die_with(os.getppid())
with contextlib.suppress(native.BuildError):  # each rank says why
    native.load()
    native.build_glue()
# What there is now is neither searched by ranks nor, for that, copied to them.
collect_garbage_seldom()
