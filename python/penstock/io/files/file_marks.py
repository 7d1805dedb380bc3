"""`FileMark` detects whether a file has changed since it was opened; `FileMarks`, several files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class FileMark:
    """Properties that change when a file is written to or replaced.

    Two marks are equal if size, modification time, file system and inode are equal.

    Attributes:
        nbytes: The size of the file.
        modified_ns: Its modification time, nanoseconds since 1970. Programs can set it back.
        device: Its file system's number.
        number: Its inode.
        changed_ns: The time of its last change of any kind, which programs cannot set back. A new
            name, new permissions and a new owner also change it.
    """

    nbytes: int
    modified_ns: int
    device: int
    number: int
    changed_ns: int = field(compare=False)

    @classmethod
    def of(cls, stat: os.stat_result) -> FileMark:
        """Returns the mark of a file."""
        return cls(
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_dev,
            stat.st_ino,
            stat.st_ctime_ns,
        )

    def fields(self) -> tuple[int, int, int, int, int]:
        """The values in the order in which the native `FileTimes` takes them."""
        return self.nbytes, self.modified_ns, self.changed_ns, self.device, self.number


class Change(Enum):
    """A difference between a file and its mark."""

    NONE = "none"
    TOUCHED = "touched"
    """The change time differs, but size and modification time are equal.

    The file may only have gained or lost a name, as exports and retention add and remove hard
    links. But changed bytes leave the same trace if the modification time is set back: only digests
    can decide.
    """
    WRITTEN = "written"
    """The size, modification time or inode differs."""
    GONE = "gone"


class FileMarks:
    """Compares files with the marks that they had when they were opened.

    Args:
        marks: The marks, by the paths of the files.
    """

    def __init__(self, marks: Mapping[str, FileMark]) -> None:
        self._marks = dict(marks)

    def inspect(self, path: str) -> tuple[Change, FileMark]:
        """Returns the difference between a file and its mark, and the file's current mark."""
        mark = self._marks[path]
        try:
            found = FileMark.of(os.stat(path))
        except OSError:
            return Change.GONE, mark
        if found != mark:
            return Change.WRITTEN, found
        is_same = found.changed_ns == mark.changed_ns
        return (Change.NONE if is_same else Change.TOUCHED), found

    def accept(self, path: str, mark: FileMark) -> None:
        """Accepts a file whose bytes were checked against digests as unchanged.

        Args:
            path: The path of the file.
            mark: The file's mark from before the check.
        """
        self._marks[path] = mark


REASONS = {
    Change.TOUCHED: (
        "has changed, though its time of modification is the old one (the system's own time of"
        " change is not), or it has got or lost a name (a hard link), another owner or other"
        " permissions"
    ),
    Change.WRITTEN: "has changed",
    Change.GONE: "is gone",
}
"""Text of an error for each change, after the path of the file."""
