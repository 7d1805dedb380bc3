"""`Pickles`: unpickles ``torch.save`` files, and runs code from a file only if it is trusted.

A pickle may name any function or class to call. An `Unpickler` therefore reads each file first. It
creates only tensors, containers and plain values, and collects the names of all other functions
and classes. These are called only if the caller trusts the file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import pickle
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from penstock.checkpoint.converting.files.archive import START, Archive, damaged, no_room
from penstock.checkpoint.converting.files.legacy import Legacy
from penstock.checkpoint.converting.files.plain import NotPlainError, Unpickler
from penstock.common.found import POINTER_BYTES, of_git_lfs, unfetched
from penstock.errors import (
    MissingDependencyError,
    PenstockError,
    UnsupportedStateError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEWER = (AttributeError, ImportError, NotImplementedError, NotPlainError)
"""Errors of names that the installed library lacks, or that are not used plainly."""


@dataclass(slots=True)
class Pickles:
    """Reads the files of one checkpoint.

    Attributes:
        trust: Whether to call names other than those of plain values.
        trusted: The files that were trusted, with the names that were called.
    """

    trust: bool
    trusted: dict[str, list[str]] = field(default_factory=dict)

    def read(self, file: str) -> Any:
        """Returns the contents of a file, with tensors mapped to its bytes.

        Compressed archives, and files of PyTorch before 1.6, which are no archives, are read into
        memory.
        """
        with open(file, "rb") as opened:
            start = opened.read(POINTER_BYTES)
            if of_git_lfs(start):
                raise unfetched(file)
            if not start.startswith(START):
                return self._read(Legacy(opened, file), file)
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            data = torch.frombuffer(mapped, dtype=torch.uint8)
            return self._read(Archive(opened, data, file), file)

    def read_item(self, data: io.BytesIO, what: str) -> Any:
        """Returns the contents of a file in memory, such as one of DCP's."""
        view = data.getbuffer()
        if view[: len(START)] != START:
            raise damaged(what, "it does not begin as one")
        return self._read(Archive(data, torch.frombuffer(view, dtype=torch.uint8), what), what)

    def read_mapped(self, data: torch.Tensor, what: str) -> Any:
        """Returns the contents of a file that is a part of a mapped one.

        Args:
            data: Its bytes, which its tensors keep using.
            what: Its name in errors.
        """
        return self._read(mapped_archive(data, what), what)

    def _read(self, source: Archive | Legacy, what: str) -> Any:
        others: set[str] = set()
        try:
            value = source.load(functools.partial(Unpickler, others=others))
        except (PenstockError, OSError):
            raise
        except MemoryError as error:
            raise no_room(what, "a value in its pickle") from error
        except Exception as error:
            # A modified pickle raises any error, and so does one that needs other names.
            if _is_damaged(error, is_checked=source.has_sums, has_others=bool(others)):
                raise damaged(what, error) from error
            if not others:
                # Trust only concerns other names.
                raise _failed(what, error) from error
        else:
            if not others:
                return value
        if not self.trust:
            raise untrusted(what, others)
        with calling(what, others):
            value = source.load(functools.partial(Unpickler, others=others, is_trusted=True))
        self.trusted[what] = sorted(others)
        return value


def mapped_archive(data: torch.Tensor, what: str) -> Archive:
    """Opens a ``torch.save`` file that is a part of a mapped one; arguments as `read_mapped`'s."""
    content: Any = data.numpy()
    view = memoryview(content)
    if bytes(view[: len(START)]) != START:
        raise damaged(what, "it does not begin as one")
    return Archive(io.BufferedReader(_Window(view)), data, what)


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise ValueError(f"{offset} lies before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _is_damaged(error: Exception, *, is_checked: bool, has_others: bool) -> bool:
    """Whether a pickle is damaged, rather than of an unknown kind."""
    if isinstance(error, EOFError | pickle.UnpicklingError):
        return True
    return not (is_checked or has_others or isinstance(error, _NEWER))


@contextlib.contextmanager
def calling(what: str, names: set[str]) -> Iterator[None]:
    """Converts errors of the names that a pickle calls to errors that name the pickle."""
    try:
        # Imported packages may print, and standard output belongs to the caller.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except PenstockError:
        raise
    except MemoryError as error:
        raise no_room(what, "a value in its pickle") from error
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"{what}: {few(names)}, which it takes to unpickle it, is not there ({error}): "
            "install the package, or run where the code is that saved it",
            name=_first(names),
        ) from error
    except Exception as error:
        # The called classes raise any error.
        raise _failed(what, error, _first(names)) from error


def _failed(what: str, error: Exception, key: str = "value") -> UnsupportedStateError:
    if isinstance(error, NotPlainError):
        return UnsupportedStateError(
            f"{what}: its pickle is not made as PyTorch, NumPy and Python make them: {error}; load "
            "it with the library that wrote it, and pass its state to penstock.save",
            key=key,
        )
    return UnsupportedStateError(
        f"{what}: unpickling it fails ({type(error).__name__}: {str(error)[:300]}): load it with "
        "the versions that saved it, and pass its state to penstock.save",
        key=key,
    )


def untrusted(what: str, names: set[str]) -> UnsupportedStateError:
    """Returns the error for a pickle that is read only if it is trusted."""
    return UnsupportedStateError(
        f"{what}: its pickle takes more than tensors, containers and plain values ({few(names)}): "
        "unpickling it runs what its writer has put there; if you trust them, pass trust=True "
        "(--trust)",
        key=_first(names),
    )


def few(names: set[str]) -> str:
    """Lists the first of some names."""
    first = ", ".join(sorted(names)[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first(names: set[str]) -> str:
    return min(names, default="value")
