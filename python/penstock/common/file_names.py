"""Short names of a checkpoint's files for people: ``shard-00000-00`` if that is unique.

The whole name is ``shard-00000-00.34b6ce68d52a42ed8d9d0f5510ce75ae.safetensors``. Its middle part
names the save that wrote the file, and is the same for all files of a checkpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock import _native

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_NAME = re.compile(
    r"(?P<stem>(?:part|shard)-[0-9-]+)\.(?P<attempt>[0-9a-f]{32})\.(?:json|safetensors)\b"
)
"""The name of a file of one save (`docs/format.md`)."""

_ATTEMPT_CHARACTERS_MIN = 8
"""Characters shown of an attempt's id where needed: as many as people compare at a glance."""


def step_of(name: str) -> int | None:
    """Returns the step of a store's directory by its name; None for any other name."""
    # Penstock's names are ASCII. The native module does not take names that are not UTF-8.
    return _native.parse_step(name) if name.isascii() else None


def rank_of(name: str) -> int | None:
    """Returns the rank of a part or shard by its file name; None for any other name."""
    return _native.rank_of_file(name) if name.isascii() else None


class FileNames:
    """Unique short names of the files of a checkpoint.

    If unfinished saves have left files of the same rank and number, short names keep as much of the
    attempt's id as distinguishes them.
    """

    def __init__(self, directory: Path | str, texts: Iterable[str | None]) -> None:
        self._directory = f"{directory}/"
        self._attempts: dict[str, set[str]] = {}
        for text in texts:
            for found in _NAME.finditer(text or ""):
                self._attempts.setdefault(found["stem"], set()).add(found["attempt"])

    @classmethod
    def beside_all(cls, directory: Path | str, texts: Iterable[str | None]) -> FileNames:
        """Returns names that are unique among all files of the directory, shown or not."""
        return cls(directory, [*_listed(directory), *texts])

    def short(self, text: str) -> str:
        """Replaces whole names and their paths in a text by short names."""
        return _NAME.sub(self._shortened, text.replace(self._directory, ""))

    def _shortened(self, found: re.Match[str]) -> str:
        others = self._attempts.get(found["stem"], set()) - {found["attempt"]}
        if not others:
            return found["stem"]
        attempt, kept = found["attempt"], _ATTEMPT_CHARACTERS_MIN
        while any(one.startswith(attempt[:kept]) for one in others):
            kept += 1
        return f"{found['stem']}.{attempt[:kept]}"


def _listed(directory: Path | str) -> list[str]:
    try:
        return _native.list_names(str(directory))
    except OSError:
        # The error is reported by the operation itself.
        return []
