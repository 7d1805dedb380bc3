"""Keys as callers give them: strings, paths, callables and passphrases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

from penstock.common.secret_texts import Passphrase, called, may_hold_secret
from penstock.errors import KeyFileError

__all__ = ["Key", "Passphrase", "to_native"]

_PASSPHRASE_FILE = "passphrase-file:"


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
        return name, "content", called(key, name)
    raise TypeError(
        f"{name}: must be a string, a path, a callable or a Passphrase, not {type(key).__name__}"
    )


def _expanded(text: str) -> str:
    prefix = _PASSPHRASE_FILE if text.startswith(_PASSPHRASE_FILE) else ""
    path = text.removeprefix(prefix)
    return prefix + os.path.expanduser(path) if path.startswith("~") else text
