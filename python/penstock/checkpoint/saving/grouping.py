"""`Grouping`: assigns the tensors of a flattened state to groups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.saving.groups import IN_PLACE, Groups, Member
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.names import plain_text, unescaped
from penstock.checkpoint.state.tree.plain import plain
from penstock.checkpoint.state.tree.references import is_data
from penstock.errors import UnsupportedStateError
from penstock.reports import Fallback
from penstock.tensors.native_rows import Grouped

if TYPE_CHECKING:
    from collections.abc import Container

    from penstock.checkpoint.state.flattened import Flattened
    from penstock.tensors.native_rows import GlobalBox

_RESERVED = "__metadata__"
_LED = re.compile(r"@[0-9]+$")
"""Suffix of the global names of tensors that rank 0 does not hold; `docs/format.md`, 6.7."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The grouped tensors of a save, and the index to write.

    Attributes:
        rows: The tensors of groups, in the form that the native module takes.
        index: The group that gets an index; None for no index.
        fallbacks: The reason for a missing index, and the renaming of tensors whose names a wrapper
            seemed to have changed.
    """

    rows: list[Grouped]
    index: str | None = None
    fallbacks: tuple[Fallback, ...] = ()

    @classmethod
    def of(cls, groups: Groups, flat: Flattened, rank: int | None = None) -> Grouping:
        """Finds the groups' tensors in a state. Own tensors are grouped on the first rank only."""
        if not groups.group_of:
            return cls([])
        names = _Names(flat)
        own = groups.among(names.all())
        rows = _rows(groups, own, flat, names, rank)
        renamed = _renamed(own, names)
        if IN_PLACE not in groups.group_of.values():
            return cls(rows, None, renamed)
        for name in names.without_bytes:
            if own.group(name) == IN_PLACE:
                reason = f"{name} has no bytes of its own: `penstock export` writes it out"
                return cls(rows, None, (Fallback(reason, "unindexed"), *renamed))
        return cls(rows, IN_PLACE, renamed)


def names_of_nodes(root: tree.Node) -> dict[int, str]:
    """Returns the name of each tensor of a tree, by the identity of its node."""
    return {id(node): name for name, node in tree.leaves(plain(root)) if is_data(node)}


class _Names:
    """Names of a state's tensors, from its tree.

    Attributes:
        without_bytes: Names of windows of other tensors, and of empty tensors that ranks share.
    """

    def __init__(self, flat: Flattened) -> None:
        self._of: dict[int | str, list[str]] = {}
        self.without_bytes: list[str] = []
        if flat.tree == tree.AS_FIRST:
            # A planner flattened the state: the names are the planner's.
            for index, source in enumerate(flat.tensors):
                box = source.box
                name = source.name if box is None else _LED.sub("", box.tensor)
                self._of[index if box is None else box.tensor] = [name]
            return
        for name, node in tree.leaves(plain(tree.parse(flat.tree))):
            if is_data(node):
                self._add(name, node, flat)

    def _add(self, name: str, node: dict[str, Any], flat: Flattened) -> None:
        window, of = node.get("view"), node.get("i", node.get("g"))
        if "a" in node:
            _, of, window = flat.aliases[node["a"]]
        is_shared = "g" in node
        if window is not None or (is_shared and 0 in node["shape"]):
            self.without_bytes.append(name)
        if window is None and of is not None:
            self._of.setdefault(of, []).append(name)

    def of(self, index: int, box: GlobalBox | None) -> list[str]:
        """Returns the names of a tensor, or of the tensor that it is a box of, first one first."""
        return self._of.get(index if box is None else box.tensor, [])

    def all(self) -> list[str]:
        """Returns the names of all tensors."""
        return [*(name for names in self._of.values() for name in names), *self.without_bytes]


def _rows(
    groups: Groups, own: Groups, flat: Flattened, names: _Names, rank: int | None
) -> list[Grouped]:
    rows: list[Grouped] = []
    taken: set[Member] = set()
    label_of: dict[Member, str] = {}
    members = own.members(names.all())
    present = set()
    for index, source in enumerate(flat.tensors):
        box = source.box
        if box is None and rank:
            continue
        listed = names.of(index, box)
        member = _of_tied([members[name] for name in listed if name in members])
        present |= {members[name].group for name in listed if name in members}
        if member is None or _is_bytes(source.owner):
            continue
        label, is_piece = listed[0], box is not None and box.shape != source.shape
        if member.name == _RESERVED:
            raise UnsupportedStateError(
                f"{label}: {_RESERVED} is no name of a tensor in safetensors: rename the key",
                key=label,
            )
        if member in label_of and not is_piece:
            raise UnsupportedStateError(
                f"{label}: in the group {member.group!r} it is called {member.name!r}, as "
                f"{label_of[member]} is: rename a key of one",
                key=label,
            )
        label_of[member] = label
        # A rank may have several pieces, and names that differ by escapes are written alike.
        written = _free(member._replace(name=plain_text(unescaped(member.name))), taken)
        taken.add(written)
        rows.append(Grouped(index, *written))
    for index, row in enumerate(flat.linked.tensors, len(flat.tensors)):
        # The file fixes the tensor's name: the tensor belongs to the group only under that name.
        for name in names.of(index, row.box):
            found = members.get(name)
            if found is None or row.box is not None:
                continue
            if plain_text(unescaped(found.name)) == row.stored_name:
                rows.append(Grouped(index, found.group, row.stored_name))
                present.add(found.group)
                break
    missing = set(groups.group_of.values()) - present
    if missing and rank is None:
        prefix = next(name for name, group in groups.group_of.items() if group in missing)
        raise UnsupportedStateError(
            f"groups: the state has no tensor below {prefix!r}: name a key of it, or several "
            "with dots between",
            key=prefix,
        )
    return rows


def _renamed(own: Groups, names: _Names) -> tuple[Fallback, ...]:
    """Returns the fallback for names that a wrapper seemed to have changed."""
    found = [
        (name, member.name)
        for name, member in own.members(names.all()).items()
        if member.name != own.inner(name)
    ]
    if not found:
        return ()
    (name, called), more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
    reason = (
        f"{name}{more}: readers of models find it as {called!r}, as the rest is taken for the "
        "name of a wrapper; penstock.load has it as it was"
    )
    return (Fallback(reason, "renamed"),)


def _of_tied(members: list[Member]) -> Member | None:
    """Returns the place of a tensor with several names; the group with the index comes first."""
    indexed = [member for member in members if member.group == IN_PLACE]
    return next(iter(indexed or members), None)


def _is_bytes(owner: Any) -> bool:
    """Whether a memory's owner is a byte string, which is a value and not a tensor."""
    return isinstance(getattr(owner, "base", None), bytes | bytearray)


def _free(member: Member, taken: Container[Member]) -> Member:
    free, number = member, 1
    while free in taken:
        number += 1
        free = member._replace(name=f"{member.name}~{number}")
    return free
