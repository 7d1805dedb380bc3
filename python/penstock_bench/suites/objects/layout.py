"""Where tensors lie in files of safetensors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path


def names(files: Iterable[Path]) -> list[str]:
    """The names of all tensors, in the order in which they lie."""
    return [name for file in files for name in _ordered(file)]


def runs(files: Iterable[Path], wanted: Collection[str]) -> int:
    """How many stretches of the files have these tensors and no others."""
    count = 0
    for file in files:
        is_wanted = [False, *(name in wanted for name in _ordered(file))]
        count += sum(one and not before for before, one in pairwise(is_wanted))
    return count


def _ordered(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return []
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"])
