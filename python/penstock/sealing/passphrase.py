"""Keys as callers give them: strings, paths, callables and passphrases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

from penstock.common.secret_texts import may_hold_secret
from penstock.errors import KeyFileError

__all__ = ["Key", "Passphrase", "to_native"]

_PASSPHRASE_FILE = "passphrase-file:"


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
        return _called(self._source, "source")

    def __repr__(self) -> str:
        return "Passphrase()"


Key: TypeAlias = "str | os.PathLike[str] | Callable[[], str | bytes] | Passphrase"
"""A recipient or an identity."""


def to_native(keys: Key | Iterable[Key], argument: str) -> list[tuple[str, str, bytes]]:
    """Returns keys as the native module takes them: name in errors, kind of the value, value.

    Raises:
        KeyFileError: A path is the text of a key.
        TypeError: One is no string, path, callable or `Passphrase`.
    """
    if isinstance(keys, (str, os.PathLike, Passphrase)) or callable(keys):
        keys = [keys]
    given: object = keys
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
        raise TypeError(f"{argument}: must be a list of keys, not {type(given).__name__}")
    return [_one(key, f"{argument}[{index}]") for index, key in enumerate(keys)]


def _one(key: Key, name: str) -> tuple[str, str, bytes]:
    if isinstance(key, Passphrase):
        return name, "passphrase", key.read()
    if isinstance(key, str):
        return name, "text", os.fsencode(_expanded(key))
    if isinstance(key, os.PathLike):
        path = os.fsencode(key)
        if may_hold_secret(os.fsdecode(path)):
            raise KeyFileError(
                f"{name}: this is the text of a key, and no path: give it as a string"
            )
        return name, "path", path
    if callable(key):
        return name, "content", _called(key, name)
    raise TypeError(
        f"{name}: must be a string, a path, a callable or a Passphrase, not {type(key).__name__}"
    )


def _expanded(text: str) -> str:
    prefix = _PASSPHRASE_FILE if text.startswith(_PASSPHRASE_FILE) else ""
    path = text.removeprefix(prefix)
    return prefix + os.path.expanduser(path) if path.startswith("~") else text


def _called(source: Callable[[], str | bytes], name: str) -> bytes:
    value = source()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise TypeError(f"{name}: its callable returned {type(value).__name__}, not text or bytes")
