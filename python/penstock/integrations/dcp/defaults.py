"""DCP's writer and reader after `enable`, where no other is named.

`DefaultWriter` is a `StorageWriter` for directories that may hold a checkpoint of DCP's own, and
that tools inspect which know only DCP's format. Two classes replace DCP's `FileSystemReader` and
`FileSystemWriter`: instances of DCP's count as theirs, and their constructors return a Penstock
reader for a Penstock checkpoint, or a Penstock writer where it was chosen.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.checkpoint.loading.dcp_files import check_files, check_pieces
from penstock.errors import CheckpointExistsError
from penstock.integrations.dcp import directory
from penstock.integrations.dcp.paths import is_local
from penstock.integrations.dcp.reader import StorageReader
from penstock.integrations.dcp.writer import StorageWriter
from penstock.plugin import SealingKeys, decode_path, is_checkpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.distributed.checkpoint import storage
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from penstock.options import Options

_keys = directory.NO_KEYS
"""The keys of `enable`."""

_CHANGES_BYTES = ("_extensions", "serialization_format")
"""Arguments of DCP's writer that require DCP's own format."""


class DefaultWriter(StorageWriter):
    """A `StorageWriter` in place of DCP's own writer.

    It treats a checkpoint of DCP's at the path like one of Penstock's: without ``overwrite`` it
    refuses, else it removes DCP's files once the new checkpoint is durable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        options: Options | None = None,
        keys: SealingKeys = directory.NO_KEYS,
    ) -> None:
        super().__init__(path, overwrite=overwrite, options=options, **keys.closing)
        self._replaced: str | None = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Checks the directory and begins the attempt; on the coordinator only."""
        self._replaced = directory.dcp_digest(self.path)
        if self._replaced is not None and not self.overwrite:
            raise CheckpointExistsError(
                f"{self.path} holds a checkpoint of DCP's own: save to another path, or "
                "enable(overwrite=True)",
                path=self.path,
            )
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, then removes DCP's earlier files; on the coordinator only."""
        super().finish(metadata, results)
        directory.mark(self.path)

    def _further_note(self) -> Mapping[str, Any]:
        return {} if self._replaced is None else {directory.REPLACED: self._replaced}


def reader_of(
    checkpoint_id: str | os.PathLike[str],
    options: Options | None = None,
    keys: SealingKeys | None = None,
) -> storage.StorageReader:
    """The reader for a directory's format; Penstock's, with its errors, if there is nothing.

    Args:
        checkpoint_id: The directory.
        options: Settings of the I/O.
        keys: The keys that open it; None for those of `enable`.

    Raises:
        NotSealedError: It is of DCP's own format, and a sealed checkpoint is demanded.
    """
    keys = _keys if keys is None else keys
    path = decode_path(checkpoint_id)
    # A sealed or signed one is taken whatever lies beside it: anybody could put files there.
    if (not keys.refuses_others or not is_checkpoint(path)) and directory.holds_dcp(path, keys):
        keys.refuse_clear(path, "a checkpoint of DCP's own")
        return _CheckedReader(checkpoint_id)
    return StorageReader(checkpoint_id, options=options, **keys.opening)


def keys() -> SealingKeys:
    """The keys of `enable`."""
    return _keys


def use_keys(keys: SealingKeys) -> None:
    """Sets the keys of readers and writers that stand in for DCP's."""
    global _keys
    _keys = keys


class _CheckedReader(filesystem.FileSystemReader):
    """DCP's reader, which first checks that all files and all pieces of tensors are there."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begins a load."""
        if is_coordinator:
            # On the coordinator, as its error reaches all ranks; each would check the files of all.
            path = str(self.path)
            check_files(path, metadata.storage_data or {})
            for name, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    pieces = ((tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks)
                    check_pieces(path, name, tuple(entry.size), pieces, is_whole=False)
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)


_Type: Any = type(filesystem.FileSystemWriter)


class _StandIn(_Type):  # type: ignore[misc]
    """Metaclass of a class that replaces its base: instances of the base count as its own."""

    def __instancecheck__(cls, instance: Any) -> bool:  # noqa: N805  a class is its self
        # But not for classes derived from it.
        stands_in = cls.__module__ == __name__
        return type.__instancecheck__(cls.__base__ if stands_in else cls, instance)


class FileSystemReader(filesystem.FileSystemReader, metaclass=_StandIn):
    """Replaces DCP's class of that name; see `enable`."""

    def __new__(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Returns DCP's reader or Penstock's, by the format of the directory."""
        is_plain = cls is FileSystemReader and not args and not kwargs and is_local(path)
        return reader_of(path) if is_plain else super().__new__(cls)


class FileSystemWriter(filesystem.FileSystemWriter, metaclass=_StandIn):
    """Replaces DCP's class of that name; see `enable`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns Penstock's writer, unless an argument requires DCP's own format."""
        bound = _SIGNATURE.bind(None, *args, **kwargs)
        given = dict(bound.arguments)
        changes_bytes = any(given.get(name) is not None for name in _CHANGES_BYTES)
        if cls is not FileSystemWriter or changes_bytes or not is_local(given["path"]):
            what = "DCP's own writer, which these arguments ask for, writes clear files"
            _keys.refuse_sealing(str(given["path"]), what)
            _keys.refuse_signing(str(given["path"]), "DCP's own writer signs nothing")
            return super().__new__(cls)
        overwrite = given.get("overwrite", True)
        writer = DefaultWriter(given["path"], overwrite=overwrite, keys=_keys)
        # Programs read these settings of DCP's writer; they concern files that this one never
        # writes.
        bound.apply_defaults()
        for name in _SIGNATURE.parameters.keys() - {"self", *_CHANGES_BYTES[:1], *vars(writer)}:
            setattr(writer, name, bound.arguments[name])
        return writer


_SIGNATURE = inspect.signature(filesystem.FileSystemWriter.__init__)
