"""Which of DCP's checkpoint ids are ours."""

from __future__ import annotations

import os

from penstock.loading.opened import decode_path


def is_local(checkpoint_id: object) -> bool:
    """Whether this is a path of the local file system, rather than a URL."""
    if not isinstance(checkpoint_id, str | os.PathLike):
        return False
    try:
        return "://" not in decode_path(checkpoint_id)
    except (TypeError, ValueError):
        return False
