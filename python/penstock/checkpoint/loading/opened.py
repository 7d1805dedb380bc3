"""`OpenCheckpoint`: an open checkpoint, read piece by piece in the caller's order.

`penstock.load` reads a state in one call. A framework with its own plan (of leaves, boxes and
memory) opens the checkpoint, inspects its tree, and requests what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native
from penstock.checkpoint.loading.fetch import whole_request
from penstock.checkpoint.loading.path_kind import describing_contents
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.references import needed, reference
from penstock.checkpoint.state.tree.tree import part_name
from penstock.checkpoint.view.partial import loadable
from penstock.checkpoint.view.view import view
from penstock.common.file_names import rank_of
from penstock.sealing.unsealing import CLEAR, Unsealing
from penstock.tensors.native_rows import Fill, TensorTarget

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.checkpoint.state.tree.references import BytesLocation, Window
    from penstock.checkpoint.state.tree.tree import Node
    from penstock.checkpoint.view.view import View
    from penstock.tensors.memory import Memory


CHUNK_BYTES = _native.CHUNK_BYTES
"""Bytes of a file that one digest covers; the last chunk may be shorter."""


MANIFEST = _native.MANIFEST
"""The file that makes a checkpoint complete."""


def is_of_rank(name: str) -> bool:
    """Whether a file name is that of a rank's shard or part."""
    return rank_of(name) is not None


class StoredTensor(NamedTuple):
    """A stored tensor that a leaf of the tree refers to.

    Attributes:
        of: Name of a tensor that is assembled from boxes, or index of an entry.
        dtype: Name of the element type.
        shape: The sizes.
        window: Shape, strides and offset of the leaf, if it is a strided part of the tensor.
    """

    of: str | int
    dtype: str
    shape: tuple[int, ...]
    window: Window | None


class BoxRead(NamedTuple):
    """A box of a stored tensor, and the memory to read it into.

    Attributes:
        tensor: The whole tensor; the caller handles windows.
        start: Index of the box's first element.
        memory: Host memory of the box's size and the tensor's type.
    """

    tensor: StoredTensor
    start: tuple[int, ...]
    memory: Memory


class OpenCheckpoint:
    """An open checkpoint; no save and no retention removes its files before `release`.

    Args:
        path: The checkpoint's directory.
        native: The native checkpoint, if it is already open; for this package.
        unsealing: How a sealed checkpoint is opened; for this package.

    Attributes:
        path: The checkpoint's directory.
        native: The native checkpoint; for this package.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: The checkpoint is damaged, or not a Penstock checkpoint.
        SealedError: The checkpoint is sealed.
        SignatureError: No accepted key has signed it.
    """

    def __init__(
        self,
        path: str,
        native: _native.Checkpoint | None = None,
        unsealing: Unsealing = CLEAR,
    ) -> None:
        self.path = path
        # A checkpoint that was opened while steps were listed is not unsealed.
        if native is None or native.is_closed or unsealing.refuses_some:
            with describing_contents(path):
                native = unsealing.open(path)
        self.native = native
        self._seen: View | None = None
        try:
            self._part = part_name(self.native.files())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Allows the removal of the files; nothing can be read afterwards."""
        self.native.release()

    def reading(self) -> AbstractContextManager[None]:
        """Reports malformed trees (`TreeError`) as damage of the checkpoint."""
        return tree.reading(self.path, self._part)

    # Contents.

    @property
    def id(self) -> str:
        """The checkpoint's id, different for each save."""
        return self.native.id

    def metadata(self) -> dict[str, Any]:
        """The note that was saved with the checkpoint.

        Raises:
            CorruptCheckpointError: It is no JSON object.
        """
        with self.reading():
            return tree.parse_metadata(self.native.metadata)

    def view_as(self, rank: int, *, allow_partial: bool = False) -> bool:
        """Views the checkpoint as a rank; must precede the following calls.

        Args:
            rank: The rank.
            allow_partial: Whether an incomplete salvaged checkpoint is acceptable.

        Returns:
            Whether leaves of the tree are missing; see
                `penstock.checkpoint.view.partial.is_missing`.

        Raises:
            PartialCheckpointError: Something is missing, or was never checked.
            CorruptCheckpointError: A tree is malformed.
        """
        with self.reading():
            seen = self._seen = view(self.native, rank)
            _, is_left_out = loadable(
                seen.node, self.native, self.path, allow_partial=allow_partial, lost=seen.lost
            )
        return is_left_out

    @property
    def seen(self) -> View:
        """The view of that rank."""
        if self._seen is None:
            raise AssertionError("nobody has looked at it yet")
        return self._seen

    @property
    def root(self) -> Node:
        """The tree of that rank."""
        return self.seen.node

    @property
    def tree_chars(self) -> int:
        """Length of all trees that were parsed for the view."""
        return self.seen.tree_chars

    def tensor(self, node: dict[str, Node]) -> StoredTensor:
        """Returns the stored tensor of a leaf.

        Raises:
            TreeError: The leaf refers to no tensor.
        """
        seen = self.seen
        index, window = reference(node, seen.tensors, seen.aliases)
        entry = seen.tensors[index]
        return StoredTensor(seen.wholes.get(index, index), entry.dtype, entry.shape, window)

    def boxes(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Yields name, start and shape of each box of every tensor assembled from boxes."""
        for box in self.native.boxes():
            yield box.tensor, box.start, self.seen.tensors[box.index].shape

    # Reads.

    def check(
        self, file: str, start: int, memories: Sequence[Memory], wanted: tuple[int, int]
    ) -> None:
        """Checks bytes that the caller has read from a file against their digests.

        Args:
            file: The file's name in the directory.
            start: Offset of the bytes, a multiple of `CHUNK_BYTES`.
            memories: Contiguous memories with the bytes, in order, up to a multiple of
                `CHUNK_BYTES` or the end of the file. They must not be written to meanwhile.
            wanted: The byte range whose tensor an error names first.

        Raises:
            CorruptCheckpointError: The bytes are not those that were saved.
        """
        pieces = [TensorTarget(one.address, one.nbytes, one.owner) for one in memories]
        self.native.check(file, start, pieces, wanted)

    def open_chunks(
        self, file: str, start: int, memories: Sequence[Memory], wanted: tuple[int, int]
    ) -> None:
        """Opens sealed bytes in place that the caller has read from a file.

        Digests are not compared. After a `TamperedError`, read the bytes again and `check` them:
        wrong digests are damage.

        Args:
            file: The file's name in the directory.
            start: Offset of the bytes, a multiple of `CHUNK_BYTES`.
            memories: Contiguous memories with the bytes, in order, up to a multiple of
                `CHUNK_BYTES` or the end of the file. Afterwards they have the text.
            wanted: The byte range whose tensor an error names first.

        Raises:
            TamperedError: A chunk is not the one that was sealed for its place. It is zeros now.
        """
        pieces = [TensorTarget(one.address, one.nbytes, one.owner) for one in memories]
        self.native.open_chunks(file, start, pieces, wanted)

    def small_file(self, name: str) -> bytes | None:
        """The content of a small file that was saved with the checkpoint; None without one.

        Raises:
            CorruptCheckpointError: It is damaged.
            SignatureError: It is not the signed one.
        """
        return self.native.sidecar(name)

    @property
    def is_sealed(self) -> bool:
        """Whether the checkpoint is sealed."""
        return self.native.recipients is not None

    def values(self, nodes: Sequence[Node], options: dict[str, Any]) -> Iterator[Any]:
        """Reads and builds values of the tree, one after another.

        Args:
            nodes: Nodes of the tree.
            options: How bytes move.

        Raises:
            TreeError: A node is malformed.
            CorruptCheckpointError: A value's bytes are damaged.
        """
        seen = self.seen
        builder = Builder(seen.tensors, seen.aliases, self._places([*nodes], options))
        return map(builder.build, nodes)

    def _places(self, nodes: list[Node], options: dict[str, Any]) -> dict[int, BytesLocation]:
        """Reads the tensors in values."""
        seen = self.seen
        places: dict[int, BytesLocation] = {}
        requests: list[Fill] = []
        for index in needed(nodes, seen.tensors, seen.aliases):
            entry = seen.tensors[index]
            if entry.begin != entry.end:
                memory, request = whole_request(seen.wholes.get(index, index), entry)
                places[index] = (memory, 0)
                requests.append(request)
        self._fill(requests, options)
        return places

    def read(self, boxes: Iterable[BoxRead], options: dict[str, Any]) -> None:
        """Reads boxes directly into their memory, omitting empty ones.

        Args:
            boxes: The boxes. Their memories must not overlap.
            options: How bytes move.

        Raises:
            CorruptCheckpointError: The bytes of a box are damaged.
        """
        requests: list[Fill] = [
            Fill(
                tensor.of,
                start,
                memory.shape,
                memory.address,
                memory.strides,
                memory.item_bytes,
                memory.owner,
                None,
            )
            for tensor, start, memory in boxes
            if 0 not in memory.shape
        ]
        self._fill(requests, options)

    def _fill(self, requests: list[Fill], options: dict[str, Any]) -> None:
        if requests:
            self.native.fill(requests, options=options, progress=None)
