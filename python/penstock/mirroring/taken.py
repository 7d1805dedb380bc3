"""What is said where a mirror holds another checkpoint than the store at a step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import CheckpointExistsError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def telling_of_another() -> Iterator[None]:
    """Has the error say what a mirror can do about it, which replaces nothing.

    Raises:
        CheckpointExistsError: Another checkpoint is there.
    """
    try:
        yield
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{error.path} holds another checkpoint, which stays: delete it there, or mirror to "
            "another URL",
            path=error.path,
        ) from None
