"""`Sealing`: for whom checkpoints are sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.held_keys import HeldKeys
from penstock.errors import CannotSealError
from penstock.sealing.kms import CLIENTS
from penstock.sealing.passphrase import Key, to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Sealing"]


class Sealing(HeldKeys):
    """Seals checkpoints for recipients: each of them can open every one.

    Keys are read and callables called when the object is made, so a wrong key stops a run before
    its first save. A key management service is called at the first save, and then once a day: it
    encrypts a key of the process, which encrypts the key of each checkpoint. While the service is
    not reachable, saves continue with that key until its day has passed.

    Args:
        recipients: Keys: see `penstock.sealing`. At most 256.

    Raises:
        KeyFileError: A string or a file is no key, or there is none; a `ValueError` too.
        StorageError: A file cannot be read; an `OSError` too.
        TypeError: A recipient has the wrong type.

    Example:
        >>> Sealing(["aws-kms://arn:aws:kms:eu-west-1:111122223333:key/team"])
        Sealing(recipients=['aws-kms://arn:aws:kms:eu-west-1:111122223333:key/team'])
    """

    __slots__ = ()

    native: _native.Recipients
    """The keys as the native module wraps for them."""

    def __init__(self, recipients: Key | Iterable[Key]) -> None:
        self.native = _native.Recipients(to_native(recipients, "recipients"), CLIENTS)

    @property
    def recipients(self) -> tuple[str, ...]:
        """The recipients in public: ``age1…``, ``ssh-…``, a URI, a fingerprint, ``passphrase``."""
        return tuple(self.native.names())

    def wrap_new(self) -> _native.AttemptKey:
        """Draws the data key of one attempt, and wraps it for each recipient.

        Raises:
            KmsError: A key management service refused or was not reachable.
            MissingDependencyError: The client of a service is not installed.
        """
        return self.native.draw()

    def wrap(self, key: _native.AttemptKey) -> str:
        """Wraps a data key for each recipient; returns the wraps as JSON.

        Raises:
            KmsError: A key management service refused or was not reachable.
            MissingDependencyError: The client of a service is not installed.
        """
        return self.native.wrap(key)

    def shown(self) -> str:
        """Returns the keys in public."""
        return f"recipients={list(self.recipients)}"


def check_sealing(sealing: object) -> None:
    """Refuses anything but a `Sealing` or None.

    Raises:
        TypeError: It is something else, such as a key.
    """
    if not isinstance(sealing, Sealing | None):
        raise TypeError(f"sealing: must be a penstock.Sealing, not {type(sealing).__name__}")


def refuse_sealing(sealing: object, path: str, remedy: str) -> None:
    """Refuses a `Sealing` for a job that leaves clear bytes, before it writes anything.

    Args:
        sealing: The argument; None is not refused.
        path: The place of the files.
        remedy: The job that seals, or advice, as the end of the message.

    Raises:
        CannotSealError: It is a `Sealing`.
        TypeError: It is something else, such as a key.
    """
    check_sealing(sealing)
    if sealing is not None:
        raise CannotSealError(f"{path}: its files are not sealed yet: {remedy}", path=path)
