"""Paths that callers give: files and directories of this machine, and nothing else."""

from __future__ import annotations

import re

from penstock.errors import UnsupportedPathError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*):(/+)(.*)", re.DOTALL)
"""A URL (RFC 3986), several in one, or what `pathlib` leaves of it: one slash."""


def check_scheme(path: str) -> None:
    """Refuses URLs, which as paths would be directories named ``s3:`` and so on.

    Raises:
        UnsupportedPathError: It is one.
    """
    found = _SCHEME.match(path)
    if found is None:
        return
    scheme, slashes, rest = found.groups()
    # After two slashes comes a host; `pathlib` makes one slash of three.
    host, _, below = rest.partition("/") if slashes == "//" else ("", "", rest)
    if scheme.lower() == "file" and host in ("", "localhost"):
        remedy = f"pass the plain path, {'/' + below!r}"
    else:
        remedy = "use a local or mounted directory, and copy between the two"
    raise UnsupportedPathError(
        f"{path}: this is a URL of the scheme {scheme!r}, and Penstock moves data of file systems "
        f"only: {remedy}; a directory that is really named {scheme + ':'!r} is reached by its "
        "absolute path",
        path=path,
        scheme=scheme,
    )
