"""Finds the tensor whose pieces on all ranks do not cover it once, to name it in an error.

The ranks compare one number each (`penstock.checkpoint.layout.sharding.Balance`), which says that a
tensor is wrong, and not which. The parts that they have written say it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoint.layout.boxes import check_tiled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.checkpoint.layout.boxes import Block


class Mistiled(NamedTuple):
    """A tensor whose pieces do not cover it once.

    Attributes:
        name: Its global name.
        why: What is wrong.
    """

    name: str
    why: str


def find_mistiled(parts: Iterable[str]) -> Mistiled | None:
    """Returns the first tensor that the parts do not cover once; None if there is none.

    Args:
        parts: Paths of the parts of all ranks.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    blocks: dict[str, list[Block]] = {}
    for path in parts:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)["tensors"]
        for entry in entries:
            box = entry.get("box")
            if box is None:
                continue
            name, kind = box["tensor"], (entry["dtype"], tuple(box["shape"]))
            if kinds.setdefault(name, kind) != kind:
                return Mistiled(name, f"ranks give it as {kinds[name]} and as {kind}")
            blocks.setdefault(name, []).append((tuple(box["start"]), tuple(entry["shape"])))
    for name, found in blocks.items():
        if len(set(found)) < len(found):
            return Mistiled(name, "two ranks wrote the same piece of it")
        try:
            check_tiled(kinds[name][1], found, is_whole=True)
        except ValueError as error:
            return Mistiled(name, str(error))
    return None
