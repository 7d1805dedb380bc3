"""What DCP saves and loads through where nobody has named a writer or reader, after `install`.

`DefaultWriter` is a `StorageWriter` for directories that may hold a checkpoint of DCP's own, and
that tools look into which know DCP's alone. The two classes of DCP's names stand in the place of
DCP's: they are those, and their constructors return what reads or writes a Penstock checkpoint
where that is what is there, or was chosen.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.checkpoint.loading.dcp_files import check_files, check_pieces
from penstock.checkpoint.loading.opened import decode_path
from penstock.errors import CheckpointExistsError
from penstock.integrations.dcp import directory
from penstock.integrations.dcp.paths import is_local
from penstock.integrations.dcp.reader import StorageReader
from penstock.integrations.dcp.writer import StorageWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.distributed.checkpoint import storage
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from penstock.options import Options

_CHANGES_BYTES = ("_extensions", "serialization_format")
"""Arguments of DCP's writer that ask for something that is no Penstock checkpoint."""


class DefaultWriter(StorageWriter):
    """Saves in the place of DCP's own writer.

    A checkpoint of DCP's own at the path counts like one of Penstock's: it is refused without
    ``overwrite``, and else its files go once the new one is durable.

    Args:
        path: As of `StorageWriter`.
        overwrite: Replace a complete checkpoint, as DCP does.
        options: As of `StorageWriter`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        options: Options | None = None,
    ) -> None:
        super().__init__(path, overwrite=overwrite, options=options)
        self._replaced: str | None = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Looks what is there, and begins the attempt; on the coordinator only."""
        self._replaced = directory.dcp_digest(self.path)
        if self._replaced is not None and not self.overwrite:
            raise CheckpointExistsError(
                f"{self.path} holds a checkpoint of DCP's own: save to another path, or "
                "install(overwrite=True)",
                path=self.path,
            )
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, and then removes what DCP had there; on the coordinator only."""
        super().finish(metadata, results)
        directory.mark(self.path)

    def _further_note(self) -> Mapping[str, Any]:
        return {} if self._replaced is None else {directory.REPLACED: self._replaced}


def reader_of(
    checkpoint_id: str | os.PathLike[str], options: Options | None = None
) -> storage.StorageReader:
    """The reader of what is in a directory; Penstock's, with its errors, where nothing is."""
    if directory.holds_dcp(decode_path(checkpoint_id)):
        return _CheckedReader(checkpoint_id)
    return StorageReader(checkpoint_id, options=options)


class _CheckedReader(filesystem.FileSystemReader):
    """DCP's reader, that first checks the files that are there and the pieces of each tensor."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begins a load."""
        if is_coordinator:
            # Whose error is that of all; each rank would ask for the files of all.
            path = str(self.path)
            check_files(path, metadata.storage_data or {})
            for name, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    pieces = ((tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks)
                    check_pieces(path, name, tuple(entry.size), pieces, is_whole=False)
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)


_Type: Any = type(filesystem.FileSystemWriter)


class _StandIn(_Type):  # type: ignore[misc]
    """The type of a class in the place of its base: what is an instance of that is one of it."""

    def __instancecheck__(cls, instance: Any) -> bool:  # noqa: N805  a class is its self
        # Not of what is derived from it in turn.
        stands_in = cls.__module__ == __name__
        return type.__instancecheck__(cls.__base__ if stands_in else cls, instance)


class FileSystemReader(filesystem.FileSystemReader, metaclass=_StandIn):
    """In the place of DCP's class of that name; see `install`."""

    def __new__(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """DCP's reader, or Penstock's, by what is in the directory."""
        is_plain = cls is FileSystemReader and not args and not kwargs and is_local(path)
        return reader_of(path) if is_plain else super().__new__(cls)


class FileSystemWriter(filesystem.FileSystemWriter, metaclass=_StandIn):
    """In the place of DCP's class of that name; see `install`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Penstock's writer, unless what is asked for can only be of DCP's own format."""
        bound = _SIGNATURE.bind(None, *args, **kwargs)
        given = dict(bound.arguments)
        changes_bytes = any(given.get(name) is not None for name in _CHANGES_BYTES)
        if cls is not FileSystemWriter or changes_bytes or not is_local(given["path"]):
            return super().__new__(cls)
        writer = DefaultWriter(given["path"], overwrite=given.get("overwrite", True))
        # Programs read these from DCP's writer: they describe files that this one never makes.
        bound.apply_defaults()
        for name in _SIGNATURE.parameters.keys() - {"self", *_CHANGES_BYTES[:1], *vars(writer)}:
            setattr(writer, name, bound.arguments[name])
        return writer


_SIGNATURE = inspect.signature(filesystem.FileSystemWriter.__init__)
