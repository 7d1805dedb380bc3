"""`Waiting`: what whoever saves in the background has to wait with, and to end with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint.saving.save_queue import Turns


class Waiting:
    """Saves one after the other, of which the last may go on; a ``with`` block ends by waiting."""

    _turns: Turns

    def wait(self) -> None:
        """Waits for the last `save_async`, if one is running.

        Raises:
            PenstockError: Its error, if nobody has seen it.
        """
        self._turns.wait()

    def close(self) -> None:
        """Waits for the last `save_async` and gives its memory back; this stays usable.

        Raises:
            PenstockError: The error of that save, if nobody has seen it.
        """
        self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PenstockError as failed:
            if error is None:
                raise
            # What ended the block is what its caller has to hear.
            error.add_note(f"and a save in the background failed: {failed}")
