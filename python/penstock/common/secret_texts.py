"""Tells the text of a secret key from a path, so that no error shows it as one."""

from __future__ import annotations

import re

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
