"""The process that rank processes are forked from, with the imports that each of them needs.

Python's fork server (`multiprocessing`) imports this module once, after the modules that the pool
preloads, and before it forks anything.
"""

from __future__ import annotations

import contextlib
import os

from symm_cp import native
from symm_cp.ranks import die_with
from symm_cp.testing.process import collect_garbage_seldom

die_with(os.getppid())
with contextlib.suppress(native.BuildError):  # each rank raises it again
    native.load()
    native.build_glue()
# So that ranks do not search the objects so far for garbage, which would copy their memory.
collect_garbage_seldom()
