"""`FileWatch`: whether the files of a table still have the rows that it was opened with."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from penstock.errors import CorruptCheckpointError
from penstock.io.file_marks import REASONS, Change, FileMarks

if TYPE_CHECKING:
    from penstock.features.source import Source


class FileWatch:
    """Compares the files of a table with their marks, and a checkpoint's with its digests.

    Args:
        source: The table.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._marks = FileMarks({one.path: one.mark for one in source.segments})
        self._comparing = threading.Lock()
        self._differing: set[str] = set()

    def check(self) -> None:
        """Refuses files that somebody has written to, or put others in their place.

        Raises:
            CorruptCheckpointError: One has changed.
            StorageError: A file cannot be compared with its digests.
        """
        source = self._source
        for path in dict.fromkeys(segment.path for segment in source.segments):
            change, _ = self._marks.look(path)
            if change is Change.NONE:
                continue
            # Rows that have checksums are compared with them whenever they are read.
            if change is Change.TOUCHED and (source.checks is not None or self._is_whole(path)):
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
        """Whether digests say that a file which was touched has the rows that were saved.

        Exports and retention give and take names of a checkpoint's files, in any process.
        """
        if self._source.kept is None:
            return False
        with self._comparing:
            if path in self._differing:
                # The cache may have rows from then, whatever the file has by now.
                return False
            change, mark = self._marks.look(path)
            if change is Change.TOUCHED:
                self._differing.add(path)
                self._source.check_digests(path)
                self._differing.remove(path)
                self._marks.accept(path, mark)
        return True
