"""`BackgroundSaver`: waiting and closing, common to all objects that save in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint.saving.save_queue import SaveQueue


class BackgroundSaver:
    """Runs one save at a time, perhaps in the background; a ``with`` block ends by waiting."""

    _save_queue: SaveQueue

    def wait(self) -> None:
        """Waits for the last `save_async`, if one is running.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        self._save_queue.wait()

    def close(self) -> None:
        """Waits for the last `save_async` and releases its memory; this object stays usable.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        self._save_queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PenstockError as failed:
            if error is None:
                raise
            # The error that ended the block takes precedence.
            error.add_note(f"and a save in the background failed: {failed}")
