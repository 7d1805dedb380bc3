"""The package's names of PyTorch and NumPy exist in the oldest supported versions.

The installed version is checked, in a process where no test has added newer names. So the
environments that `make compat` makes check the old versions.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import penstock
from conftest import run_child

PACKAGE = Path(penstock.__file__).parent
LIBRARIES = ("torch", "numpy")
NEWER = {
    # Looked up only if the version has it; listed so that no other name becomes an exception.
    "torch.distributed.tensor.DTensor": ("penstock.tensors.torch_names",),
    "torch.distributed.tensor.placement_types": ("penstock.tensors.torch_names",),
    "torch.distributed.checkpoint.staging.DefaultStager": (
        "penstock.integrations.dcp.staging",
        "penstock.integrations.dcp.patches",
    ),
    "torch.distributed.checkpoint.staging.StagingOptions": ("penstock.integrations.dcp.staging",),
}

LOOK = """
    import importlib, json, sys

    def is_there(name):
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            try:
                for part in parts[cut:]:
                    found = getattr(found, part)
                return True
            except AttributeError:
                pass
        return False

    print(json.dumps([name for name in json.loads(sys.argv[1]) if not is_there(name)]))
"""


def _walk(node):
    """Yields all nodes below one, except code for type checkers and annotations."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from (below for one in child.orelse for below in (one, *_walk(one)))
                continue
            yield child
            yield from _walk(child)


def _names(path):
    """Returns the full names of these libraries that a module uses."""
    nodes = list(_walk(ast.parse(path.read_text())))
    known, found = {}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                known[one.asname or one.name.split(".")[0]] = (
                    one.name if one.asname else one.name.split(".")[0]
                )
                found.add(one.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                found.add(f"{node.module}.{one.name}")
    for node in nodes:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            found.add(".".join([known[node.id], *reversed(parts)]))
    return {name for name in found if name.split(".")[0] in LIBRARIES}


def test_every_name_that_is_used_is_there():
    pytest.importorskip("torch")
    used: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("penstock", *path.relative_to(PACKAGE).with_suffix("").parts))
        for name in _names(path):
            if module not in NEWER.get(name, ()):
                used.setdefault(name, []).append(module)
    assert len(used) > 100
    missing = run_child(LOOK, json.dumps(sorted(used)), is_fresh=True)
    assert {name: used[name] for name in missing} == {}
