"""Errors about the copy of a step, with their remedies."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import CheckpointExistsError, CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def explaining_conflict(there: str) -> Iterator[None]:
    """Adds remedies to errors about the copy of a step, as a mirror replaces nothing.

    Args:
        there: The path of the copy, whether it exists or not.
    """
    try:
        yield
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{error.path} holds another checkpoint, which stays: delete it there, or mirror to "
            "another URL",
            path=error.path,
        ) from None
    except CorruptCheckpointError as error:
        if error.path == there:
            error.add_note(f"remove all objects below {there}/, and the step is copied again")
        raise
