"""Keys of signatures as callers give them: paths, texts and callables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

from penstock.common.secret_texts import Passphrase, called, may_hold_secret
from penstock.errors import KeyFileError

__all__ = ["SignatureKey", "to_native"]

SignatureKey: TypeAlias = "str | os.PathLike[str] | Callable[[], str | bytes] | Passphrase"
"""A private or a public key: the path of its file, its text, or a callable that returns it.

Among private keys, ``passphrase-env:NAME``, ``passphrase-file:PATH`` and a `Passphrase` open the
ssh keys behind them.
"""

_PASSPHRASE_FILE = "passphrase-file:"
_PASSPHRASES = (_PASSPHRASE_FILE, "passphrase-env:")

_TEXTS = ("-----BEGIN", "ssh-")
"""Beginnings of a key's text; other strings are paths."""


def to_native(
    keys: SignatureKey | Iterable[SignatureKey], argument: str
) -> list[tuple[str, str, bytes]]:
    """Returns keys as the native module takes them: name in errors, kind of the value, value.

    Raises:
        KeyFileError: One is the text of a key in part.
        TypeError: One is no string, path or callable.
        ValueError: There is none.
    """
    if isinstance(keys, (str, os.PathLike, Passphrase)) or callable(keys):
        keys = [keys]
    given: object = keys
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
        raise TypeError(f"{argument}: must be a list of keys, not {type(given).__name__}")
    native = [_one(key, f"{argument}[{index}]") for index, key in enumerate(keys)]
    if not native:
        raise ValueError(f"{argument}: there is no key")
    return native


def _expanded(text: str) -> str:
    if not text.startswith(_PASSPHRASE_FILE):
        return text
    return _PASSPHRASE_FILE + os.path.expanduser(text.removeprefix(_PASSPHRASE_FILE))


def _path(path: str | os.PathLike[str], name: str) -> bytes:
    value = os.fsencode(path)
    if may_hold_secret(os.fsdecode(value)):
        raise KeyFileError(
            f"{name}: this is neither the whole text of a key nor the path of its file"
        )
    return value


def _one(key: SignatureKey, name: str) -> tuple[str, str, bytes]:
    if isinstance(key, Passphrase):
        return name, "passphrase", key.read()
    if isinstance(key, str):
        if key.startswith(_PASSPHRASES):
            return name, "passphrase-of", os.fsencode(_expanded(key))
        text = key.strip()
        if text.startswith(_TEXTS):
            return name, "content", text.encode() + b"\n"
        return name, "path", _path(os.path.expanduser(key), name)
    if isinstance(key, os.PathLike):
        return name, "path", _path(key, name)
    if callable(key):
        return name, "content", called(key, name)
    raise TypeError(f"{name}: must be a string, a path or a callable, not {type(key).__name__}")
