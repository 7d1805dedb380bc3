"""Indexed datasets of Megatron-Core, read by Penstock."""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, Any

from penstock.integrations.megatron import fitting

fitting.check_datasets()

from megatron.core.datasets import indexed_dataset as theirs  # noqa: E402
from megatron.core.datasets.blended_dataset import BlendedDataset  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset  # noqa: E402

from penstock.features.indexed.index_file import IndexFile  # noqa: E402
from penstock.integrations.megatron.datasets.bin_reader import BinReader, answering  # noqa: E402
from penstock.integrations.megatron.datasets.read_ahead import samples  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.offload import TensorIO


def replacements(io: TensorIO | None = None) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of each attribute that is replaced."""
    yield theirs.IndexedDataset, "initialize", _initializing(theirs.IndexedDataset.initialize, io)
    make = "_query_document_sample_shuffle_indices"
    yield GPTDataset, make, answering(getattr(GPTDataset, make))
    for owner in (GPTDataset, BlendedDataset):
        yield owner, "__getitems__", samples


def _initializing(initialize: Callable[..., None], io: TensorIO | None) -> Callable[..., None]:
    @wraps(initialize)
    def initialized(
        self: Any, path_prefix: str, multimodal: bool, *args: Any, **kwargs: Any
    ) -> None:
        if theirs.is_object_storage_path(path_prefix):
            initialize(self, path_prefix, multimodal, *args, **kwargs)
            return
        # Workers may be in another directory when they open the files.
        path_prefix = os.path.abspath(path_prefix)
        # Megatron-Core deletes them at the end, of a dataset that was not opened, too.
        self.bin_reader = self.index = None
        # Before Megatron-Core maps what the header says, whether it is there or not.
        index = IndexFile.open(theirs.get_idx_path(path_prefix), multimodal=multimodal)
        initialize(self, path_prefix, multimodal, *args, **kwargs)
        if not isinstance(self.bin_reader, BinReader):
            self.bin_reader = BinReader(theirs.get_bin_path(path_prefix), index, io)

    return initialized


class IndexedDataset(theirs.IndexedDataset):  # type: ignore[misc]
    """Megatron-Core's `IndexedDataset`, whose data file is read past the page cache by Penstock.

    It takes the same arguments and has the same methods and attributes. Arrays have memory of their
    own: they are not views of a mapped file. A dataset in an object storage stays Megatron-Core's.

    Raises:
        CheckpointNotFoundError: There is no index at the path.
        StateMismatchError: The ``.idx`` file is no index.
        FormatVersionError: The index has a later version, or an unknown element type.
        CorruptCheckpointError: The index is shorter than its header says, or its rows are not those
            of its documents.
        StorageError: A file cannot be read, or the requested engine cannot run.
        UnsupportedStateError: Requests are shorter than 12 KiB.
    """

    initialize = _initializing(theirs.IndexedDataset.initialize, None)
