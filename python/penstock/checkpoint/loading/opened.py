"""`OpenCheckpoint`: a checkpoint that is read bit by bit, by whoever says what comes next.

`penstock.load` reads a state in one call. A framework with a plan of its own (which leaves, which
boxes, into whose memory) opens the checkpoint, looks at its tree, and asks for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native
from penstock.checkpoint.loading.fetch import whole_request
from penstock.checkpoint.loading.foreign import telling
from penstock.checkpoint.state import tree
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.references import needed, reference
from penstock.checkpoint.state.tree import part_name
from penstock.checkpoint.view.partial import loadable
from penstock.checkpoint.view.view import view
from penstock.common.file_names import rank_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock._native import _Fill
    from penstock.checkpoint.state.references import Place
    from penstock.checkpoint.state.ties import Window
    from penstock.checkpoint.state.tree import Node
    from penstock.checkpoint.view.view import View
    from penstock.tensors.memory import Memory


CHUNK_BYTES = _native.CHUNK_BYTES
"""Bytes of a file that have one digest; the last ones of it may be fewer."""


MANIFEST = _native.MANIFEST
"""The file that makes a checkpoint complete."""


def is_of_rank(name: str) -> bool:
    """Whether a file is one that a save makes for a rank: a shard or a part, by its name."""
    return rank_of(name) is not None


class StoredTensor(NamedTuple):
    """A tensor that a leaf of the tree stands for.

    Attributes:
        of: Name of a tensor that is put together from boxes, or index of an entry.
        dtype: Name of its type.
        shape: Its sizes.
        window: Of a leaf that is a strided part of it: shape, strides and offset of that.
    """

    of: str | int
    dtype: str
    shape: tuple[int, ...]
    window: Window | None


class BoxRead(NamedTuple):
    """A box of a stored tensor, and the memory that it is read into.

    Attributes:
        tensor: The tensor, whole: windows of it are up to whoever asks.
        start: Where the box begins in it.
        memory: As large as the box, of the tensor's type, on the host.
    """

    tensor: StoredTensor
    start: tuple[int, ...]
    memory: Memory


class OpenCheckpoint:
    """A checkpoint, open: no save and no retention removes its files before `release`.

    Args:
        path: Its directory.
        native: The checkpoint, where it is open already; for this package.

    Attributes:
        path: The same.
        native: The checkpoint as the native module has it; for this package.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: The checkpoint is damaged, or none of Penstock's.
    """

    def __init__(self, path: str, native: _native.Checkpoint | None = None) -> None:
        self.path = path
        if native is None:
            with telling(path):
                native = _native.open(path)
        self.native = native
        self._seen: View | None = None
        try:
            self._part = part_name(self.native.files())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets the files be removed; nothing can be read any more."""
        self.native.release()

    def reading(self) -> AbstractContextManager[None]:
        """Has malformed trees (`TreeError`) reported as damage of the checkpoint."""
        return tree.reading(self.path, self._part)

    # What is there.

    @property
    def id(self) -> str:
        """The checkpoint's id: another one for each save."""
        return self.native.id

    def metadata(self) -> dict[str, Any]:
        """The note that was saved with it.

        Raises:
            CorruptCheckpointError: It is no JSON object.
        """
        with self.reading():
            return tree.parse_metadata(self.native.metadata)

    def look(self, rank: int, *, allow_partial: bool = False) -> bool:
        """Looks at it as a rank does; before all that follows.

        Args:
            rank: Whose view it is.
            allow_partial: Whether what was salvaged from a damaged one will do, though not all is.

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
        """What that rank sees."""
        if self._seen is None:
            raise AssertionError("nobody has looked at it yet")
        return self._seen

    @property
    def root(self) -> Node:
        """The tree."""
        return self.seen.node

    @property
    def tree_chars(self) -> int:
        """Length of all trees that were parsed for it."""
        return self.seen.tree_chars

    def tensor(self, node: dict[str, Node]) -> StoredTensor:
        """What a leaf of the tree stands for.

        Raises:
            TreeError: There is no such tensor.
        """
        seen = self.seen
        index, window = reference(node, seen.tensors, seen.aliases)
        _, dtype, shape, *_ = seen.tensors[index]
        return StoredTensor(seen.wholes.get(index, index), dtype, tuple(shape), window)

    def boxes(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Of every tensor that is put together from boxes: its name, start and shape of each."""
        for index, name, _, start in self.native.boxes():
            yield name, start, self.seen.tensors[index][2]

    # Reading.

    def check(
        self, file: str, start: int, memories: Sequence[Memory], wanted: tuple[int, int]
    ) -> None:
        """Compares bytes that somebody has read from a file with their digests.

        Args:
            file: Its name in the directory.
            start: Where in it the bytes begin, a multiple of `CHUNK_BYTES`.
            memories: That hold them, plain, one behind the other, up to such a multiple or the end
                of the file. Nobody writes to them meanwhile.
            wanted: Of those bytes the ones whose tensor is named first.

        Raises:
            CorruptCheckpointError: They are not what was saved.
        """
        pieces = [(one.address, one.nbytes, one.owner) for one in memories]
        self.native.check(file, start, pieces, wanted)

    def values(self, nodes: Sequence[Node], options: dict[str, Any]) -> Iterator[Any]:
        """Reads and builds values of the tree, one after the other.

        Args:
            nodes: Of the tree.
            options: How bytes move.

        Raises:
            TreeError: A node is malformed.
            CorruptCheckpointError: Its bytes are damaged.
        """
        seen = self.seen
        builder = Builder(seen.tensors, seen.aliases, self._places([*nodes], options))
        return map(builder.build, nodes)

    def _places(self, nodes: list[Node], options: dict[str, Any]) -> dict[int, Place]:
        """Reads the tensors inside of values."""
        seen = self.seen
        places: dict[int, Place] = {}
        requests: list[_Fill] = []
        for index in needed(nodes, seen.tensors, seen.aliases):
            row = seen.tensors[index]
            if row[4] != row[5]:
                memory, request = whole_request(seen.wholes.get(index, index), row)
                places[index] = (memory, 0)
                requests.append(request)
        self._fill(requests, options)
        return places

    def read(self, boxes: Iterable[BoxRead], options: dict[str, Any]) -> None:
        """Reads boxes straight into their memory; what has no elements is left out.

        Args:
            boxes: What is read. Their memories must not overlap.
            options: How bytes move.

        Raises:
            CorruptCheckpointError: The bytes of one are damaged.
        """
        requests: list[_Fill] = [
            (
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

    def _fill(self, requests: list[_Fill], options: dict[str, Any]) -> None:
        if requests:
            self.native.fill(requests, options=options, progress=None)
