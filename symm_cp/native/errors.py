"""Errors and messages about a native part that cannot be built or loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from symm_cp import env, trusted


class BuildError(RuntimeError):
    """The native part could not be built or loaded; the message says what to do about it."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns system errors into a `BuildError` that says what to do."""
    try:
        yield
    except trusted.UntrustedError as error:
        raise BuildError(
            f"the native part of symm_cp is not used, as another user could change it: {error}; "
            "make it yours alone (chown, chmod go-w), or set SYMM_CP_BUILD_DIR to a folder that "
            "only you can write"
        ) from error
    except env.NoHomeError as error:
        raise BuildError(f"the native part of symm_cp has no folder: {error}") from error
    except OSError as error:
        raise BuildError(
            f"the native part of symm_cp cannot be read or built: {error}; set SYMM_CP_BUILD_DIR "
            "to a folder that you can write, or have the owner of a shared build open it to you "
            "(chmod -R a+rX)"
        ) from error


def say(text: str, end: str = "\n") -> None:
    """Prints a line on stderr, if stderr exists and is writable."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"symm_cp: {text}", file=sys.stderr, end=end, flush=True)
