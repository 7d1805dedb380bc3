"""`Pickles`: what `torch.save` wrote, unpickled as far as it is trusted.

Unpickling runs whatever the file says. PyTorch's ``weights_only=True`` takes tensors, containers
and plain values only, and refuses every other class. What numbers of NumPy are made of is taken
here as well, as states of random generators hold them.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
import zipfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.errors import (
    CorruptCheckpointError,
    MissingDependencyError,
    UnsupportedStateError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_ZIP = b"PK\x03\x04"
_CHUNK_BYTES = 1 << 20
_CLASS = re.compile(r"GLOBAL ([\w.]+) was not an allowed|Unsupported (?:global|class) ([\w.]+)")


@dataclass(slots=True)
class Pickles:
    """Reads files of one checkpoint.

    Attributes:
        trust: Whether to unpickle what ``weights_only=True`` refuses.
        trusted: What was unpickled for that: files, and the classes that stood in the way.
    """

    trust: bool
    trusted: dict[str, list[str]] = field(default_factory=dict)

    def read(self, file: str) -> Any:
        """What is in a file; its tensors are where they lie in it, mapped to memory.

        Files of PyTorch before 1.6, which are no zip archives, are read into memory.

        Raises:
            UnsupportedStateError: It takes classes to unpickle it, and it is not trusted.
            CorruptCheckpointError: It is no such file, cut, or not what was written.
            MissingDependencyError: A class that it takes is not to be had.
            OSError: It cannot be read.
        """
        with open(file, "rb") as opened:
            is_mapped = opened.read(len(_ZIP)) == _ZIP
        if is_mapped:
            _check_sums(file)

        def read(weights_only: bool) -> Any:
            return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=is_mapped)

        return self._read(read, file, lambda: _classes_in(file) if is_mapped else [])

    def read_item(self, data: IO[bytes], file: str, name: str) -> Any:
        """The same of one item of DCP's, whose bytes are in a file among others'."""

        def read(weights_only: bool) -> Any:
            data.seek(0)
            return torch.load(data, map_location="cpu", weights_only=weights_only)

        def classes() -> list[str]:
            data.seek(0)
            return torch.serialization.get_unsafe_globals_in_checkpoint(data)

        return self._read(read, f"{file} ({name})", classes)

    def _read(
        self, read: Callable[[bool], Any], what: str, classes: Callable[[], list[str]]
    ) -> Any:
        try:
            with torch.serialization.safe_globals(_numbers()):
                return read(True)
        except pickle.UnpicklingError as error:
            found = _unknown(classes, str(error))
            if not found:
                raise _damaged(what, error) from error
        except Exception as error:
            # A pickle that was changed raises anything.
            raise _damaged(what, error) from error
        if not self.trust:
            raise untrusted(what, found)
        try:
            # Packages that are imported for it may print, and standard output is the caller's.
            with contextlib.redirect_stdout(sys.stderr):
                value = read(False)
        except (ImportError, AttributeError) as error:
            raise MissingDependencyError(
                f"{what}: {found[0]}, which it takes to unpickle it, is not there ({error}): "
                "install the package, or run where the code is that saved it",
                name=found[0],
            ) from error
        except Exception as error:
            # Whatever the classes raise that it calls.
            raise _damaged(what, error) from error
        self.trusted[what] = found
        return value


def untrusted(what: str, classes: list[str]) -> UnsupportedStateError:
    """The error for a pickle that only whoever trusts it may have."""
    named = ", ".join(classes[:3]) + (f" and {len(classes) - 3} more" if len(classes) > 3 else "")
    return UnsupportedStateError(
        f"{what}: its pickle calls {named}, which weights_only=True refuses: to unpickle it runs "
        "what whoever wrote it has put there; if you trust them, pass trust=True (--trust)",
        key=classes[0],
    )


def _unknown(classes: Callable[[], list[str]], message: str) -> list[str]:
    """The classes that stood in the way; empty where it was something else."""
    known = {f"{one.__module__}.{one.__qualname__}" for one in _numbers()}
    try:
        found = sorted(set(classes()) - known)
    except Exception:
        # As of a pickle that was changed.
        found = []
    if not found:
        found = [first or second for first, second in _CLASS.findall(message)]
    return found


def _check_sums(file: str) -> None:
    """Compares what is in an archive with its checksums, at which PyTorch does not look.

    Where they are all 0, it was told not to make any.

    Raises:
        CorruptCheckpointError: It is not what was written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in filter(lambda one: one.CRC, archive.infolist()):
                with archive.open(member) as opened:
                    while opened.read(_CHUNK_BYTES):
                        pass
    except Exception as error:
        # An archive that was changed raises anything.
        raise _damaged(file, error) from error


def _classes_in(file: str) -> list[str]:
    return torch.serialization.get_unsafe_globals_in_checkpoint(file)


def _numbers() -> list[Any]:
    """What arrays and numbers of NumPy are pickled with, which runs nothing."""
    import _codecs

    multiarray = (getattr(np, "_core", None) or np.core).multiarray
    kinds = {type(np.dtype(char)) for char in "?bBhHiIlLqQefdFD"}
    names = (multiarray._reconstruct, multiarray.scalar)
    return [*names, np.ndarray, np.dtype, _codecs.encode, *sorted(kinds, key=str)]


def _damaged(what: str, error: Exception) -> CorruptCheckpointError:
    first = str(error).partition("\n")[0][:200]
    return CorruptCheckpointError(
        f"{what} is cut, damaged or not of torch.save: {first}", path=what
    )
