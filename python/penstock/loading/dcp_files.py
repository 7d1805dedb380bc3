"""The files of a checkpoint in the own format of PyTorch's Distributed Checkpoint (DCP).

DCP writes data as ``__<rank>_<number>.distcp``, and last of all `METADATA`, or one for each rank
where these did not talk. What is in data files is said there only.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from penstock.errors import IncompleteCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

METADATA = ".metadata"
"""What DCP calls the file that makes a directory one of its checkpoints."""

_DATA = re.compile(r"__\d+_\d+\.distcp")
_OF_A_RANK = re.compile(r"__\d+\.metadata")


def data_files(names: Iterable[str]) -> list[str]:
    """Which of the names in a directory are those of data."""
    return sorted(filter(_DATA.fullmatch, names))


def metadata_of_ranks(names: Iterable[str]) -> list[str]:
    """Which of them are those of metadata that ranks have written without the others."""
    return sorted(filter(_OF_A_RANK.fullmatch, names))


def check_finished(path: str, names: Iterable[str]) -> None:
    """Refuses what is left of a save that did not end, where there is no metadata.

    Raises:
        IncompleteCheckpointError: There is data.
    """
    data = data_files(names)
    if data:
        raise IncompleteCheckpointError(
            f"{path}: DCP's save there never finished: {METADATA}, which it writes last, is "
            f"missing beside {_few(data)}; take an earlier checkpoint, and remove this directory",
            path=path,
        )


def check_files(path: str, storage_data: Any) -> None:
    """Refuses a checkpoint of which files are missing or cut.

    Args:
        path: The directory.
        storage_data: Where its metadata says that items lie.

    Raises:
        IncompleteCheckpointError: They do not.
    """
    ends: dict[str, int] = {}
    for place in storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    missing = sorted(
        name for name, end in ends.items() if _bytes_of(os.path.join(path, name)) < end
    )
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise IncompleteCheckpointError(
            f"{path}: {_few(missing)} of DCP's checkpoint there {verb} missing or cut: copy the "
            "directory again, or take another checkpoint",
            path=path,
        )


def _bytes_of(file: str) -> int:
    try:
        return os.stat(file).st_size
    except FileNotFoundError:
        return -1


def _few(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
