"""The tree: a state's structure and plain leaves as typed JSON, directly from a file.

A *node* is a value returned by `json.loads`. Containers are arrays, objects without a member
``"$"``, and the tagged objects named in `SEQUENCES` and `MAPPINGS`; everything else is a leaf. This
module parses and names, `penstock.checkpoint.state.tree.select` selects, and
`penstock.checkpoint.state.build` converts nodes to Python values. No function trusts the text: any
defect is a `TreeError`.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock import _native
from penstock.checkpoint.state.tree.names import EMPTY, labels
from penstock.checkpoint.state.tree.scalars import TreeError, UnknownError, decode_keys, member
from penstock.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    MissingDependencyError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Node: TypeAlias = Any
"""None, bool, int, float, str, list of nodes or dict from str to node."""

SEQUENCES = frozenset({"tuple", "deque"})
MAPPINGS = frozenset({"dict", "odict", "counter", "defaultdict"})

LEVELS_MAX = 128
"""Largest depth of containers; bounds the stack of every function that walks a state."""

ROOT = "value"
"""Name of the only leaf of a state that is not a container."""

CLASS, CLASS_VALUE, CONTEXT = "(type)", "(value)", "(context)"
"""Names of additional members of a class's value, in names of leaves and in plain loads."""

AS_FIRST = '{"$":"first"}'
"""The tree of a rank whose state equals that of the first rank."""


class _Skipped:
    """Marks the place of a leaf that the caller did not request."""

    def __repr__(self) -> str:
        return "SKIPPED"


SKIPPED = _Skipped()


def parse(text: str) -> Node:
    """Parses a tree.

    Raises:
        TreeError: The text is not JSON, repeats a key or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise TreeError("nested too deeply") from None
    except TreeError:
        raise
    except ValueError as error:
        raise TreeError(f"not JSON: {error}") from None


def parse_metadata(text: str) -> dict[str, Any]:
    """Parses the note of a checkpoint.

    Raises:
        TreeError: The text is not a JSON object, or is nested too deeply.
    """
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        note = None
    if type(note) is not dict:
        raise TreeError("the metadata is no JSON object")
    return note


@contextmanager
def reading(path: str, file: str | None) -> Iterator[None]:
    """Converts errors in a tree to the public errors.

    The digest of the tree matched: such an error is no proof of damage.
    """
    where = f"{path}/{file}" if file else path
    remedy = "read it with the version of Penstock that wrote it, or load another checkpoint"
    try:
        yield
    except MissingDependencyError as error:
        raise MissingDependencyError(f"{where}: {error}", name=error.name) from error
    except UnknownError as error:
        raise FormatVersionError(
            f"{where}: the state holds something that this version of Penstock does not know: "
            f"{error}; {remedy}",
            path=path,
            found=_native.FORMAT_VERSION,
            supported=_native.FORMAT_VERSION,
        ) from error
    except TreeError as error:
        raise CorruptCheckpointError(
            f"{where}: the state's tree makes no sense: {error}; its digest is right, so it was "
            f"written like this: {remedy}",
            path=path,
            file=file,
        ) from error


def branches(node: Node) -> list[tuple[Any, Node]] | None:
    """Returns a container's children with their keys or indices; None for a leaf."""
    if type(node) is list:
        return list(enumerate(node))
    if type(node) is not dict:
        return None
    if "$" not in node:
        return list(node.items())
    tag = node["$"]
    if type(tag) is str and tag in SEQUENCES:
        return list(enumerate(member(node, "v", list)))
    if type(tag) is str and tag in MAPPINGS:
        entries = pairs(node)
        keys = decode_keys(key for key, _ in entries)
        return [(key, item) for key, (_, item) in zip(keys, entries, strict=True)]
    return None


def pairs(node: dict[str, Node]) -> list[list[Node]]:
    """Returns the ``[key, value]`` pairs of a tagged mapping, checked to be pairs."""
    entries: list[list[Node]] = member(node, "v", list)
    if not all(type(entry) is list and len(entry) == 2 for entry in entries):
        raise TreeError(f"{node['$']!r} needs pairs of key and value")
    return entries


def leaves(node: Node) -> Iterator[tuple[str, Node]]:
    """Yields every leaf with its unique name, in order; an empty container is a leaf."""
    yield from _leaves(node, "", 0)


def _leaves(node: Node, prefix: str, level: int) -> Iterator[tuple[str, Node]]:
    children = branches(node)
    if not children:
        yield (prefix[:-1] or EMPTY) if level else ROOT, node
        return
    if level >= LEVELS_MAX:
        raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
    for name, child in zip(_names(node, children), (child for _, child in children), strict=True):
        if child is None or type(child) in (bool, int, float, str):
            yield f"{prefix}{name}" or EMPTY, child
        else:
            yield from _leaves(child, f"{prefix}{name}.", level + 1)


def _names(node: Node, children: list[tuple[Any, Node]]) -> Iterable[str]:
    """Returns the part of the name that each child of a container contributes."""
    if type(node) is list or node.get("$") in SEQUENCES:
        return map(str, range(len(children)))
    return labels([key for key, _ in children], lambda index: bool(branches(children[index][1])))


def named(node: Node, name_chars_max: int) -> list[tuple[str, Node]]:
    """Returns the leaves with their names, if the names do not exceed a length.

    Every leaf's name repeats the keys around it, so a short tree may have endlessly long names.

    Raises:
        TreeError: The names are longer, or the tree is malformed.
    """
    found = []
    chars = 0
    for name, leaf in leaves(node):
        chars += len(name)
        if chars > name_chars_max:
            raise TreeError(f"the names of its leaves take more than {name_chars_max} characters")
        found.append((name, leaf))
    return found


def unique_names(names: Sequence[str]) -> Sequence[str]:
    """Makes names valid for the format: not empty, unique, no lone surrogates."""
    taken = {"", "__metadata__"}
    if len(taken.union(names)) == len(names) + len(taken) and "".join(names).isascii():
        # The usual case, which needs no check of single names.
        return names
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        if not name.isascii():
            name = name.encode("utf-8", "backslashreplace").decode("utf-8")
        candidate = name
        while candidate in taken:
            counts[name] = counts.get(name, 1) + 1
            candidate = f"{name}~{counts[name]}"
        taken.add(candidate)
        unique.append(candidate)
    return unique


def _unique(entries: list[tuple[str, Node]]) -> dict[str, Node]:
    members = dict(entries)
    if len(members) != len(entries):
        raise TreeError("an object repeats a key")
    return members


def _no_constant(text: str) -> Node:
    raise TreeError(f"{text} is no JSON number")


FACTORIES: dict[str, type | None] = {"none": None} | {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}
"""Allowed factories of a `defaultdict`; any other is code, which is never stored."""


def part_name(files: Iterable[tuple[str, int]]) -> str | None:
    """Returns the file that holds the state's tree."""
    return next((name for name, _ in files if _native.is_part_file(name)), None)
