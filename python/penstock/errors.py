"""Every error that Penstock raises, one class for each reaction of a caller.

All classes derive from `PenstockError`. Most also derive from the built-in error of the same
situation, so `except FileNotFoundError` works as well. A message names the path, states the failure
and ends with a remedy. The facts of a message are also attributes. Errors can be pickled, so they
cross process boundaries unharmed.

The native module raises these classes by calling ``cls(message, **fields)``.
"""

from __future__ import annotations

import contextlib
import errno as _errno
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CannotSealError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitUndecidedError",
    "CorruptCheckpointError",
    "DeviceError",
    "FormatVersionError",
    "IncompleteCheckpointError",
    "KeyFileError",
    "KmsError",
    "MissingDependencyError",
    "NotSealedError",
    "NotSignedError",
    "OptionsError",
    "OtherCheckpointError",
    "PartialCheckpointError",
    "PenstockError",
    "PenstockWarning",
    "ProtectedCheckpointError",
    "RankError",
    "SaveCancelledError",
    "SaveInProgressError",
    "SealedError",
    "SealingError",
    "SignatureError",
    "StateMismatchError",
    "StorageError",
    "TamperedError",
    "TransferCancelledError",
    "TransferError",
    "UnsupportedPathError",
    "UnsupportedStateError",
    "WrongKeyError",
]


class PenstockError(Exception):
    """Base class of every error of this package.

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
    """Whether an error that the coordinator found holds for every rank, so that all ranks raise
    this class. Otherwise the other ranks raise a `RankError` that quotes it.
    """

    _result: ClassVar[str] = "failed"
    """Result label under which `penstock.metrics` counts a call that raised this error."""

    def __str__(self) -> str:
        # OSError and KeyError format their own way; here the text is the message alone.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = fields_of(self)
        notes = getattr(self, "__notes__", None)
        state = {"__notes__": notes} if notes else None
        return _rebuild, (type(self), self.args, fields), state


def called(name: str) -> type[PenstockError] | None:
    """Returns the error class of this module with this name, or None."""
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
    """No checkpoint is stored at the path.

    Attributes:
        path: The directory that was searched for a checkpoint.
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

    Also raised by `penstock.save` when the path is the directory of a `CheckpointStore`.

    Attributes:
        path: The existing checkpoint or store.
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
    """The checkpoint was salvaged from a damaged one and lacks requested leaves.

    Attributes:
        path: The checkpoint's directory.
        missing: Dotted names of the requested leaves that are missing. Empty if none is known to be
            missing, but the salvage could not check the checkpoint's completeness.
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
    """The stored bytes are damaged, or make no sense to this version of Penstock.

    Attributes:
        path: The checkpoint's directory.
        file: Name of the damaged file inside it, where known.
        offset: First byte of the damaged range in that file, where known.
        tensor: Name of the tensor whose bytes are damaged, where known.
        is_proven: Whether the stored bytes are proven wrong: files are missing or have another
            size, or bytes differ from their digest when read twice. Otherwise the bytes are as
            written but make no sense, or the device does not return them; a store does not record
            that as damage.
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


class TamperedError(CorruptCheckpointError):
    """Somebody without the key has changed or exchanged a part of a sealed checkpoint.

    The digests are right, so this is no damage by a device: the bytes do not belong to the
    checkpoint, or not to this place in it. None of them is handed out.
    """


class SignatureError(PenstockError):
    """No accepted key has signed the checkpoint, or a file is not the signed one.

    No byte of it is handed out. A signature may be by another key, of another checkpoint, or none
    at all. The digests are right, so this is no damage by a device.

    Attributes:
        path: The checkpoint's directory.
        file: Name of the file inside it that is not the signed one, or of the signature.
        offset: First byte of the range in that file that was exchanged, where known.
        tensor: Name of a tensor in that range, where known.
    """

    _fields = ("path", "file", "offset", "tensor")
    _result = "damaged"

    def __init__(
        self,
        message: str,
        *,
        path: str,
        file: str | None = None,
        offset: int | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.file = file
        self.offset = offset
        self.tensor = tensor


class NotSignedError(SignatureError):
    """The checkpoint has no signature, where ``signed_by=`` demands one.

    Attributes:
        path: The checkpoint's directory.
        file: None.
        offset: None.
        tensor: None.
    """


class OtherCheckpointError(PenstockError):
    """The checkpoint is not the one of ``expect=``, or neither that of ``not_before=`` nor later.

    Attributes:
        path: The checkpoint's directory.
        expected: The id that was expected.
        found: The id of the checkpoint at the path.
    """

    _fields = ("path", "expected", "found")

    def __init__(self, message: str, *, path: str, expected: str, found: str) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.found = found


class SealingError(PenstockError):
    """A checkpoint is sealed or clear against the caller's wish, or cannot be sealed.

    Attributes:
        path: The checkpoint's directory.
    """

    _fields = ("path",)

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SealedError(SealingError):
    """The checkpoint is sealed, and no identities were given, or this call takes none.

    Attributes:
        path: The checkpoint's directory.
    """


class NotSealedError(SealingError):
    """The checkpoint is clear where a sealed one is demanded.

    Identities that are given, and a store with ``sealing=`` or ``identities=``, demand sealed
    checkpoints: anybody who can write to the storage could put a clear one there.

    Attributes:
        path: The checkpoint's directory.
    """


class CannotSealError(SealingError, NotImplementedError):
    """This job cannot seal a part of what it would write, so it has written nothing.

    Attributes:
        path: The checkpoint's directory.
    """

    _is_shared = True


class FormatVersionError(PenstockError, ValueError):
    """Reading the checkpoint requires a newer Penstock.

    The checkpoint has a format version that this Penstock does not read, or holds an element type
    or a kind of value that it does not know.

    Attributes:
        path: The checkpoint's directory.
        found: The checkpoint's format version; equal to ``supported`` if the checkpoint only
            contains an unknown type or kind of value.
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
    """The path is a URL of no known bucket scheme, or the call takes local files only.

    Attributes:
        path: The path as given.
        scheme: The part before the colon, such as ``"s3"``.
    """

    _fields = ("path", "scheme")

    def __init__(self, message: str, *, path: str, scheme: str) -> None:
        super().__init__(message)
        self.path = path
        self.scheme = scheme


class StateMismatchError(PenstockError, ValueError):
    """The checkpoint does not fit the request (``into=``, ``keys=``).

    Attributes:
        key: Dotted name of the first leaf that does not fit, if one leaf is at fault.
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
        filename: The same path, under the name that `OSError` uses.
        errno: The error number, as in the `errno` module.
        needed_bytes: If storage was full: the size of all files of the checkpoint, in bytes.
        free_bytes: If storage was full: the bytes that were free before the first file was written.
            The difference of the two is the missing space.
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


@contextlib.contextmanager
def storage_errors(deed: str, path: str, remedy: str = "") -> Iterator[None]:
    """Raises a `StorageError`, "cannot read PATH: …", for an error of the system in the block.

    Args:
        deed: The verb, such as ``"read"``.
        path: The file or directory.
        remedy: Text behind the system's message, with its punctuation.
    """
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot {deed} {path}: {error.strerror}{remedy}", path=path, errno=error.errno
        ) from error


class DeviceError(PenstockError, RuntimeError):
    """A device or its driver prevented a save or a load.

    A save that fails this way commits nothing; earlier checkpoints are unchanged.

    Attributes:
        code: The driver's error number (``CUresult``); None if the driver was not called.
    """

    _fields: ClassVar[tuple[str, ...]] = ("code",)

    def __init__(self, message: str, *, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class CommitUndecidedError(StorageError):
    """The storage did not report whether a save was committed; it may still be.

    Its files therefore stay. Run `penstock inspect` after some minutes: if the checkpoint at the
    path has the id ``attempt``, the save was committed. Otherwise save the state again under
    another name.

    Attributes:
        path: The checkpoint's directory.
        attempt: The id of the checkpoint, if it was committed.
        errno: The error number, as in the `errno` module.
    """

    _fields = ("path", "errno", "attempt")

    def __init__(self, message: str, *, path: str, errno: int | None, attempt: str) -> None:
        super().__init__(message, path=path, errno=errno)
        self.attempt = attempt


class TransferError(StorageError):
    """Bytes of a file could not be read or written: I/O error, disk full, file too short.

    Attributes:
        path: The file.
        offset: Offset in the file, in bytes; for a file that is too short, its end.
        errno: The error number, as in the `errno` module; ``ENODATA`` if the file is too short.
    """

    _fields = ("path", "errno", "offset")

    def __init__(self, message: str, *, path: str, errno: int | None, offset: int) -> None:
        super().__init__(message, path=path, errno=errno)
        self.offset = offset


class TransferCancelledError(PenstockError):
    """A transfer was cancelled by `penstock.offload.Transfer.cancel`.

    Requests already under way were completed, so a part of the bytes may have been moved.
    """

    _result = "cancelled"


class RankError(PenstockError):
    """One of the ranks that save together failed, is missing, or has a different view of the save.

    Also raised when this process is a rank but has no process group to save with.

    Attributes:
        rank: The first such rank, numbered within the process group.
    """

    _fields = ("rank",)

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class SaveInProgressError(PenstockError):
    """A save is still running, and cannot be waited for.

    Either ``if_busy="error"`` was given for the next save, or a function that the save itself calls
    waits for it.

    Attributes:
        path: The destination of the running save.
    """

    _fields = ("path",)
    _result = "skipped"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SaveCancelledError(PenstockError):
    """A save was cancelled by `PendingSave.cancel`.

    Nothing was committed, unless the message names ranks whose outcome is unknown.
    """

    _result = "cancelled"


class MissingDependencyError(PenstockError, ImportError):
    """A required package is not installed, or its version lacks a required feature.

    name: The package; for a device of a kind that PyTorch does not know, that kind.
    """

    _fields = ("name",)
    name: str

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class KeyFileError(PenstockError, ValueError):
    """A recipient or an identity cannot be used: the text or the file is no key of its kind.

    The message does not show the text, which may be a secret.

    Attributes:
        path: The file, if the key comes from one.
    """

    _fields = ("path",)

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class WrongKeyError(PenstockError):
    """No identity opens the sealed checkpoint: none belongs to a recipient, or a wrap is damaged.

    Attributes:
        path: The checkpoint's directory, where known.
    """

    _fields = ("path",)

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class KmsError(PenstockError):
    """A key management service refused to encrypt or decrypt a key, or was not reachable.

    The error of the service's client is the cause (``__cause__``).

    Attributes:
        uri: The URI of the key.
    """

    _fields = ("uri",)
    _is_shared = True

    def __init__(self, message: str, *, uri: str) -> None:
        super().__init__(message)
        self.uri = uri


class OptionsError(PenstockError, ValueError):
    """A file of options cannot be used.

    Attributes:
        path: The file.
        key: The wrong value's name, if one value is at fault.
    """

    _fields = ("path", "key")

    def __init__(self, message: str, *, path: str, key: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.key = key


class PenstockWarning(UserWarning):
    """Something was skipped or left undone although the call succeeded."""
