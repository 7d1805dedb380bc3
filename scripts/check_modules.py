"""Finds circular imports between the modules, or the folders, of a Rust crate.

    python scripts/check_modules.py SRC...

A module is a file. It imports the names in its `use` declarations and the paths in its code; `mod`
declarations do not count, nor does a `pub use` whose name it does not use itself. Unit tests and
comments are skipped. A method that another file adds to a type is not seen, as no name leads to
that file.
"""

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|(?<!\')"(?:\\.|[^"\\])*"', re.DOTALL)
UNIT_TESTS = re.compile(r"^#\[cfg\((?:all\()?test\b.*?\]\nmod \w+ \{.*", re.MULTILINE | re.DOTALL)
DECLARATION = re.compile(r"(?:#!?\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;")
USE = re.compile(r"(?P<public>pub(?:\([^)]*\))?\s+)?use\s+(?P<tree>[^;]+);")
PATH = re.compile(r"\b(?:crate|super)(?:::\w+)+")

Module = tuple[str, ...]


class Source(NamedTuple):
    """A file's submodules, imports and re-exports."""

    children: set[str]
    imported: list[list[str]]
    handed_on: list[list[str]]


def paths(tree: str) -> list[list[str]]:
    """Returns the paths of a `use`, one for each name in its braces."""
    tree = tree.strip()
    if "{" not in tree:
        return [re.split(r"\s+as\s+", tree)[0].split("::")] if tree else []
    head, _, rest = tree.partition("{")
    inner, depth, found = "", 1, []
    for character in rest:
        depth += (character == "{") - (character == "}")
        if depth == 0 or (character == "," and depth == 1):
            found += [[*filter(None, head.split("::")), *path] for path in paths(inner)]
            inner = ""
        else:
            inner += character
        if depth == 0:
            break
    return found


def read(file: Path) -> Source:
    """Parses a file's submodules, imports and re-exports."""
    text = UNIT_TESTS.sub("", COMMENT_OR_TEXT.sub("", file.read_text()))
    children = set(DECLARATION.findall(text))
    text = DECLARATION.sub("", text)
    uses = list(USE.finditer(text))
    code = USE.sub("", text)
    words = set(re.findall(r"\w+", code))
    imported = [path for use in uses if not use["public"] for path in paths(use["tree"])]
    handed_on = [path for use in uses if use["public"] for path in paths(use["tree"])]
    imported += [path for path in handed_on if path[-1] in words]
    imported += [path.split("::") for path in PATH.findall(code)]
    if children:
        inline = re.compile(rf"(?<![\w:])(?:{'|'.join(children)})(?:::\w+)+")
        imported += [path.split("::") for path in inline.findall(code)]
    return Source(children, imported, handed_on)


def name_of(file: Path, root: Path) -> Module:
    """Returns the Rust module path of a file."""
    parts = file.relative_to(root).with_suffix("").parts
    return parts[:-1] if parts[-1] in ("lib", "main", "mod") else parts


def resolve(path: list[str], module: Module, sources: dict[Module, Source]) -> Module | None:
    """Resolves a path seen from a module, following re-exports; None outside the crate."""
    at = module
    names = list(path)
    if names[0] == "crate":
        at, names = (), names[1:]
    elif names[0] not in ("super", "self") and names[0] not in sources[module].children:
        return None
    while names:
        name = names.pop(0)
        if name == "super":
            at = at[:-1]
        elif name != "self" and name in sources[at].children and (*at, name) in sources:
            at = (*at, name)
        elif name != "self":
            through = [onward for onward in sources[at].handed_on if onward[-1] == name]
            ahead = resolve(through[0], at, sources) if through else None
            return at if ahead is None else ahead
    return at


def imports(root: Path) -> dict[Module, set[Module]]:
    """Returns the imports of each module of a crate from its other modules."""
    sources = {name_of(file, root): read(file) for file in sorted(root.rglob("*.rs"))}
    graph = {}
    for module, source in sources.items():
        found = (resolve(path, module, sources) for path in source.imported)
        graph[module] = {other for other in found if other is not None and other != module}
    return graph


def folders(graph: dict[Module, set[Module]]) -> dict[Module, set[Module]]:
    """Merges each topmost module with all below it, and returns their imports from each other."""
    merged: dict[Module, set[Module]] = {}
    for module, others in graph.items():
        outside = {other[:1] for other in others if other[:1] != module[:1]}
        merged.setdefault(module[:1], set()).update(outside)
    return merged


def main() -> int:
    """Prints a circle of modules and one of folders, if any, and returns the exit status."""
    status = 0
    for root in map(Path, sys.argv[1:]):
        graph = imports(root)
        for kind, edges in (("modules", graph), ("folders", folders(graph))):
            try:
                TopologicalSorter(edges).prepare()
            except CycleError as error:
                circle = ["::".join(module) or "the root" for module in reversed(error.args[1])]
                print(f"{root}: {kind} in a circle: {' -> '.join(circle)}", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
