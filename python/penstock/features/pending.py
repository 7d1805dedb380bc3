"""`PendingRows`: rows that are being gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import TransferError
from penstock.io.notifier import bell_of_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock import _native


class PendingRows:
    """Rows that are being gathered. It may be dropped: they come, and hold on to their memory.

    Rows that go to a device are there for what the stream gets that is current when `result` is
    called: it waits for their copy, the host does not. Without `result` nothing waits for it.

    It can be awaited too, which is `result`.

    Attributes:
        rows: The result, not to be used before it is done.
    """

    __slots__ = ("__weakref__", "_check", "_finish", "_native", "rows")

    def __init__(
        self,
        native: _native.RowBatch | _native.DeviceRowBatch,
        rows: Any,
        check: Callable[[], None],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._native = native
        self._check = check
        self._finish = finish
        self.rows = rows

    def done(self) -> bool:
        """Whether nothing of it is under way; never so in a fork of the process that reads."""
        return self._native.done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits until all rows are there, or on their way to a device.

        Args:
            timeout: For how many seconds at most; for ever without.

        Returns:
            The rows.

        Raises:
            TransferError: Bytes cannot be read.
            CorruptCheckpointError: A file has changed, or bytes are not those that were written.
            TimeoutError: They are not there in time; they come later.
            DeviceError: The stream of the device is being captured, or its driver fails.
            PenstockError: This process is a fork of the one that reads.
        """
        try:
            is_there = self._native.wait(timeout)
        except TransferError:
            # What a file was cut to, or replaced by, says why more than where the read ended.
            self._check()
            raise
        if not is_there:
            raise TimeoutError(f"the rows are not there after {timeout} s")
        # Behind the reads: what a file was before says nothing of what came.
        self._check()
        if self._finish is not None:
            self._finish()
        return self.rows

    def __await__(self) -> Generator[None, None, Any]:
        if not self.done():
            yield from bell_of_loop().wait(self._native, lambda: None).__await__()
        return self.result()

    def __repr__(self) -> str:
        return f"<PendingRows {'done' if self.done() else 'under way'}>"
