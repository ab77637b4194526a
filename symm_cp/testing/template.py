"""The process that rank processes are forked from: it has imported what each of them needs.

Python's fork server (`multiprocessing`) imports this module, once, after the modules that the pool
was told to preload, and before it forks anything.
"""

from __future__ import annotations

import contextlib
import os

from symm_cp import native
from symm_cp.ranks import die_with
from symm_cp.testing.process import collect_garbage_seldom

die_with(os.getppid())
with contextlib.suppress(native.BuildError):  # each rank says why
    native.load()
    native.build_glue()
# What there is now is neither searched by ranks nor, for that, copied to them.
collect_garbage_seldom()
