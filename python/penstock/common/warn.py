"""`warn`: reports a problem of an operation that has not failed and continues."""

from __future__ import annotations

import sys
import warnings

from penstock.errors import PenstockWarning


def warn(message: str) -> None:
    """Issues a `PenstockWarning` at the package's caller.

    Never raises: if warnings are errors, the operation has not failed all the same, and the message
    is written to standard error.
    """
    try:
        warnings.warn(message, PenstockWarning, stacklevel=_depth())
    except PenstockWarning:
        sys.stderr.write(f"penstock: {message}\n")


def _depth() -> int:
    """Returns the stack level of the package's caller, as `warnings.warn` counts from `warn`."""
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("penstock."):
        frame = frame.f_back
        depth += 1
    return depth
