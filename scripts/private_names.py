"""Lists where a module uses a private name of another package of Penstock.

    python scripts/private_names.py python/penstock python/penstock_bench

A package is a folder, and a private name begins with one underscore. Looked at are imports, members
of whatever is imported, members of any object but `self` and `cls`, and what a class uses or
replaces of a base class of another package. Types are not known: a member counts if its package
never gives anything such a name and another package does. `penstock._native` is the native module's
name, and everybody's.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OF_OTHERS = {
    "_buffers": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_indices": "torch.Tensor",
    "_version": "torch.Tensor",
    "_optimizers": "accelerate.Accelerator",
    "_save_checkpoint": "transformers.Trainer",
    "_cells": "rich.table.Column",
    "_asdict": "NamedTuple",
    "_fields": "NamedTuple",
    "_replace": "NamedTuple",
}
"""Members of libraries' classes that classes of Penstock have by the same name."""

HOOKS = {
    "LiveState": {"_requested_names", "_targets", "_restore", "_optimizers"},
}
"""Members that a class documents for others, by the class. Those of `LiveState` begin with an
underscore because a `Training` has the names of its parts as attributes, which users choose."""


@dataclass
class Module:
    """A source file.

    Attributes:
        path: The file.
        name: Its dotted name.
        package: That of its folder.
        tree: Its syntax.
        imported: The dotted name behind each name that it imports from Penstock.
        private: Private names that it defines, or gives to `self`, by class; "" for none.
    """

    path: Path
    name: str
    package: str
    tree: ast.Module
    imported: dict[str, str] = field(default_factory=dict)
    private: dict[str, set[str]] = field(default_factory=dict)

    @property
    def topmost(self) -> str:
        """The folder below that of the distribution; the distribution for benchmarks."""
        return ".".join(self.package.split(".")[: 2 if self.package.startswith("penstock.") else 1])


def is_private(name: str) -> bool:
    """Whether a name is private to the package that defines it."""
    return name.startswith("_") and not name.startswith("__") and name not in ("_", "_native")


def read(roots: Iterable[Path]) -> dict[str, Module]:
    """The modules below packages, by their names."""
    modules = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            package = ".".join(parts[:-1])
            name = package if is_package else ".".join(parts)
            module = Module(path, name, package, ast.parse(path.read_text()))
            module.imported = dict(imports(module.tree, {root.name for root in roots}))
            define(module.tree, "", module.private)
            modules[name] = module
    return modules


def imports(tree: ast.Module, roots: set[str]) -> Iterator[tuple[str, str]]:
    """The names that a module imports from some packages, each with its dotted name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in roots:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def define(node: ast.AST, owner: str, found: dict[str, set[str]]) -> None:
    """Gathers private names below a node, by the class that they are defined in."""
    for child in ast.iter_child_nodes(node):
        name = ""
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            name = child.id
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            name = child.attr if is_own(child.value) else ""
        if is_private(name):
            found.setdefault(owner, set()).add(name)
        define(child, child.name if isinstance(child, ast.ClassDef) else owner, found)


def is_own(value: ast.expr) -> bool:
    """Whether an expression is the object, or the class, that a method is called on."""
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def uses(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """The line and the text of each private name of another package in a module."""
    packages_of: dict[str, set[str]] = {}
    for other in modules.values():
        for name in set().union(*other.private.values()):
            packages_of.setdefault(name, set()).add(other.package)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            yield from imported_names(node, module, modules)
        elif isinstance(node, ast.Attribute) and is_foreign(node, module, modules, packages_of):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            yield from inherited(node, module, modules)


def is_foreign(
    node: ast.Attribute,
    module: Module,
    modules: dict[str, Module],
    packages_of: dict[str, set[str]],
) -> bool:
    """Whether a member is private to another package."""
    packages = packages_of.get(node.attr)
    is_known = node.attr in OF_OTHERS or any(node.attr in names for names in HOOKS.values())
    if packages is None or is_known or is_own(node.value):
        return False
    source = module.imported.get(getattr(node.value, "id", ""))
    if source is not None:
        return home_of(source, modules) not in ("", module.package)
    return module.package not in packages


def home_of(name: str, modules: dict[str, Module]) -> str:
    """The package of a dotted name; empty where it is of none."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return modules[name].package if name else ""


def imported_names(
    node: ast.ImportFrom, module: Module, modules: dict[str, Module]
) -> Iterator[tuple[int, str]]:
    """The private names of another package in an import."""
    source = node.module or ""
    for one in node.names:
        parts = [*source.split("."), one.name]
        is_of_other = home_of(source, modules) not in ("", module.package)
        if is_of_other and any(map(is_private, parts)) and "_native" not in parts:
            yield node.lineno, f"{source}.{one.name}"


def inherited(
    node: ast.ClassDef, module: Module, modules: dict[str, Module]
) -> Iterator[tuple[int, str]]:
    """The private names of a base class of another package that a class uses or replaces.

    Packages below one of the topmost may share such names with the classes derived there.
    """
    for base in node.bases:
        home_name, _, kind = module.imported.get(ast.unparse(base), "").rpartition(".")
        home = modules.get(home_name)
        if home is None or home.topmost == module.topmost:
            continue
        private = home.private.get(kind, set()) - HOOKS.get(kind, set())
        for inner in ast.walk(node):
            used = getattr(inner, "attr", getattr(inner, "name", None))
            if used in private:
                yield getattr(inner, "lineno", node.lineno), f"{kind}.{used}"


def main() -> int:
    """Prints each use, and returns the exit status."""
    modules = read([Path(argument) for argument in sys.argv[1:]])
    found = [
        f"{module.path}:{line}: {text} is private to another package"
        for module in modules.values()
        for line, text in sorted(set(uses(module, modules)))
    ]
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
