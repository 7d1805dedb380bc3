"""`EndMark`: lets another process wait for the end of a save that runs in this one.

Megatron-Core runs the work of an `AsyncRequest` in another process, forked or spawned, and takes
the save for done when that work returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile


class EndMark:
    """A file that this process keeps locked until the save has ended.

    The lock is of the kind that a fork does not inherit, and that ends with the process.

    Attributes:
        path: The file, for `wait_for_end`.
    """

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="penstock-save-")
        self._file = os.fdopen(descriptor, "wb")
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Ends the waits."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._file.close()


def wait_for_end(path: str) -> None:
    """Waits until the save of another process has ended, successfully or not.

    Args:
        path: The file of its `EndMark`.
    """
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return
