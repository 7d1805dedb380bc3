"""`SealingKeys`: the keys with which a plug-in seals, signs, opens and checks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.common.secret_texts import is_secret
from penstock.errors import (
    CannotSealError,
    KeyFileError,
    KmsError,
    NotSealedError,
    NotSignedError,
    SealedError,
    SignatureError,
    TamperedError,
    UnsupportedStateError,
    WrongKeyError,
)
from penstock.sealing.identities import Identities
from penstock.sealing.sealing import Sealing, check_sealing
from penstock.sealing.unsealing import Unsealing
from penstock.signing import Signers, SigningKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.sealing.passphrase import Key
    from penstock.signing import SignatureKey


AGAINST_KEYS = (
    TamperedError,
    WrongKeyError,
    KmsError,
    SealedError,
    NotSealedError,
    SignatureError,
)
"""Errors after which nobody goes back to an older checkpoint by itself.

A writer to the storage can cause them, and would choose the checkpoint of the run.
"""

RECIPIENTS = "PENSTOCK_RECIPIENTS"
"""The environment variable with recipients, for plug-ins that have no options."""


def _check_public(name: str, keys: Sequence[str]) -> None:
    for index, key in enumerate(keys):
        if is_secret(key):
            raise KeyFileError(
                f"{name}[{index}] is a secret key, and configurations are logged and stored: give "
                "the path of its file"
            )


class SealingKeys(NamedTuple):
    """The keys with which a plug-in saves and loads, by its options.

    The options are ``sealing``, ``identities``, ``sign`` and ``signed_by``. Each of the first two
    demands sealed checkpoints, and refuses clear ones; ``signed_by`` refuses those that no accepted
    key has signed.

    Attributes:
        sealing: For whom checkpoints are sealed; None for clear ones.
        identities: As `penstock.load` and `penstock.inspect` take them.
        signers: The keys of which one must have signed what is loaded; None to look at no
            signature.
        signing: The keys that sign what is saved; None for none.
    """

    sealing: Sealing | None = None
    identities: Identities | None = None
    signers: Signers | None = None
    signing: SigningKeys | None = None

    @classmethod
    def of(
        cls,
        sealing: Sealing | None = None,
        identities: Identities | Key | Iterable[Key] | None = None,
        *,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> Self:
        """Returns the keys by the arguments of a plug-in.

        Args:
            sealing: For whom checkpoints are sealed; None for clear ones.
            identities: Keys that open sealed checkpoints; None for the file that
                ``PENSTOCK_IDENTITIES`` names, if any.
            signed_by: Public keys of which one must have signed what is loaded.
            sign: Private keys that sign what is saved.

        Raises:
            KeyFileError: An identity or a signing key is no secret key, or a signer no public one.
            StorageError: A file of keys cannot be read.
            TypeError: An argument has the wrong type.
        """
        check_sealing(sealing)
        found = None
        if sealing is not None or identities is not None:
            found = Identities.resolve(identities) or Identities.none()
        return cls(sealing, found, Signers.resolve(signed_by), SigningKeys.resolve(sign))

    @classmethod
    def of_lists(
        cls,
        recipients: Sequence[str],
        identities: Sequence[str],
        signers: Sequence[str] = (),
        signing: Sequence[str] = (),
    ) -> Self:
        """Returns the keys by the lists of a configuration, of which an empty one stands for None.

        Args:
            recipients: Recipients: public keys, URIs or paths.
            identities: Paths of files with identities, or URIs.
            signers: Public keys, or paths of files with them.
            signing: Paths of files with private keys.

        Raises:
            KeyFileError: A key is none, or stands in the configuration itself.
            StorageError: A file cannot be read.
            TypeError: A key has the wrong type.
        """
        _check_public("sealing", recipients)
        _check_public("identities", identities)
        _check_public("sign", signing)
        return cls.of(
            Sealing(recipients) if recipients else None,
            identities or None,
            signed_by=signers or None,
            sign=signing or None,
        )

    @classmethod
    def of_environment(cls) -> Self:
        """Returns the keys of a plug-in that has no options: those that the environment names.

        ``PENSTOCK_RECIPIENTS`` is a public key, a URI, or the path of a file of recipients. Without
        it checkpoints are clear. With it, clear ones are refused.

        Raises:
            KeyFileError: A key is none, or ``PENSTOCK_RECIPIENTS`` holds a secret.
            StorageError: A file cannot be read.
        """
        value = os.environ.get(RECIPIENTS, "").strip()
        return cls.of_lists([value] if value else [], [])

    @property
    def can_open(self) -> bool:
        """Whether there are identities of these keys, which may yet be the wrong ones."""
        return self.identities is not None and self.identities.native is not None

    @property
    def is_demanded(self) -> bool:
        """Whether clear checkpoints are refused."""
        return self.identities is not None

    @property
    def refuses_others(self) -> bool:
        """Whether checkpoints of other libraries are refused, as they are clear and not signed."""
        return self.is_demanded or self.signers is not None

    @property
    def unsealing(self) -> Unsealing:
        """How checkpoints are opened."""
        return Unsealing.of(self.identities, signed_by=self.signers)

    @property
    def opening(self) -> dict[str, Any]:
        """The arguments of `penstock.load` that open and check a checkpoint."""
        return {"identities": self.identities, "signed_by": self.signers}

    @property
    def closing(self) -> dict[str, Any]:
        """The arguments of a `penstock.Saver` that seal and sign a checkpoint."""
        return {"sealing": self.sealing, "sign": self.signing}

    def refuse_clear(self, path: str, what: str) -> None:
        """Refuses another library's checkpoint where sealed or signed ones are demanded.

        Args:
            path: Its path.
            what: Whose checkpoint it is, such as ``"a checkpoint of Accelerate's own"``.

        Raises:
            NotSealedError: Sealed checkpoints are demanded, and this one is clear.
            NotSignedError: Signed checkpoints are demanded, and this one is not.
        """
        if self.is_demanded:
            raise NotSealedError(
                f"{path} is {what}, which is clear, and a sealed one is demanded; find out who put "
                "it there; to load it, leave sealing= and identities= out",
                path=path,
            )
        if self.signers is not None:
            raise NotSignedError(
                f"{path} is {what}, which nobody has signed, and a signed one is demanded; find "
                "out who put it there; to load it, leave signed_by= out",
                path=path,
            )

    def refuse_sealing(self, path: str, what: str) -> None:
        """Refuses a save that would leave something clear.

        Args:
            path: The checkpoint's directory.
            what: What would stay clear, and why.

        Raises:
            CannotSealError: Checkpoints are sealed.
        """
        if self.sealing is not None:
            raise CannotSealError(
                f"{path}: {what}; leave that out, or save without sealing=", path=path
            )

    def refuse_signing(self, path: str, what: str) -> None:
        """Refuses a save that would leave something unsigned.

        Args:
            path: The checkpoint's directory.
            what: What would have no signature, and why.

        Raises:
            UnsupportedStateError: Checkpoints are signed.
        """
        if self.signing is not None:
            raise UnsupportedStateError(
                f"{path}: {what}; leave that out, or save without sign=", key="sign"
            )
