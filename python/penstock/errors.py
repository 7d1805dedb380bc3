"""Everything Penstock raises, by what a caller would do about it.

All of it descends from `PenstockError`; most classes are also the built-in error that the
situation deserves, so `except FileNotFoundError` works as well. A message names the path, says
what is wrong and ends with what can be done. The facts of a message are attributes too, and
errors survive pickling, so they cross process boundaries unharmed.

The native module raises these classes by calling ``cls(message, **fields)``.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, ClassVar

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitUndecidedError",
    "CorruptCheckpointError",
    "DeviceError",
    "FormatVersionError",
    "IncompleteCheckpointError",
    "MissingDependencyError",
    "OptionsError",
    "PartialCheckpointError",
    "PenstockError",
    "PenstockWarning",
    "ProtectedCheckpointError",
    "RankError",
    "SaveCancelledError",
    "SaveInProgressError",
    "StateMismatchError",
    "StorageError",
    "TransferCancelledError",
    "TransferError",
    "UnsupportedPathError",
    "UnsupportedStateError",
]


class PenstockError(Exception):
    """Base of every error of this package.

    Example:
        >>> import penstock
        >>> try:
        ...     penstock.load("no/such/checkpoint")
        ... except penstock.PenstockError as error:
        ...     print(type(error).__name__)
        CheckpointNotFoundError
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments of the constructor; each is an attribute of the same name."""

    _is_shared: ClassVar[bool] = False
    """Whether what the coordinator found of many ranks is as true for each other one of them, which
    then raises the same; else it raises a `RankError` that tells of it."""

    _result: ClassVar[str] = "failed"
    """How `penstock.metrics` counts a call that ended so, where calls of its kind can."""

    def __str__(self) -> str:
        # OSError and KeyError format their own way; here the message is the message.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = fields_of(self)
        notes = getattr(self, "__notes__", None)
        state = {"__notes__": notes} if notes else None
        return _rebuild, (type(self), self.args, fields), state


def called(name: str) -> type[PenstockError] | None:
    """The error of this module that has a name; None where there is none."""
    kind = globals().get(name) if name in __all__ else None
    return kind if isinstance(kind, type) and issubclass(kind, PenstockError) else None


def fields_of(error: PenstockError) -> dict[str, Any]:
    """The facts that an error was made with, by the keyword of each."""
    return {name: getattr(error, name) for name in error._fields}


def is_true_for_all_ranks(kind: type[PenstockError]) -> bool:
    """Whether each rank raises such an error of the coordinator's, instead of a `RankError`."""
    return kind._is_shared


def result_of(error: PenstockError) -> str:
    """The result by which `penstock.metrics` counts a call that raised an error."""
    return error._result


def _rebuild(
    cls: type[PenstockError], args: tuple[Any, ...], fields: dict[str, Any]
) -> PenstockError:
    return cls(*args, **fields)


class CheckpointNotFoundError(PenstockError, FileNotFoundError):
    """Nothing is stored at the path.

    Attributes:
        path: Where a checkpoint was looked for.
    """

    _fields = ("path",)
    _is_shared = True
    _result = "missing"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = self.filename = path
        self.errno = _errno.ENOENT


class CheckpointExistsError(PenstockError, FileExistsError):
    """A complete checkpoint is already stored at the path and ``overwrite=True`` was not given.

    Or the path is that of a store, which `penstock.save` does not save onto.

    Attributes:
        path: The checkpoint that is in the way, or the store.
    """

    _fields = ("path",)
    _is_shared = True

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = self.filename = path
        self.errno = _errno.EEXIST


class IncompleteCheckpointError(PenstockError):
    """The save into this directory never finished, so there is no manifest to load from.

    Attributes:
        path: The checkpoint's directory.
    """

    _fields: ClassVar[tuple[str, ...]] = ("path",)
    _result = "missing"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class PartialCheckpointError(IncompleteCheckpointError):
    """The checkpoint holds what was salvaged from a damaged one, and not all that was asked for.

    Attributes:
        path: The checkpoint's directory.
        missing: Dotted names of what was asked for and is not there; empty where nothing is known
            to be missing, but nothing could be checked when it was salvaged.
    """

    _fields = ("path", "missing")

    def __init__(self, message: str, *, path: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message, path=path)
        self.missing = missing


class ProtectedCheckpointError(PenstockError):
    """The step is protected (`CheckpointStore.protect`) and was not deleted.

    Attributes:
        path: The step's directory.
    """

    _fields = ("path",)
    _is_shared = True

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class CorruptCheckpointError(PenstockError, ValueError):
    """What is stored is not what was saved, or makes no sense to this version of Penstock.

    Attributes:
        path: The checkpoint's directory.
        file: Name of the damaged file inside it, where known.
        offset: First byte of the damaged range in that file, where known.
        tensor: Name of the tensor whose bytes are hit, where known.
        is_proven: Whether the stored bytes themselves are proven wrong: files are missing or of
            another size, or bytes do not match their digest when read twice. Else they are what
            was written and make no sense, or the device does not give them; a store does not
            remember that as damage.
    """

    _fields = ("path", "file", "offset", "tensor", "is_proven")
    _result = "damaged"

    def __init__(
        self,
        message: str,
        *,
        path: str,
        file: str | None = None,
        offset: int | None = None,
        tensor: str | None = None,
        is_proven: bool = False,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.file = file
        self.offset = offset
        self.tensor = tensor
        self.is_proven = is_proven


class FormatVersionError(PenstockError, ValueError):
    """The checkpoint takes a newer Penstock to read.

    It is written in a format version that this one does not read, or holds a type or a kind of
    value that this one does not know.

    Attributes:
        path: The checkpoint's directory.
        found: The version it is written in; equal to ``supported`` where it is something in it
            that is not known.
        supported: The newest version this Penstock reads.
    """

    _fields = ("path", "found", "supported")

    def __init__(self, message: str, *, path: str, found: int, supported: int) -> None:
        super().__init__(message)
        self.path = path
        self.found = found
        self.supported = supported


class UnsupportedStateError(PenstockError, TypeError):
    """A leaf of the state cannot be stored without losing something.

    Attributes:
        key: Dotted name of the leaf.
    """

    _fields = ("key",)

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class UnsupportedPathError(PenstockError, ValueError):
    """A path is a URL that is of no bucket, or that a call for files of this machine does not take.

    Attributes:
        path: The path as it was given.
        scheme: What comes before its colon, as in ``"s3"``.
    """

    _fields = ("path", "scheme")

    def __init__(self, message: str, *, path: str, scheme: str) -> None:
        super().__init__(message)
        self.path = path
        self.scheme = scheme


class StateMismatchError(PenstockError, ValueError):
    """The checkpoint and what the caller asked for (``into=``, ``keys=``) do not fit together.

    Attributes:
        key: Dotted name of the first leaf that does not fit, where there is one.
        path: The checkpoint's directory, where known.
    """

    _fields = ("key", "path")

    def __init__(self, message: str, *, key: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.path = path


class StorageError(PenstockError, OSError):
    """The operating system refused or failed an operation: disk full, read-only, I/O error.

    Attributes:
        path: The file or directory.
        filename: The same, as `OSError` calls it.
        errno: The error number, as in the `errno` module.
        needed_bytes: Where there was no room: the bytes of all files of the checkpoint.
        free_bytes: Where there was no room: the bytes that were free before the first of them
            was written. What is missing is the difference of the two.
    """

    _fields: ClassVar[tuple[str, ...]] = ("path", "errno", "needed_bytes", "free_bytes")

    def __init__(
        self,
        message: str,
        *,
        path: str,
        errno: int | None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = self.filename = path
        self.errno = errno
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DeviceError(PenstockError, RuntimeError):
    """A device, or its driver, is in the way of a save or a load.

    Nothing is committed of a save that fails so, and what was stored before is as it was.

    Attributes:
        code: The driver's number for it (``CUresult``); None where the driver was not asked.
    """

    _fields: ClassVar[tuple[str, ...]] = ("code",)

    def __init__(self, message: str, *, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class CommitUndecidedError(StorageError):
    """The storage did not say whether a save was committed, and it may yet be.

    So what it has written stays. Look in some minutes, with `penstock inspect`: where the
    checkpoint at the path has this id, it was committed. Else save the state again, under another
    name.

    Attributes:
        path: The checkpoint's directory.
        attempt: The id that the checkpoint has, if it was committed.
        errno: The error number, as in the `errno` module.
    """

    _fields = ("path", "errno", "attempt")

    def __init__(self, message: str, *, path: str, errno: int | None, attempt: str) -> None:
        super().__init__(message, path=path, errno=errno)
        self.attempt = attempt


class TransferError(StorageError):
    """Bytes of a file could not be read or written: I/O error, disk full, the file ends before.

    Attributes:
        path: The file.
        offset: Where in the file, in bytes; of a file that ends before, where that is.
        errno: The error number, as in the `errno` module; ``ENODATA`` where the file ends before.
    """

    _fields = ("path", "errno", "offset")

    def __init__(self, message: str, *, path: str, errno: int | None, offset: int) -> None:
        super().__init__(message, path=path, errno=errno)
        self.offset = offset


class TransferCancelledError(PenstockError):
    """A transfer was given up by `penstock.offload.Transfer.cancel`.

    What had begun was finished, so a part of the bytes may have been moved.
    """

    _result = "cancelled"


class RankError(PenstockError):
    """Of the ranks that save together, one failed, is not there, or saw something else.

    Or this process is a rank that has no process group to save with.

    Attributes:
        rank: The first such rank, by its number in the process group.
    """

    _fields = ("rank",)

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class SaveInProgressError(PenstockError):
    """An earlier save of this store is still running, and ``if_busy="error"`` was given.

    Attributes:
        path: Where the earlier one saves to.
    """

    _fields = ("path",)
    _result = "skipped"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SaveCancelledError(PenstockError):
    """A save was given up by `PendingSave.cancel`.

    Nothing was committed, unless the message tells of ranks that do not know.
    """

    _result = "cancelled"


class MissingDependencyError(PenstockError, ImportError):
    """A package is needed for this and is not installed, or its version lacks what is needed.

    Attributes:
        name: The package; where a device is of a kind that PyTorch does not know, that kind.
    """

    _fields = ("name",)
    name: str

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class OptionsError(PenstockError, ValueError):
    """A file of options cannot be used.

    Attributes:
        path: The file.
        key: What in it is wrong, where it is one value.
    """

    _fields = ("path", "key")

    def __init__(self, message: str, *, path: str, key: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.key = key


class PenstockWarning(UserWarning):
    """Something was skipped or left undone, and the call succeeded all the same."""
