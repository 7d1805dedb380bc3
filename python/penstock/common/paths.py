"""Paths given by callers: local paths, or URLs of buckets."""

from __future__ import annotations

import os
import re

from penstock.errors import UnsupportedPathError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*):(/+)(.*)", re.DOTALL)
"""A URL (RFC 3986), a chained one, or the form that `pathlib` reduces it to, with one slash."""

OBJECT_SCHEMES = ("s3", "gs", "az")
"""The same as in `_native`, which the list of commands does not import."""

_BUCKETS = ", ".join(f"{scheme}://" for scheme in OBJECT_SCHEMES)


def of_bucket(path: str) -> bool:
    """Whether a path is a bucket's URL, in the form that `tidy` returns."""
    scheme, _, rest = path.partition("://")
    return bool(rest) and scheme in OBJECT_SCHEMES


def tidy(path: str) -> str:
    """Returns a path with ``~`` expanded, or a bucket's URL in its canonical form."""
    found = _SCHEME.match(path)
    if found is None:
        return os.path.expanduser(path)
    scheme, slashes, rest = found.groups()
    if scheme.lower() not in OBJECT_SCHEMES:
        raise _refused(path, f"Penstock reaches file systems, and buckets at {_BUCKETS}")
    bucket, _, key = rest.partition("/")
    if "?" in rest or "#" in rest:
        what = "a URL takes no options: give them to penstock.Remote, for penstock.set_remote"
        raise UnsupportedPathError(f"{path}: {what}", path=path, scheme=scheme)
    if not bucket or len(slashes) > 2:
        what = f"no bucket is named: {scheme.lower()}://BUCKET/DIRECTORY"
        raise UnsupportedPathError(f"{path}: {what}", path=path, scheme=scheme)
    return f"{scheme.lower()}://{bucket}/{key}".rstrip("/")


def absolute(path: str) -> str:
    """Returns the absolute path, which no later change of directory affects; a URL unchanged."""
    return path if of_bucket(path) else os.path.abspath(path)


def local(path: str) -> str:
    """Returns a local path with ``~`` expanded, and refuses URLs.

    A URL taken for a path would become a directory such as ``s3:``.
    """
    found = _SCHEME.match(path)
    if found is None:
        # A directory with such a name can be given by its absolute path.
        return os.path.expanduser(path)
    if found.group(1).lower() in OBJECT_SCHEMES:
        raise _refused(path, "this takes files of this machine only")
    raise _refused(path, "Penstock moves data of file systems only here")


def _refused(path: str, what: str) -> UnsupportedPathError:
    found = _SCHEME.match(path)
    assert found is not None
    scheme, slashes, rest = found.groups()
    # A host follows two slashes; `pathlib` reduces three slashes to one.
    host, _, below = rest.partition("/") if slashes == "//" else ("", "", rest)
    if scheme.lower() == "file" and host in ("", "localhost"):
        remedy = f"pass the plain path, {'/' + below!r}"
    else:
        remedy = "use a local or mounted directory, and copy between the two"
    return UnsupportedPathError(
        f"{path}: this is a URL of the scheme {scheme!r}, and {what}: {remedy}; a directory that "
        f"is really named {scheme + ':'!r} is reached by its absolute path",
        path=path,
        scheme=scheme,
    )
