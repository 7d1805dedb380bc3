"""`PendingRows`: a gather in progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import TransferError
from penstock.io.notifier import notifier_of_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock import _native


class PendingRows:
    """Rows that are being gathered. It may be dropped: the reads finish, and hold their memory.

    For rows on a device, `result` makes the stream that is current at its call wait for their copy;
    the host does not wait for the copy. Without `result` no stream waits for it.

    ``await`` does the same as `result`.

    Attributes:
        rows: The result, not to be used before it is done.
    """

    __slots__ = ("__weakref__", "_check", "_finish", "_native", "rows")

    def __init__(
        self,
        native: _native.RowBatch | _native.DeviceRowBatch | _native.Transfer,
        rows: Any,
        check: Callable[[], None],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._native = native
        self._check = check
        self._finish = finish
        self.rows = rows

    def done(self) -> bool:
        """Whether all reads have ended; always False in a fork of the process that reads."""
        return self._native.done()

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Waits until all rows are read, or their copy to a device is queued.

        Args:
            timeout_seconds: Most seconds to wait; None to wait for ever.

        Returns:
            The rows.

        Raises:
            TransferError: Bytes cannot be read.
            CorruptCheckpointError: A file has changed, or bytes are not those that were written.
            TimeoutError: The rows were not read in time; the reads go on.
            DeviceError: The stream of the device is being captured, or its driver fails.
            PenstockError: This process is a fork of the one that reads.
        """
        try:
            is_there = self._native.wait(timeout_seconds)
        except TransferError:
            # A truncated or replaced file explains the failure better than the read's end does.
            self._check()
            raise
        if not is_there:
            raise TimeoutError(f"the rows are not there after {timeout_seconds} s")
        # After the reads, as a check before them says nothing about the bytes read.
        self._check()
        if self._finish is not None:
            self._finish()
        return self.rows

    def __await__(self) -> Generator[None, None, Any]:
        if not self.done():
            yield from notifier_of_loop().wait(self._native, lambda: None).__await__()
        return self.result()

    def __repr__(self) -> str:
        return f"<PendingRows {'done' if self.done() else 'under way'}>"
