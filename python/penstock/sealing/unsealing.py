"""`Unsealing`: how a load opens sealed checkpoints, and whether it takes clear or unsigned ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from penstock import _native
from penstock.errors import NotSealedError, NotSignedError
from penstock.sealing.identities import Identities
from penstock.signing.signers import Signers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sealing.passphrase import Key
    from penstock.signing.values import SignatureKey


class Unsealing(NamedTuple):
    """Identities, and whether clear and unsigned checkpoints are refused.

    Attributes:
        native: The identities; None to open clear checkpoints only.
        is_demanded: Whether a clear checkpoint is refused.
        signers: The keys of which one must have signed the checkpoint; None to look at no
            signature.
    """

    native: _native.Identities | None = None
    is_demanded: bool = False
    signers: _native.Signers | None = None

    @classmethod
    def of(
        cls,
        identities: Identities | Key | Iterable[Key] | None,
        *,
        is_demanded: bool = False,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> Self:
        """Returns the unsealing by the arguments ``identities`` and ``signed_by``.

        Identities from the environment open sealed checkpoints and do not demand them: the variable
        holds for all checkpoints that a process reads, also for clear ones of others.

        Args:
            identities: The argument; None for the file that ``PENSTOCK_IDENTITIES`` names, if any.
            is_demanded: Whether a clear checkpoint is refused although no identities are given.
            signed_by: Keys of which one must have signed the checkpoint; None to look at none.

        Raises:
            KeyFileError: An identity is no secret key, or a signer no public key.
            StorageError: A file of keys cannot be read.
            TypeError: A key has the wrong type.
        """
        found = Identities.resolve(identities)
        native = None if found is None else found.native
        signers = Signers.resolve(signed_by)
        return cls(
            native,
            is_demanded or identities is not None,
            None if signers is None else signers.native,
        )

    @property
    def refuses_some(self) -> bool:
        """Whether a checkpoint that is open already has to be opened again, to be refused."""
        return self.is_demanded or self.signers is not None

    def refuse_other(self, name: str, path: str) -> None:
        """Refuses a file of another format, if a sealed or a signed one is asked for.

        Args:
            name: Whose files they are, for the message.
            path: Their path; empty if there are several.

        Raises:
            NotSealedError: Sealed ones are demanded.
            NotSignedError: Signed ones are demanded.
        """
        what = f"{name} is not a checkpoint of Penstock, so not"
        if self.is_demanded:
            raise NotSealedError(
                f"{what} sealed, and identities= are given: find out who put it there, or leave out"
                " identities=",
                path=path,
            )
        if self.signers is not None:
            raise NotSignedError(
                f"{what} signed, and signed_by= is given: find out who put it there, or leave out"
                " signed_by=",
                path=path,
            )

    def open(self, path: str) -> _native.Checkpoint:
        """Opens the checkpoint at a path.

        Raises:
            SealedError: It is sealed, and there are no identities.
            NotSealedError: It is clear, and a sealed one is demanded.
            WrongKeyError: The identities do not open it.
            TamperedError: Somebody without the key has changed it.
            SignatureError: No accepted key has signed it.
        """
        return _native.open(path, self.native, demanded=self.is_demanded, signers=self.signers)


CLEAR = Unsealing()
"""Opens clear checkpoints only."""
