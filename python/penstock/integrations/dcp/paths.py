"""Tells which of DCP's checkpoint ids Penstock handles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.plugin import decode_local_path, decode_path

if TYPE_CHECKING:
    from collections.abc import Callable


def is_ours(checkpoint_id: object) -> bool:
    """Whether this is a path of the local file system, or a URL of a supported bucket."""
    return _decodes(decode_path, checkpoint_id)


def is_local(checkpoint_id: object) -> bool:
    """Whether this is a path of the local file system, rather than a URL."""
    return _decodes(decode_local_path, checkpoint_id)


def _decodes(decode: Callable[[str | os.PathLike[str]], str], checkpoint_id: object) -> bool:
    if not isinstance(checkpoint_id, str | os.PathLike):
        return False
    try:
        decode(checkpoint_id)
    except (TypeError, ValueError):
        return False
    return True
