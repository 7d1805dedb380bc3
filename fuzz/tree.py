"""Fuzzes the decoding of the tree: `python fuzz/tree.py [LIBFUZZER-ARGUMENT …] [CORPUS …]`.

Guided by coverage, as the targets in Rust are. Half of the mutations are of the text; the others
put one node of the tree, or one that the format knows, in the place of another.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    sys.stderr.write("SKIPPED fuzz/tree.py: no atheris here, it has wheels for x86_64 only\n")
    sys.exit(0)

with atheris.instrument_imports(include=["penstock"]):
    import tree_checks

_INPUT_BYTES_MAX = 4096


def _dictionary() -> list[Any]:
    """The tree nodes in the dictionary that all fuzzers share."""
    words = Path(__file__).with_name("format.dict").read_text().splitlines()
    return [json.loads(json.loads(word)) for word in words if word.startswith('"{')]


_NODES: list[Any] = [*_dictionary(), None, True, 0, -1, 1 << 62, 0.5, "", "$", [], {}, "\ud800"]


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree, as the container and the key or index in it."""
    found = []
    rest = [node]
    while rest:
        node = rest.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            found.append((node, key))
            if isinstance(child, dict | list):
                rest.append(child)
    return found


def _mutate(data: bytes, size_max: int, seed: int) -> bytes:
    draw = random.Random(seed)
    name, _, text = data.partition(b"\n")
    if draw.randrange(2):
        with suppress(ValueError, RecursionError):
            mutated = name + b"\n" + _with_other_nodes(text, draw)
            if len(mutated) <= size_max:
                return mutated
    return bytes(atheris.Mutate(data, size_max))


def _with_other_nodes(text: bytes, draw: random.Random) -> bytes:
    # In a list, so that the tree itself can be replaced.
    root = [json.loads(text)]
    for _ in range(draw.randrange(1, 4)):
        places = _places(root)
        container, key = draw.choice(places)
        other, other_key = draw.choice(places)
        node = draw.choice([draw.choice(_NODES), other[other_key]])
        # Copied through text: no node may become its own child.
        node = json.loads(json.dumps(node))
        if isinstance(container, list) and draw.randrange(2):
            container.insert(key, node)
        else:
            container[key] = draw.choice([node, [node], {"a": node}, {"$": "tuple", "v": [node]}])
    return json.dumps(root[0], separators=(",", ":")).encode()


if __name__ == "__main__":
    # Short inputs first: libFuzzer drops this default if it is given a mutator.
    defaults = [f"-max_len={_INPUT_BYTES_MAX}", "-len_control=100"]
    arguments = [sys.argv[0], *defaults, *sys.argv[1:]]
    atheris.Setup(arguments, tree_checks.check, custom_mutator=_mutate)
    atheris.Fuzz()
