"""`FileWatch`: detects that files of an open table were changed."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from penstock import _native
from penstock.errors import CorruptCheckpointError
from penstock.io.files.file_marks import REASONS, Change, FileMarks

if TYPE_CHECKING:
    from penstock.features.sources.source import Source


class FileWatch:
    """Compares files of a table with their marks, and those of a checkpoint with its digests.

    Attributes:
        times: Asks in one call whether all files have their marks: the quick answer before `check`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        marks = {one.path: one.mark for one in source.segments}
        self._paths = tuple(marks)
        self._marks = FileMarks(marks)
        self.times = _native.FileTimes([(path, marks[path].fields()) for path in marks])
        self._comparing = threading.Lock()
        self._differing: set[str] = set()

    def check(self) -> None:
        """Raises `CorruptCheckpointError` if a file was written to, replaced or removed."""
        if self.times.are_unchanged():
            return
        source = self._source
        for path in self._paths:
            change, _ = self._marks.inspect(path)
            if change is Change.NONE:
                continue
            # Rows with checksums or tags are compared with these at each read.
            if change is Change.TOUCHED and (source.is_checked or self._is_whole(path)):
                continue
            directory, file = os.path.split(path)
            raise CorruptCheckpointError(
                f"{path} {REASONS[change]} since the table was opened: "
                f"{'put it back' if change is Change.GONE else 'open it again'}",
                path=directory,
                file=file,
                tensor=source.key,
            )

    def _is_whole(self, path: str) -> bool:
        """Whether a touched file still has the saved rows, by its digests.

        Exports and retention link and unlink files of a checkpoint, from any process.
        """
        if self._source.checkpoint is None:
            return False
        with self._comparing:
            if path in self._differing:
                # The cache may hold rows read while it differed, even if the file is whole again.
                return False
            change, mark = self._marks.inspect(path)
            if change is Change.TOUCHED:
                self._differing.add(path)
                self._source.check_digests(path)
                self._differing.remove(path)
                self._marks.accept(path, mark)
                self.times.accept(self._paths.index(path), mark.fields())
        return True
