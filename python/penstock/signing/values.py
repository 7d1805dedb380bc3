"""Keys of signatures as callers give them: paths, texts and callables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

__all__ = ["SignatureKey", "to_native"]

SignatureKey: TypeAlias = "str | os.PathLike[str] | Callable[[], str | bytes]"
"""A private or a public key: the path of its file, its text, or a callable that returns it."""

_TEXTS = ("-----BEGIN", "ssh-")
"""Beginnings of a key's text; other strings are paths."""


def to_native(
    keys: SignatureKey | Iterable[SignatureKey], argument: str
) -> list[tuple[str, str, bytes]]:
    """Returns keys as the native module takes them: name in errors, kind of the value, value.

    Raises:
        TypeError: One is no string, path or callable.
        ValueError: There is none.
    """
    if isinstance(keys, (str, os.PathLike)) or callable(keys):
        keys = [keys]
    given: object = keys
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
        raise TypeError(f"{argument}: must be a list of keys, not {type(given).__name__}")
    native = [_one(key, f"{argument}[{index}]") for index, key in enumerate(keys)]
    if not native:
        raise ValueError(f"{argument}: there is no key")
    return native


def _one(key: SignatureKey, name: str) -> tuple[str, str, bytes]:
    if isinstance(key, str):
        if key.startswith(_TEXTS):
            return name, "content", key.encode()
        return name, "path", os.fsencode(os.path.expanduser(key))
    if isinstance(key, os.PathLike):
        return name, "path", os.fsencode(key)
    if callable(key):
        value = key()
        if isinstance(value, str):
            return name, "content", value.encode()
        if isinstance(value, (bytes, bytearray)):
            return name, "content", bytes(value)
        raise TypeError(f"{name}: its callable returned {type(value).__name__}, not text or bytes")
    raise TypeError(f"{name}: must be a string, a path or a callable, not {type(key).__name__}")
