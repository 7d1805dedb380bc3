"""`LeafNames`: maps a tensor's name in a part to the name of its leaf.

A part names a tensor by its raw keys, without escapes (`docs/format.md`, 6.4). Reports and errors
use the names of leaves, with escapes (`penstock.checkpoint.state.tree.names`), because loads and
other calls accept those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.names import plain_text, unescaped
from penstock.checkpoint.state.tree.plain import plain
from penstock.checkpoint.state.tree.references import is_data
from penstock.checkpoint.state.tree.scalars import TreeError
from penstock.errors import PenstockError
from penstock.reports import Problem
from penstock.sealing.unsealing import CLEAR, Unsealing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock._native import MissingTensor

NAME_CHARS_PER_CHAR = 256
"""Upper bound of all names' characters per character of the tree: a file of kilobytes must not fill
memory. A list of small numbers below a path of 500 characters needs that much.
"""

NAME_CHARS_MIN = 1 << 20
"""Characters that all names may use for any tree."""

_NUMBERED = re.compile(r"~\d+$")
_LED = re.compile(r"@\d+$")


@dataclass(frozen=True, slots=True)
class LeafNames:
    """Leaf names of a checkpoint's tensors.

    Attributes:
        tensors: Names of each rank's own tensors, by index.
        aliases: Names of aliases, by number.
        missing: Names of tensors that could not be salvaged, by number.
        shared: Names of tensors that ranks share, by their names in parts.
    """

    tensors: dict[int, str] = field(default_factory=dict)
    aliases: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: _native.Checkpoint) -> LeafNames:
        """Collects the names in all trees of an open checkpoint; a malformed tree yields none."""
        found = cls()
        rows = checkpoint.missing()
        of_first = _leaves(checkpoint.rank_tree(0))
        shown: set[str] = set()
        for rank, (first, first_alias) in enumerate(checkpoint.offsets()):
            text = checkpoint.rank_tree(rank)
            first_missing = _first_missing(rows, rank)
            for name, leaf in of_first if text == tree.AS_FIRST else _leaves(text):
                number, alias, shared = (leaf.get(key) for key in ("i", "a", "g"))
                if type(number) is int and leaf["$"] != "missing":
                    found.tensors.setdefault(first + number, name)
                elif type(number) is int:
                    found._add_missing(rows, first_missing + number, name)
                elif type(alias) is int:
                    found.aliases.setdefault(first_alias + alias, name)
                elif type(shared) is str and shared not in found.shared and name not in shown:
                    found._add_shared(shared, name, shown)
        return found

    def _add_missing(self, rows: list[MissingTensor], number: int, name: str) -> None:
        # Shared tensors may be listed before a rank's own tensors, and shift their numbers.
        if number < len(rows) and _is_called(rows[number].name, name):
            self.missing.setdefault(number, name)

    def _add_shared(self, shared: str, name: str, shown: set[str]) -> None:
        # Different ranks may use one name for different tensors, and a tensor may have several
        # names.
        if _is_called(_LED.sub("", shared), name):
            self.shared[shared] = name
            shown.add(name)

    def of_missing(self, number: int, row: MissingTensor) -> str:
        """Returns the name of a missing tensor, by its number."""
        if row.kind == "shared":
            return self.shared.get(row.name) or row.name
        return self.missing.get(number) or row.name

    def in_parts(self, checkpoint: _native.Checkpoint) -> dict[tuple[int, str], str]:
        """Returns the leaf name of each stored tensor, by rank and by name in that rank's part."""
        wholes = {box.index: box.tensor for box in checkpoint.boxes()}
        found = {}
        for index, entry in enumerate(checkpoint.tensors()):
            rank = _native.rank_of_file(entry.file) or 0
            known = self.shared.get(wholes[index]) if index in wholes else self.tensors.get(index)
            found[rank, entry.name] = known or entry.name
        return found


def problems_of(
    path: str, rows: Iterable[Mapping[str, Any]], unsealing: Unsealing = CLEAR
) -> tuple[Problem, ...]:
    """Returns a checkpoint's problems, with the leaf names of tensors."""
    problems = [Problem(**row) for row in rows]
    if all(one.tensor is None for one in problems):
        return tuple(problems)
    checkpoint = _opened(path, unsealing)
    names = {} if checkpoint is None else LeafNames.of(checkpoint).in_parts(checkpoint)
    return tuple(_renamed(one, names) for one in problems)


def names_of(
    path: str, rows: Iterable[tuple[str, int | None]], unsealing: Unsealing = CLEAR
) -> list[str]:
    """Returns the leaf names of a checkpoint's tensors; names in parts if the trees are lost.

    Args:
        path: The checkpoint's directory.
        rows: Each tensor's name in its part, and the rank that owns it; None for tensors that ranks
            share and in a checkpoint of one rank.
        unsealing: How a sealed checkpoint is opened.
    """
    listed = list(rows)
    checkpoint = _opened(path, unsealing)
    if checkpoint is None:
        return [label for label, _ in listed]
    names = LeafNames.of(checkpoint)
    in_parts = names.in_parts(checkpoint)
    is_alone = checkpoint.world_size == 1

    def name(label: str, rank: int | None) -> str:
        if rank is None and label in names.shared:
            return names.shared[label]
        if rank is None and not is_alone:
            return label
        return in_parts.get((rank or 0, label), label)

    return [name(label, rank) for label, rank in listed]


def _opened(path: str, unsealing: Unsealing) -> _native.Checkpoint | None:
    try:
        return unsealing.open(path)
    except PenstockError:
        return None


def _renamed(problem: Problem, names: Mapping[tuple[int, str], str]) -> Problem:
    if problem.tensor is None or problem.file is None:
        return problem
    key = (_native.rank_of_file(problem.file) or 0, problem.tensor)
    return Problem(
        file=problem.file,
        offset=problem.offset,
        tensor=names.get(key, problem.tensor),
        message=problem.message,
        is_proven=problem.is_proven,
    )


def name_chars_max(text: str) -> int:
    """Returns the largest number of characters that the names of a tree's leaves may use."""
    return NAME_CHARS_MIN + NAME_CHARS_PER_CHAR * len(text)


def _leaves(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tensor leaves of a tree, present or missing; none if the tree is malformed."""
    try:
        leaves = tree.named(plain(tree.parse(text)), name_chars_max(text))
        return [(name, leaf) for name, leaf in leaves if is_data(leaf) or _is_missing(leaf)]
    except TreeError:
        # A load reports this error.
        return []


def _first_missing(rows: list[MissingTensor], rank: int) -> int:
    """Returns the number of the first row of a rank's own tensors."""
    if rank == 0:
        return 0
    return next((number for number, row in enumerate(rows) if row.rank == rank), len(rows))


def _is_missing(leaf: tree.Node) -> bool:
    return type(leaf) is dict and leaf.get("$") == "missing"


def _is_called(label: str, name: str) -> bool:
    """Whether a part may use this label for the leaf with this name."""
    written = plain_text(unescaped(name))
    return label == written or _NUMBERED.sub("", label) == _NUMBERED.sub("", written)
