"""Flattens a state into the input of the native module.

The result has two parts: the tensors, as addresses that the native module reads without copies, and
the tree, which holds everything else as typed JSON.

Only exact types are accepted. A subclass usually carries something that its base would lose (an
enum member is no int, a named tuple has fields), so it is refused with a remedy instead of being
changed silently. The exceptions are restored as themselves or are documented: `OrderedDict` (with
the ``_metadata`` that `torch.nn.Module.state_dict` adds), `Counter`, `defaultdict` of a built-in
factory, `torch.Size`, NumPy scalars; `torch.nn.Parameter` and `numpy.memmap` are restored as plain
tensor and plain array.

A container that occurs twice is restored as two; tensors keep their ties.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.layout.tiling import Pieces, check_pieces, dtype_of, memory_of_piece
from penstock.checkpoint.state import ties
from penstock.checkpoint.state.assembly import check_parts
from penstock.checkpoint.state.composites import Parts, take_apart
from penstock.checkpoint.state.flattened import Flattened, Overlap
from penstock.checkpoint.state.linked import Linker, place_of
from penstock.checkpoint.state.refusals import refusal
from penstock.checkpoint.state.registered import Registered, of_class
from penstock.checkpoint.state.tree.scalars import (
    COLLIDING_MAX,
    ENCODERS,
    TreeError,
    are_json_keys,
    check_hashes,
    encode_base64,
    encode_int,
    encode_key,
    encode_numpy,
    label,
    with_twin,
)
from penstock.checkpoint.state.tree.tree import (
    CLASS,
    CLASS_VALUE,
    CONTEXT,
    FACTORIES,
    LEVELS_MAX,
    ROOT,
    Node,
    unique_names,
)
from penstock.checkpoint.state.typed import TYPED
from penstock.errors import UnsupportedStateError
from penstock.tensors import dtypes
from penstock.tensors.devices import CurrentStreams
from penstock.tensors.file_tensor import FileTensor
from penstock.tensors.gc_paused import gc_paused
from penstock.tensors.marks import Boxes, PerRank
from penstock.tensors.memory import Memory, foreign_array, of_array, of_bytes, of_tensor, to_source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from penstock._native import _Alias
    from penstock.tensors.native_rows import TensorSource

INLINE_BYTES_MAX = 4096
"""Longer byte strings are stored as tensors, outside the tree."""


def flatten(state: Any, *, finds_overlaps: bool = False, is_alone: bool = False) -> Flattened:
    """Flattens a state.

    The result borrows the memory of the state's tensors and keeps them alive.

    Args:
        state: Any nesting of plain values, containers, tensors and arrays.
        finds_overlaps: Whether to find leaves that share memory.
        is_alone: Whether tensors in pieces have all their pieces in this state.

    Example:
        >>> import numpy as np
        >>> flat = flatten({"w": np.zeros((2, 3)), "step": 7})
        >>> flat.tree
        '{"w":{"$":"ndarray","i":0},"step":7}'
        >>> [(name, dtype, shape) for name, dtype, shape, *_ in flat.tensors]
        [('w', 'float64', (2, 3))]
    """
    with gc_paused():
        return Flattener().flatten(state, finds_overlaps=finds_overlaps, is_alone=is_alone)


class Flattener:
    """The walk over one state; a subclass replaces the `encode_…` of leaves that it treats apart.

    Attributes:
        handlers: The method that encodes values of a class, by the class.
        leaves: Name, node and index of the memory of each leaf whose bytes go to a shard.
        memories: Each memory once.
        linker: Leaves whose bytes lie in files already.
        untied: Names of tensors that share memory with another one, and come back independent.
    """

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self._values: list[Any] = []
        self.leaves: list[tuple[str, Node, int]] = []
        self._index_of: dict[int, int] = {}
        # Leaves whose bytes are already in files, and their final names.
        self._in_files: list[tuple[str, Node, FileTensor]] = []
        self._file_names: Sequence[str] = ()
        # Arrays in pieces, each once, with the nodes of all leaves that refer to it.
        self._boxed: dict[int, tuple[str, Boxes, list[dict[str, Any]]]] = {}
        self.in_pieces: list[Pieces] = []
        self._is_alone = False
        self.linker = Linker()
        self.untied: list[tuple[str, str]] = []
        self._open: set[int] = set()
        # Index of each stored memory among the tensors, at the end.
        self._source_of: dict[int, int] = {}
        # Functions rather than bound methods, which would keep this walk, and the state's tensors,
        # alive until a garbage collection.
        kind = type(self)
        self.handlers: dict[type, Callable[[Any, Any, str, int], Node]] = {
            dict: kind._dict,
            list: kind._list,
            tuple: kind._tuple,
            set: kind._set,
            frozenset: kind._set,
            OrderedDict: kind._ordered_dict,
            Counter: kind._counter,
            defaultdict: kind._default_dict,
            deque: kind._deque,
            bytes: kind._bytes,
            bytearray: kind._bytes,
            np.ndarray: kind._array,
            np.memmap: kind._array,
            PerRank: kind.encode_per_rank,
            FileTensor: kind.encode_file_tensor,
            Boxes: kind.encode_boxes,
        }
        # A state can contain tensors only if PyTorch is imported.
        torch = sys.modules.get("torch")
        self._strided: Any = None
        if torch is not None:
            self._strided = torch.strided
            self.handlers[torch.Tensor] = self.handlers[torch.nn.Parameter] = kind._any_tensor
            self.handlers[torch.Size] = kind._size
            self.handlers[torch.dtype] = kind._torch_dtype
            self.handlers[torch.device] = kind._device

    def flatten(self, state: Any, *, finds_overlaps: bool, is_alone: bool = False) -> Flattened:
        """Walks a state; may be called once."""
        self._is_alone = is_alone
        root = self.encode(state, ROOT, 0)
        tensors, aliases = self.finish()
        self.link_files(len(tensors), aliases)
        # The walk has found any cycles; the encoder need not search again.
        tree = json.dumps(root, ensure_ascii=False, check_circular=False, separators=(",", ":"))
        overlaps = self.overlaps([]) if finds_overlaps else ()
        return Flattened(
            tensors, aliases, tree, self.linker.linked, overlaps, self.untied, self.in_pieces
        )

    def encode(self, value: Any, name: str, level: int) -> Node:
        """Returns the node of any value; ``level`` counts the containers around it."""
        encoder = ENCODERS.get(type(value))
        return self._branch(value, name, level) if encoder is None else encoder(value)

    def _branch(self, value: Any, name: str, level: int) -> Node:
        """Returns the node of a value that has no encoder."""
        handler = self.handlers.get(type(value))
        if handler is not None:
            return handler(self, value, name, level)
        typed = TYPED.get(type(value))
        if typed is not None:
            return typed(value, name)
        entry = of_class(type(value))
        if entry is not None and entry.flatten is not None:
            return self._object(entry, value, name, level)
        if dtypes.is_tensor(value):
            return self.encode_composite(value, name, level)
        return self.encode_unusual(value, name)

    # Containers. Children of plain types are encoded in the loop, which saves a call for most
    # leaves.

    def _enter(self, container: Any, name: str, level: int) -> str:
        """Enters a container; returns the prefix of its children's names."""
        if id(container) in self._open:
            raise UnsupportedStateError(
                f"{name}: this {type(container).__name__} contains itself: a state has to be a "
                "tree",
                key=name,
            )
        if level >= LEVELS_MAX:
            raise UnsupportedStateError(
                f"{name}: nested deeper than {LEVELS_MAX} levels: flatten the state", key=name
            )
        self._open.add(id(container))
        return f"{name}." if level else ""

    def _dict(self, value: dict[Any, Any], name: str, level: int) -> Node:
        if not are_json_keys(value):
            return {"$": "dict", "v": self._pairs(value, name, level)}
        prefix = self._enter(value, name, level)
        node = {}
        for key, item in value.items():
            encoder = ENCODERS.get(type(item))
            if encoder is not None:
                node[key] = encoder(item)
            else:
                node[key] = self._branch(item, prefix + key, level + 1)
        self._open.discard(id(value))
        return node

    def _pairs(self, value: dict[Any, Any], name: str, level: int) -> Node:
        prefix = self._enter(value, name, level)
        _check_hashes(value, name)
        pairs = []
        for key, item in value.items():
            item_name = prefix + label(key)
            try:
                key_node = encode_key(key, LEVELS_MAX)
            except TypeError:
                raise UnsupportedStateError(
                    f"{item_name}: a key of type {type(key).__name__} cannot be stored: use str, "
                    "int, float, bool, None or tuples of these",
                    key=item_name,
                ) from None
            pairs.append([key_node, self.encode(item, item_name, level + 1)])
        self._open.discard(id(value))
        return pairs

    def _ordered_dict(self, value: OrderedDict[Any, Any], name: str, level: int) -> Node:
        node = {"$": "odict", "v": self._pairs(value, name, level)}
        attributes = vars(value)
        if not attributes:
            return node
        self._refuse_attributes(attributes, name, {"_metadata"})
        metadata = self.encode(attributes["_metadata"], f"{name}._metadata", level + 1)
        return {**node, "attrs": {"_metadata": metadata}}

    def _counter(self, value: Counter[Any], name: str, level: int) -> Node:
        self._refuse_attributes(vars(value), name, set())
        return {"$": "counter", "v": self._pairs(value, name, level)}

    def _refuse_attributes(self, attributes: dict[str, Any], name: str, known: set[str]) -> None:
        for attribute in sorted(attributes.keys() - known):
            raise UnsupportedStateError(
                f"{name}: the attribute {attribute!r} of this dictionary cannot be stored: save "
                "it as a value of its own and delete it here",
                key=name,
            )

    def _default_dict(self, value: defaultdict[Any, Any], name: str, level: int) -> Node:
        for word, factory in FACTORIES.items():
            if value.default_factory is factory:
                return {
                    "$": "defaultdict",
                    "factory": word,
                    "v": self._pairs(value, name, level),
                }
        raise UnsupportedStateError(
            f"{name}: a defaultdict's factory {value.default_factory!r} is code, which is never "
            "stored: save dict(value) instead",
            key=name,
        )

    def _list(self, value: list[Any], name: str, level: int) -> Node:
        return self._items(value, value, name, level)

    def _tuple(self, value: tuple[Any, ...], name: str, level: int) -> Node:
        return {"$": "tuple", "v": self._items(value, value, name, level)}

    def _deque(self, value: deque[Any], name: str, level: int) -> Node:
        return {"$": "deque", "max": value.maxlen, "v": self._items(value, value, name, level)}

    def _items(self, items: Iterable[Any], owner: Any, name: str, level: int) -> list[Node]:
        prefix = self._enter(owner, name, level)
        nodes = []
        for index, item in enumerate(items):
            encoder = ENCODERS.get(type(item))
            if encoder is not None:
                nodes.append(encoder(item))
            else:
                nodes.append(self._branch(item, f"{prefix}{index}", level + 1))
        self._open.discard(id(owner))
        return nodes

    def _set(self, value: set[Any] | frozenset[Any], name: str, level: int) -> Node:
        _check_hashes(value, name)
        leaves = len(self.leaves) + len(self._in_files)
        # The order of a set differs between processes, and trees of several are compared.
        items = sorted(self._items(value, value, name, level), key=json.dumps)
        node = {"$": type(value).__name__, "v": items}
        if len(self.leaves) + len(self._in_files) != leaves:
            raise UnsupportedStateError(
                f"{name}: a set of tensors, arrays or long byte strings cannot be stored: save a "
                "list",
                key=name,
            )
        return node

    def encode_per_rank(self, value: PerRank, name: str, level: int) -> Node:
        """The node of a marked value."""
        return self.encode(value.value, name, level)

    def _object(self, entry: Registered, value: Any, name: str, level: int) -> Node:
        """Encodes a value of a registered class; its leaves are named like a dictionary's."""
        prefix = self._enter(value, name, level)
        state = entry.state_of(value, name)
        if type(state) is dict and are_json_keys(state) and CLASS not in state:
            node = self.encode(state, name, level)
        else:
            node = self.encode(state, prefix + CLASS_VALUE, level + 1)
        self._open.discard(id(value))
        return {"$": "object", "type": entry.name, "v": node}

    # Leaves that need a check.

    def _bytes(self, value: bytes | bytearray, name: str, level: int) -> Node:
        tag = type(value).__name__
        if len(value) <= INLINE_BYTES_MAX:
            return {"$": tag, "v": encode_base64(value)}
        return self._data(tag, value, name, of_bytes)

    def _size(self, value: Any, name: str, level: int) -> Node:
        if not all(type(dim) is int for dim in value):
            raise refusal(next(dim for dim in value if type(dim) is not int), name)
        return {"$": "size", "v": [encode_int(dim) for dim in value]}

    def _torch_dtype(self, value: Any, name: str, level: int) -> Node:
        return {"$": "dtype", "v": str(value).removeprefix("torch.")}

    def _device(self, value: Any, name: str, level: int) -> Node:
        return {"$": "device", "v": str(value)}

    def _array(self, value: np.ndarray[Any, Any], name: str, level: int) -> Node:
        node = self._data("ndarray", value, name, of_array)
        char = dtypes.twin(value.dtype)
        if char is not None:
            node["char"] = char
        return node

    def _any_tensor(self, value: Any, name: str, level: int) -> Node:
        if value.layout is self._strided and not value.is_nested:
            return self.encode_tensor(value, name, level)
        return self.encode_composite(value, name, level)

    def encode_composite(self, value: Any, name: str, level: int) -> Node:
        """Encodes a composite tensor."""
        parts = take_apart(value, name)
        if parts is None:
            if type(value) in self.handlers:
                return self.encode_tensor(value, name, level)
            return self.encode_unusual(value, name)
        check_parts(parts, name)
        prefix = self._enter(value, name, level)
        node = self.facts(parts, prefix, level)
        node["v"] = {
            key: self.encode(one, prefix + key, level + 1) for key, one in parts.inner.items()
        }
        self._open.discard(id(value))
        return node

    def facts(self, parts: Parts, prefix: str, level: int) -> dict[str, Node]:
        """Returns the node of a composite tensor without its members."""
        node = {"$": parts.tag, **parts.facts}
        if parts.tag == "subclass":
            node["context"] = self.encode(parts.context, prefix + CONTEXT, level + 1)
        return node

    def encode_tensor(self, value: Any, name: str, level: int) -> Node:
        """The node of a strided tensor."""
        return self._data("tensor", value, name, of_tensor)

    def encode_file_tensor(self, value: FileTensor, name: str, level: int) -> Node:
        """The node of a tensor whose bytes lie in a file."""
        node: dict[str, Any] = {"$": "tensor"}
        self._in_files.append((name, node, value))
        return node

    def encode_boxes(self, value: Boxes, name: str, level: int) -> Node:
        """The node of an array or tensor in pieces."""
        node: dict[str, Any] = {"$": "ndarray" if value.is_array else "tensor"}
        self._boxed.setdefault(id(value), (name, value, []))[2].append(node)
        return node

    def _data(
        self, tag: str, value: Any, name: str, read: Callable[[Any, str], Memory]
    ) -> dict[str, Any]:
        """Encodes a leaf whose bytes go to a shard."""
        index = self._index_of.get(id(value))
        memory = read(value, name) if index is None else self.memories[index]
        node: dict[str, Any] = {"$": tag}
        self.add_leaf(name, node, value, memory)
        return node

    def add_leaf(self, name: str, node: Node, value: Any, memory: Memory) -> None:
        """Records a leaf whose bytes go to a shard; its node is completed at the end."""
        index = self._index_of.get(id(value))
        if index is None:
            index = self._index_of[id(value)] = len(self.memories)
            self.memories.append(memory)
            # Kept alive, so that no other object gets its id during this walk.
            self._values.append(value)
        self.leaves.append((name, node, index))

    def encode_unusual(self, value: Any, name: str) -> Node:
        """The node of a value of a class without a handler: a scalar or an array of NumPy's kind.

        Raises:
            UnsupportedStateError: It cannot be stored.
        """
        node = None
        if isinstance(value, np.dtype):
            text = dtypes.numpy_text(value)
            node = None if text is None else with_twin({"$": "np.dtype", "v": text}, value)
        elif isinstance(value, np.generic):
            node = encode_numpy(value)
        else:
            array = foreign_array(value)
            node = None if array is None else self._array(array, name, 0)
        if node is None:
            raise refusal(value, name)
        return node

    # Completion of the nodes.

    def finish(self) -> tuple[list[TensorSource], list[_Alias]]:
        """Decides which memories are stored, and completes the leaves' nodes with their indices."""
        tied = ties.find(self.memories)
        name_of = {memory: name for name, _, memory in reversed(self.leaves)}
        self.untied += [
            (name_of[index], name_of[other]) for index, other in ties.apart(self.memories, tied)
        ]
        leaves = [name for name, _, _ in self.leaves]
        first_file = len(leaves) + len(self._boxed)
        boxed = [name for name, _, _ in self._boxed.values()]
        names = unique_names(leaves + boxed + [name for name, _, _ in self._in_files])
        self._file_names = names[first_file:]
        tensors: list[TensorSource] = []
        aliases: list[_Alias] = []
        tensor_of: dict[int, int] = {}
        further = []
        places = CurrentStreams()
        for (_, node, memory), name in zip(self.leaves, names[: len(leaves)], strict=True):
            if memory in tied or memory in tensor_of:
                further.append((node, memory, name))
            else:
                tensor_of[memory] = node["i"] = len(tensors)
                tensors.append(to_source(self.memories[memory], name, places=places))
        for node, memory, name in further:
            stored, window = tied.get(memory, (memory, None))
            if node["$"] in ("bytes", "bytearray"):
                node["i"] = tensor_of[stored]
            else:
                node["a"] = len(aliases)
                aliases.append((name, tensor_of[stored], window))
        self._source_of = tensor_of
        tensors += self._pieces(names[len(leaves) : first_file], names)
        return tensors, aliases

    def _pieces(self, wholes: Sequence[str], taken: Sequence[str]) -> Iterator[TensorSource]:
        """Yields the pieces of arrays in pieces; completes the arrays' nodes."""
        boxed = list(zip(wholes, self._boxed.values(), strict=True))
        further = [whole for whole, (_, value, _) in boxed for _ in value.pieces[1:]]
        names = iter(unique_names([*taken, *further])[len(taken) :])
        places = CurrentStreams()
        for whole, (_, value, nodes) in boxed:
            dtype = dtype_of(value, whole)
            for node in nodes:
                node |= {"g": whole, "dtype": dtype, "shape": list(value.shape)}
            blocks = [(tuple(start), tuple(piece.shape)) for start, piece in value.pieces]
            pieces = Pieces(whole, value.shape, blocks)
            check_pieces(pieces, is_whole=self._is_alone)
            self.in_pieces.append(pieces)
            for index, (start, elements) in enumerate(value.pieces):
                name = next(names) if index else whole
                memory = memory_of_piece(elements, name, dtype, is_array=value.is_array)
                yield to_source(memory, name, (whole, value.shape, start), places)

    def link_files(self, first: int, aliases: list[_Alias]) -> None:
        """Completes the nodes of leaves in files, after `finish`.

        Args:
            first: Number of tensors counted before them.
            aliases: The list to which their further names are added.
        """
        index_of: dict[object, int] = {}
        further = []
        for (_, node, value), name in zip(self._in_files, self._file_names, strict=True):
            index = index_of.setdefault(place_of(value), first + len(index_of))
            if index == first + len(self.linker.linked.tensors):
                self.linker.add(value, name)
                node["i"] = index
            else:
                further.append((node, index, name))
        for node, index, name in further:
            node["a"] = len(aliases)
            aliases.append((name, index, None))

    def overlaps(self, others: Sequence[tuple[Memory, Any, list[int]]]) -> list[Overlap]:
        """Returns the leaves that share memory, once all nodes are complete.

        Args:
            others: Leaves that this walk does not store: memory, value, and the indices of their
                sources.
        """
        rows = [
            (memory, value, [self._source_of[index]] if index in self._source_of else [])
            for index, (memory, value) in enumerate(zip(self.memories, self._values, strict=True))
        ]
        rows += others
        found = []
        for run in ties.overlaps([memory for memory, _, _ in rows]):
            sources = [source for index in run for source in rows[index][2]]
            if sources:
                found.append(Overlap(sources, [rows[index][1] for index in run]))
        return found


def facts_of(parts: Parts, name: str) -> dict[str, Node]:
    """Returns all properties of a composite tensor except its members."""
    walk = Flattener()
    node = walk.facts(parts, f"{name}.", 0)
    if walk.leaves:
        raise UnsupportedStateError(
            f"{name}: its context holds tensors, which cannot be compared", key=name
        )
    return node


def has_place(kind: type) -> bool:
    """Whether values of a class are stored without registration."""
    return kind in ENCODERS or kind in TYPED or kind in Flattener().handlers


def _check_hashes(value: Collection[Any], name: str) -> None:
    """Refuses keys that a load, which trusts no key, would refuse."""
    try:
        check_hashes(value)
    except TreeError as error:
        raise UnsupportedStateError(
            f"{name}: {error}, more than {COLLIDING_MAX}, so that looking one up takes as long as "
            "looking at all: save a list of pairs instead",
            key=name,
        ) from None
