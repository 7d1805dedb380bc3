"""`Unsealing`: how a load opens sealed checkpoints, and whether it takes clear ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from penstock import _native
from penstock.sealing.identities import Identities

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sealing.passphrase import Key


class Unsealing(NamedTuple):
    """Identities, and whether clear checkpoints are refused.

    Attributes:
        native: The identities; None to open clear checkpoints only.
        is_demanded: Whether a clear checkpoint is refused.
    """

    native: _native.Identities | None = None
    is_demanded: bool = False

    @classmethod
    def of(
        cls, identities: Identities | Key | Iterable[Key] | None, *, is_demanded: bool = False
    ) -> Self:
        """Returns the unsealing by an argument ``identities``.

        Identities from the environment open sealed checkpoints and do not demand them: the variable
        holds for all checkpoints that a process reads, also for clear ones of others.

        Args:
            identities: The argument; None for the file that ``PENSTOCK_IDENTITIES`` names, if any.
            is_demanded: Whether a clear checkpoint is refused although no identities are given.

        Raises:
            KeyFileError: An identity is no secret key.
            StorageError: A file of identities cannot be read.
            TypeError: An identity has the wrong type.
        """
        found = Identities.resolve(identities)
        native = None if found is None else found.native
        return cls(native, is_demanded or identities is not None)

    def open(self, path: str) -> _native.Checkpoint:
        """Opens the checkpoint at a path.

        Raises:
            SealedError: It is sealed, and there are no identities.
            NotSealedError: It is clear, and a sealed one is demanded.
            WrongKeyError: The identities do not open it.
            TamperedError: Somebody without the key has changed it.
        """
        return _native.open(path, self.native, demanded=self.is_demanded)


CLEAR = Unsealing()
"""Opens clear checkpoints only."""
