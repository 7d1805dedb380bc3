"""`Identities`: the keys that open sealed checkpoints."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock import _native
from penstock.common.held_keys import HeldKeys
from penstock.common.secret_texts import may_hold_secret
from penstock.sealing.kms import CLIENTS
from penstock.sealing.passphrase import Key, to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["VARIABLE", "Identities"]

VARIABLE = "PENSTOCK_IDENTITIES"
"""The environment variable that names a file of identities."""


_KEY = re.compile(
    r"AGE-|PENSTOCK-SECRET|-----BEGIN|passphrase-(?:file|env):|[a-z0-9+.-]+://|[0-9a-f]{60,}",
    re.IGNORECASE,
)
"""The beginning of a value that is a key or names one, and is no path."""


class Identities(HeldKeys):
    """Opens sealed checkpoints with the first key that fits.

    Keys in memory are tried first, then passphrases (a tenth of a second each), then key management
    services. A service is called only for keys that an identity names: a whole URI, or a beginning
    that ends with ``/``, as ``aws-kms://`` for every key that the credentials allow.

    Args:
        identities: Keys: see `penstock.sealing`.

    Raises:
        KeyFileError: A string or a file is no secret key, or there is none; a `ValueError` too.
        StorageError: A file cannot be read; an `OSError` too.
        TypeError: An identity has the wrong type.

    Example:
        >>> Identities(["aws-kms://", lambda: "AGE-SECRET-KEY-1" + "Q" * 58])
        Traceback (most recent call last):
        ...
        penstock.errors.KeyFileError: identities[1]: no X25519 identity: ...
    """

    __slots__ = ()

    native: _native.Identities | None
    """The keys as the native module reads with them; None if there are none."""

    def __init__(self, identities: Key | Iterable[Key]) -> None:
        self.native = _native.Identities(to_native(identities, "identities"), CLIENTS)

    @classmethod
    def none(cls) -> Self:
        """Returns identities without a key: they open nothing, and refuse clear checkpoints."""
        found = cls.__new__(cls)
        found.native = None
        return found

    @classmethod
    def resolve(cls, identities: Identities | Key | Iterable[Key] | None) -> Self | None:
        """Returns the identities of an argument, else those of ``PENSTOCK_IDENTITIES``, or None.

        Raises:
            KeyFileError: A string or a file is no secret key, or there is none.
            StorageError: A file cannot be read.
            TypeError: An identity has the wrong type.
        """
        if identities is not None:
            return super().resolve(identities)
        value = os.environ.get(VARIABLE, "").strip()
        if not value:
            return None
        # A key in place of the file's name, which an error would show as a path.
        if _KEY.match(value):
            return cls([value])
        if may_hold_secret(value):
            return cls([lambda: value])
        return cls([Path(value).expanduser()])
