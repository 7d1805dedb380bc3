"""Who can open a sealed checkpoint: listed, added, removed, replaced."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from penstock import _native
from penstock.errors import KeyFileError, NotSealedError
from penstock.sealing.identities import Identities
from penstock.sealing.sealing import Sealing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.sealing.passphrase import Key

__all__ = ["Recipient", "add_recipients", "recipients", "remove_recipients", "rotate"]


class Recipient(NamedTuple):
    """A recipient of a sealed checkpoint.

    Attributes:
        kind: ``"age"`` for X25519 and ssh keys, ``"key-file"``, ``"passphrase"`` or ``"kms"``.
        name: The recipient in public: ``age1…``, ``ssh-…``, a fingerprint, a URI; of a passphrase,
            how a key is derived from it.
    """

    kind: str
    name: str


def recipients(path: str | os.PathLike[str]) -> list[Recipient]:
    """Lists the recipients of a sealed checkpoint. This takes no key.

    The list is not authenticated: whoever writes to the storage can change it, and gains nothing.

    Args:
        path: The checkpoint's directory.

    Returns:
        The recipients, in the order of the manifest.

    Raises:
        CheckpointNotFoundError: No checkpoint is stored at the path.
        NotSealedError: The checkpoint is clear.
        CorruptCheckpointError: The manifest is damaged.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> from penstock import sealing
        >>> home = tempfile.mkdtemp()
        >>> first, second = (sealing.generate(f"{home}/{name}") for name in ("me", "you"))
        >>> path = f"{home}/step-1"
        >>> _ = penstock.save(path, {"w": np.ones(3)}, sealing=penstock.Sealing([first]))
        >>> [name == first for kind, name in sealing.recipients(path)]
        [True]
        >>> len(sealing.add_recipients(path, [second], identities=[f"{home}/me"]))
        2
        >>> penstock.load(path, identities=[f"{home}/you"])
        {'w': array([1., 1., 1.])}
        >>> [name == second for kind, name in sealing.remove_recipients(path, [first])]
        [True]
    """
    where = os.fspath(path)
    with _of_clear(where):
        return _listed(_native.read_recipients(where))


def add_recipients(
    path: str | os.PathLike[str],
    recipients: Key | Iterable[Key],
    *,
    identities: Identities | Key | Iterable[Key] | None = None,
) -> list[Recipient]:
    """Adds recipients to a sealed checkpoint. Its manifest is replaced; no data is read or written.

    Waits up to ten seconds for loads and saves of the checkpoint to end.

    Args:
        path: The checkpoint's directory.
        recipients: Keys: see `penstock.sealing`. One that is there already is wrapped for anew.
        identities: Keys that open the checkpoint; None for the file that ``PENSTOCK_IDENTITIES``
            names.

    Returns:
        All recipients.

    Raises:
        KeyFileError: A key is none, or no identities are given.
        WrongKeyError: The identities do not open the checkpoint.
        TamperedError: Somebody without the key has changed the manifest.
        NotSealedError: The checkpoint is clear.
        KmsError: A key management service refused or was not reachable.
        StorageError: The checkpoint is in use (``errno.EBUSY``), or the system refused.
    """
    return _rewrapped(path, recipients, identities, replaces=False)


def rotate(
    path: str | os.PathLike[str],
    recipients: Key | Iterable[Key],
    *,
    identities: Identities | Key | Iterable[Key] | None = None,
) -> list[Recipient]:
    """Replaces all recipients of a sealed checkpoint by others, as `add_recipients` adds some.

    The data key stays the same: a former recipient who kept it can still read copies of the data.
    Save again, sealed for others, to take a checkpoint from somebody who could open it.

    Args:
        path: The checkpoint's directory.
        recipients: Keys: see `penstock.sealing`.
        identities: Keys that open the checkpoint; None for the file that ``PENSTOCK_IDENTITIES``
            names.

    Returns:
        The new recipients.

    Raises:
        PenstockError: As for `add_recipients`.
    """
    return _rewrapped(path, recipients, identities, replaces=True)


def remove_recipients(path: str | os.PathLike[str], names: Iterable[str]) -> list[Recipient]:
    """Removes recipients from a sealed checkpoint. This takes no key.

    A former recipient cannot open the checkpoint any more. Copies that it has made, and a data key
    that it has kept, stay its own.

    Args:
        path: The checkpoint's directory.
        names: Recipients in public, as `recipients` lists them.

    Returns:
        The recipients that are left.

    Raises:
        KeyFileError: A name is none of the recipients, or nobody would be left.
        NotSealedError: The checkpoint is clear.
        StorageError: The checkpoint is in use (``errno.EBUSY``), or the system refused.
    """
    names = [names] if isinstance(names, str) else list(names)
    where = os.fspath(path)
    with _of_clear(where):
        return _listed(_native.rewrap(where, removed=names))


def _rewrapped(
    path: str | os.PathLike[str],
    recipients: Key | Iterable[Key],
    identities: Identities | Key | Iterable[Key] | None,
    *,
    replaces: bool,
) -> list[Recipient]:
    found = Identities.resolve(identities)
    if found is None:
        raise KeyFileError(
            "identities: there are none; pass identities=, or name a file by PENSTOCK_IDENTITIES"
        )
    sealing, where = Sealing(recipients), os.fspath(path)
    with _of_clear(where):
        return _listed(_native.rewrap(where, found.native, sealing.native, replaces=replaces))


@contextlib.contextmanager
def _of_clear(path: str) -> Iterator[None]:
    """Says of a clear checkpoint what it lacks; the native error speaks of a load."""
    try:
        yield
    except NotSealedError:
        raise NotSealedError(
            f"{path} is clear: it is not sealed, so it has no recipients; save it again with "
            "sealing=",
            path=path,
        ) from None


def _listed(pairs: list[tuple[str, str]]) -> list[Recipient]:
    return [Recipient(kind, name) for kind, name in pairs]
