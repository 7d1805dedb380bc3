"""The assertions of the tree's fuzzer; `test_tree_seeds.py` runs the same ones on the seeds.

The tree is decoded in Python, so its fuzzer is separate from the targets in Rust.
"""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import PenstockError
from penstock._native import TensorEntry
from penstock.checkpoint.loading.load_plan import LoadPlan
from penstock.checkpoint.state import build
from penstock.checkpoint.state.tree import references, select, tree
from penstock.checkpoint.view.view import View, view
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from penstock._native import _Alias

BYTES_PER_INPUT_BYTE = 256
"""Heap bytes that a byte of input may cost. The most expensive known, 135, is an empty array in
an array: three bytes of text, and a node, its place among the children, its name, its value."""

BYTES_FIXED = 256 << 10
"""Heap bytes that any input may cost: messages, and caches that a library fills once."""

_LONG_BYTES = 64 << 10
"""Size of the tensor that a tree may turn into `bytes` and `bytearray`, which are copies."""
_COPIES = 4
"""A `bytes` and a `bytearray` in the state that is filled, and in the state that fills it."""

# Imported here, so that no input is charged for their memory and time.
dtypes.torch_dtypes()
with suppress(PenstockError):
    dtypes.parse_numpy("bfloat16")

_NAME_CHARS_PER_CHAR = 16
"""Less than `penstock.inspect` allows, to leave the rest of the limit to other allocations."""

_PATH = "ckpt"
_FILE = "part"
_PATTERNS = ("value", "*[a0]*")


def check(data: bytes) -> None:
    """Decodes a tree in every way: each gives a value or a Penstock error, in bounded memory.

    The first line is the name of an element type, any text as in a part; the tree follows.
    """
    name, _, text = data.decode("utf-8", "ignore").partition("\n")
    rows = _rows(name)
    # Never stopped: CPython 3.11 leaks some kilobytes each time that tracing stops.
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for step in (_name, _build, _select, _fill, _look):
        with suppress(PenstockError), tree.reading(_PATH, _FILE):
            step(text, rows)
    _, peak = tracemalloc.get_traced_memory()
    limit = BYTES_PER_INPUT_BYTE * len(data) + BYTES_FIXED + _COPIES * _LONG_BYTES
    assert peak - before <= limit, f"{peak - before} bytes for {len(data)}, {limit} allowed"


def _rows(dtype: str) -> list[TensorEntry]:
    """Tensors as a valid part may list them: shapes and sizes agree, names are arbitrary."""
    entries: list[tuple[str, tuple[int, ...], int]] = [
        ("float32", (2, 3), 24),
        ("uint8", (_LONG_BYTES,), _LONG_BYTES),
        ("complex128", (2,), 32),
        (dtype, (1,), 16),
        (dtype, (2,), 16),
        ("float32", (0, 1 << 60), 0),
        ("uint8", (1,) * 70, 1),
        ("bool", (), 1),
    ]
    rows = []
    begin = 0
    for index, (name, shape, nbytes) in enumerate(entries):
        rows.append(TensorEntry(f"t{index}", name, shape, "shard", begin, begin + nbytes))
        begin = -(-(begin + nbytes) // 16) * 16
    return rows


def _places(rows: list[TensorEntry], memory: bytearray) -> dict[int, references.BytesLocation]:
    return {index: (memory, row.begin) for index, row in enumerate(rows)}


# Memory that was read, and memory to fill: distinct, and not charged to any input.
_READ = bytearray(range(256)) * (_LONG_BYTES // 128)
_FILLED = bytearray(len(_READ))

_ALIASES: list[_Alias] = [
    ("tied", 0, None),
    ("backward", 0, ((2,), (-2,), 4)),
    ("turned", 0, ((3, 2), (1, 3), 0)),
    ("endless", 0, ((1 << 62,), (0,), 1)),
    ("empty", 0, ((0, 1 << 62), (1, -(1 << 63)), 6)),
    ("far", 0, ((1,), ((1 << 63) - 1,), 0)),
]


def _name(text: str, rows: list[TensorEntry]) -> None:
    """As `penstock.inspect` does."""
    names = [name for name, _ in tree.named(tree.parse(text), _NAME_CHARS_PER_CHAR * len(text))]
    unique = tree.unique_names(names)
    assert len(set(unique)) == len(unique) == len(names)


def _build(text: str, rows: list[TensorEntry]) -> Any:
    """As `penstock.load` does."""
    return _built(tree.parse(text), rows)


def _built(node: tree.Node, rows: list[TensorEntry], memory: bytearray = _READ) -> Any:
    known = _places(rows, memory)
    places = {index: known[index] for index in references.needed(node, rows, _ALIASES)}
    return build.Builder(rows, _ALIASES, places).build(node)


def _select(text: str, rows: list[TensorEntry]) -> None:
    """As `penstock.load(keys=…)` does."""
    node = tree.parse(text)
    for pattern in _PATTERNS:
        with suppress(PenstockError):
            _built(select.select(node, [pattern], _PATH), rows)


def _fill(text: str, rows: list[TensorEntry]) -> None:
    """As `penstock.load(into=…)` does, with a matching state."""
    node = tree.parse(text)
    state = _built(node, rows, _FILLED)
    seen = View(node, rows, _ALIASES, {}, {}, is_shared=False, tree_chars=len(text), lost=())
    targets = LoadPlan(node, state, seen, _PATH, is_partial=False)
    targets.finish(_places(rows, _READ))


class _Box(NamedTuple):
    """A box of a global tensor, as the native module lists it."""

    index: int  # type: ignore[assignment]  # A tuple has a method of that name.
    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


class _TwoRanks:
    """Input of `penstock.checkpoint.view.view`: two ranks, a tree each, boxes of two tensors."""

    world_size = 2
    partial = None

    def __init__(self, trees: tuple[str, str], rows: list[TensorEntry]) -> None:
        self._trees = trees
        self._rows = rows
        self.tree = trees[0]

    def rank_tree(self, rank: int) -> str:
        return self._trees[rank]

    def tensors(self) -> list[TensorEntry]:
        return [*self._rows, *self._rows]

    def aliases(self) -> list[_Alias]:
        return [*_ALIASES, *_ALIASES]

    def offsets(self) -> list[tuple[int, int]]:
        return [(0, 0), (len(self._rows), len(_ALIASES))]

    def boxes(self) -> list[_Box]:
        other = len(self._rows)
        return [
            _Box(0, "t0", (4, 3), (0, 0)),
            _Box(other, "t0", (4, 3), (2, 0)),
            _Box(7, "t7", (), ()),
        ]


_BARE = ('{"a":{}}', '{"$":"dict","v":[]}')
"""Trees into which tensors of other ranks can be merged."""


def _look(text: str, rows: list[TensorEntry]) -> None:
    """As `penstock.load` does with a checkpoint of several ranks."""
    checkpoint: Any = _TwoRanks((text, text), rows)
    seen = view(checkpoint, 1)
    needed = references.needed(seen.node, seen.tensors, seen.aliases)
    places = dict.fromkeys(needed, (_READ, 0))
    state = build.Builder(seen.tensors, seen.aliases, places).build(seen.node)
    view(checkpoint, 0, state)
    for bare in _BARE:
        other: Any = _TwoRanks((bare, text), rows)
        view(other, 0)
        view(other, 0, state)
