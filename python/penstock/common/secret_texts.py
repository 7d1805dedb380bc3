"""Texts that are secrets: tells keys from paths, so that no error shows one, and `Passphrase`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_BEGINNING = re.compile(
    r"\s*(AGE-SECRET-KEY-|PENSTOCK-SECRET-KEY-|-----BEGIN |[0-9a-f]{64}\s*$)", re.IGNORECASE
)
_INSIDE = re.compile(
    # Of keys in PEM, and of the base64 of ssh's keys and of PKCS #8.
    r"\n|SECRET-KEY-|PRIVATE KEY|b3BlbnNzaC1rZXk|MIGHAgEA|MHcCAQEE",
    re.IGNORECASE,
)


def is_secret(text: str) -> bool:
    """Whether a text begins as a secret key does."""
    return _BEGINNING.match(text) is not None


def may_hold_secret(text: str) -> bool:
    """Whether a text that is used as a path may be a secret key, whole or cut, or in quotes."""
    return is_secret(text) or _INSIDE.search(text.strip()) is not None


class Passphrase:
    """A passphrase as a recipient or an identity.

    Among identities it also opens ssh private keys, and files that ``age -p`` has encrypted, that
    have this passphrase and come after it. Among keys that sign it opens ssh private keys.

    Args:
        source: Returns the passphrase, as text or bytes, such as `getpass.getpass`. It is called
            once, when a `Sealing` or `Identities` is made. Line ends after it are left out.

    Example:
        >>> from penstock import Sealing
        >>> Sealing([Passphrase(lambda: "correct horse battery staple")])
        Sealing(recipients=['passphrase'])
    """

    def __init__(self, source: Callable[[], str | bytes]) -> None:
        if not callable(source):
            # The value is not shown, as it may be the passphrase itself.
            raise TypeError(f"source: must be callable, not {type(source).__name__}")
        self._source = source

    def read(self) -> bytes:
        """Returns the passphrase.

        Raises:
            TypeError: The callable returned neither text nor bytes.
        """
        return called(self._source, "source")

    def __repr__(self) -> str:
        return "Passphrase()"


def called(source: Callable[[], str | bytes], name: str) -> bytes:
    """Returns the bytes of a callable that returns a secret."""
    value = source()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise TypeError(f"{name}: its callable returned {type(value).__name__}, not text or bytes")
