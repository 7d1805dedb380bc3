"""`FileMark`: whether a file is still the one that was opened, and `FileMarks` for several."""

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

    Two marks are equal where size, time of modification, file system and inode are.

    Attributes:
        nbytes: The length of the file.
        modified_ns: Its time of modification, nanoseconds since 1970. Programs can put it back.
        device: Its file system.
        number: Its inode.
        changed_ns: The time of its last change of any kind, which no program can put back. A new
            name for the file, other permissions and another owner count.
    """

    nbytes: int
    modified_ns: int
    device: int
    number: int
    changed_ns: int = field(compare=False)

    @classmethod
    def of(cls, stat: os.stat_result) -> FileMark:
        """The mark of a file."""
        return cls(
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_dev,
            stat.st_ino,
            stat.st_ctime_ns,
        )


class Change(Enum):
    """A difference between a file and its mark."""

    NONE = "none"
    TOUCHED = "touched"
    """The system has noted a change that size and time of modification do not show.

    Perhaps the file has only got or lost a name, as exports and retention give and take them. But
    a hard link leaves the same trace as a link and a change of the bytes: only digests decide.
    """
    WRITTEN = "written"
    """Another size, time of modification or inode."""
    GONE = "gone"


class FileMarks:
    """Compares files with the marks that they had when they were opened.

    Args:
        marks: The marks, by the paths of the files.
    """

    def __init__(self, marks: Mapping[str, FileMark]) -> None:
        self._marks = dict(marks)

    def look(self, path: str) -> tuple[Change, FileMark]:
        """The difference between a file and its mark, and the mark that the file has now."""
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
        """Takes a file for the one that was opened, since its bytes are compared with digests.

        Args:
            path: The file.
            mark: Its mark from before they were compared.
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
"""The words of an error, behind the path of the file."""
