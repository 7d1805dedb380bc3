"""Names of a checkpoint's files for people: ``shard-00000-00`` and no more, where that is enough.

Whole they are ``shard-00000-00.34b6ce68d52a42ed8d9d0f5510ce75ae.safetensors``. The part in the
middle names the save that wrote the file, and is the same for all files of a checkpoint.
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
"""A file of one save (`docs/format.md`)."""

_ATTEMPT_CHARACTERS_MIN = 8
"""Of an attempt, where it has to be there: what people compare at a glance."""


def step_of(name: str) -> int | None:
    """The step that a directory of a store is of, by its name; None for any other name."""
    # Names that are no UTF-8, which the native module does not take, are of others.
    return _native.parse_step(name) if name.isascii() else None


def rank_of(name: str) -> int | None:
    """The rank whose part or shard a file is, by its name; None for any other name."""
    return _native.rank_of_file(name) if name.isascii() else None


class FileNames:
    """Short names of the files of a checkpoint, no two of which have the same one.

    Where saves that were never finished have left files of the same rank and number, names keep as
    much of the attempt as tells them apart.

    Args:
        directory: The checkpoint.
        texts: What will be shown, with whole names in it.
    """

    def __init__(self, directory: Path | str, texts: Iterable[str | None]) -> None:
        self._directory = f"{directory}/"
        self._attempts: dict[str, set[str]] = {}
        for text in texts:
            for found in _NAME.finditer(text or ""):
                self._attempts.setdefault(found["stem"], set()).add(found["attempt"])

    @classmethod
    def beside_all(cls, directory: Path | str, texts: Iterable[str | None]) -> FileNames:
        """Names that are told apart from all that lies in the directory, though nobody shows it."""
        return cls(directory, [*_listed(directory), *texts])

    def short(self, text: str) -> str:
        """The text with short names in place of whole ones, and of their paths."""
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
        # Who may not look into it is told so elsewhere.
        return []
