"""A reader of Penstock checkpoints that uses nothing but the standard library.

Written from `docs/format.md` alone, whose paragraphs it cites: it proves that the document suffices
to write a reader in any language. It trusts no byte that it reads, checks every digest and every
number, and is slow.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
import pathlib
import re
import struct
import uuid
import zoneinfo
from collections import Counter, OrderedDict, deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

LEVELS_MAX = 128
CHUNK_BYTES = 1 << 20
STAMP_BYTES = 40

# 4.3: bytes of an element, and its name in the shard.
NATURAL = {
    "bool": (1, "BOOL"),
    **{f"uint{bits}": (bits // 8, f"U{bits}") for bits in (8, 16, 32, 64)},
    **{f"int{bits}": (bits // 8, f"I{bits}") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (bits // 8, f"F{bits}") for bits in (16, 32, 64)},
    "bfloat16": (2, "BF16"),
    "complex64": (8, "C64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
}
# 4.4: bytes of an element, its carrier, and how many of the carrier's elements it takes.
CARRIED = {
    "complex128": (16, "F64", 2),
    "complex32": (4, "F16", 2),
    "bcomplex32": (4, "BF16", 2),
    # Earlier writers' carriers; current ones name the type itself.
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), (1, "U8", 1)),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), (1, "U8", 1)),
    **dict.fromkeys((f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)), (1, "U8", 1)),
    "bits16": (2, "U16", 1),
}
# 4.4: the carrier that is the type itself, and its factor for the last dimension.
NAMED = {
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float4_e2m1fn_x2": ("F4", 2),
}
# Codes of `struct` for the types that Python has numbers for.
UNPACK = dict(
    zip(
        (
            *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
            *("float16", "float32", "float64", "complex32", "complex64", "complex128"),
        ),
        "?BHIQbhiqefdefd",
        strict=True,
    )
)


class FormatError(Exception):
    """The checkpoint is damaged, newer, or missing."""


def _table() -> list[int]:
    polynomial = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc64(data: bytes) -> int:
    """2.1: CRC-64/NVME."""
    crc = 0xFFFF_FFFF_FFFF_FFFF
    table = _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFF_FFFF_FFFF_FFFF


def digest(data: bytes) -> str:
    """2.1: a digest as text."""
    return f"crc64nvme:{crc64(data):016x}"


class Tensor(NamedTuple):
    """A tensor or array: its elements row-major, little-endian unless the type says otherwise."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def values(self) -> list[Any]:
        """Returns the elements as Python numbers, for the types that Python has."""
        if self.dtype == "bfloat16":
            bits = struct.unpack(f"<{len(self.data) // 2}H", self.data)
            return [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in bits]
        code = UNPACK[self.dtype]
        numbers = struct.unpack(f"<{len(self.data) // struct.calcsize(code)}{code}", self.data)
        if self.dtype.startswith("complex"):
            return [complex(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return list(numbers)


class Other(NamedTuple):
    """A value of a type that the standard library lacks: torch.Size, a dtype, a device, …"""

    tag: str
    value: Any


class Checkpoint:
    """A complete checkpoint, every digest checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path)
        entry = self.manifest["parts"][0]
        self.part = self._read_part(entry)
        self.shards = [self._read_shard(file) for file in self.part["files"]]
        self.tensors = [self._tensor(row) for row in self.part["tensors"]]
        _check_overlaps(self.part["tensors"])
        self._check_names()
        self.beside = {row["name"]: self._read_beside(row) for row in self._beside()}
        self._check_groups()
        for alias in self.part["aliases"]:
            self._check_alias(alias)

    def state(self) -> Any:
        """6: returns the state."""
        return self._value(self.part["tree"], 0)

    def tensor(self, name: str) -> Tensor:
        """Returns a stored tensor by its name."""
        names = [row["name"] for row in self.part["tensors"]]
        return self._data("tensor", names.index(name), None)

    # Files.

    def _read_part(self, entry: dict[str, Any]) -> dict[str, Any]:
        identity = self.manifest["id"]
        # 1.4: a name of exactly that form, with the checkpoint's own attempt and rank.
        _require(entry["rank"] == 0 and entry["file"] == f"part-00000.{identity}.json", "1.4")
        text = (self.path / entry["file"]).read_bytes()
        _require(len(text) == entry["bytes"] and digest(text) == entry["digest"], "2.3: part")
        _require(text.endswith(b"\n"), "4.1")
        part = _parse(text)
        _require(part["format"] == "penstock-part" and part["version"] == 1, "4.1")
        _require(part["id"] == identity and part["rank"] == 0, "4.1")
        return part

    def _read_shard(self, file: dict[str, Any]) -> bytes:
        pattern = rf"shard-00000-[0-9]{{2,}}\.{self.manifest['id']}\.safetensors"
        _require(re.fullmatch(pattern, file["name"]) is not None, "1.4")
        data = (self.path / file["name"]).read_bytes()
        _require(len(data) == file["bytes"] and digest(data) == file["digest"], "2.2: shard")
        _require(file["chunk_bytes"] == CHUNK_BYTES, "2.2")
        chunks = [
            f"{crc64(data[i : i + CHUNK_BYTES]):016x}" for i in range(0, len(data), CHUNK_BYTES)
        ]
        _require(chunks == file["chunks"], "2.2: chunks")
        return data

    def _beside(self) -> list[dict[str, Any]]:
        rows = self.manifest.get("beside", [])
        _require(len({row["name"] for row in rows}) == len(rows), "3.7: names")
        return rows

    def _read_beside(self, row: dict[str, Any]) -> bytes:
        """3.7: a small file."""
        name = row["name"]
        _require(re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,200}", name) is not None, "3.7: name")
        _require(not name.endswith(".safetensors") and name != "manifest.json", "3.7: name")
        _require(row["file"] == f"beside.{self.manifest['id']}.{name}", "3.7: file")
        data = (self.path / row["file"]).read_bytes()
        _require(len(data) == row["bytes"] and digest(data) == row["digest"], "3.7: digest")
        return data

    def _check_groups(self) -> None:
        """5.6: shards of a group hold its tensors alone, by the names of the index."""
        rows = self.part["tensors"]
        names: dict[str | None, dict[str, str]] = {}
        groups: dict[int, set[str | None]] = {}
        for row in rows:
            group = row.get("group")
            _require("group" not in row or type(group) is str, "5.6: group")
            groups.setdefault(row["file"], set()).add(group)
            name = row.get("stored_name", row["name"])
            file = self.part["files"][row["file"]]["name"]
            _require(names.setdefault(group, {}).setdefault(name, file) is file, "5.6: names")
        _require(all(len(found) == 1 for found in groups.values()), "5.6: shards")
        for file, found in groups.items():
            if found != {None}:
                mine = {row.get("stored_name", row["name"]) for row in rows if row["file"] == file}
                _require(set(self.header(file)[1]) - {"__metadata__"} == mine, "5.6: header")
        if "model.safetensors.index.json" in self.beside:
            index = _parse(self.beside["model.safetensors.index.json"].decode())
            _require(index["weight_map"] == names.get(""), "5.6: index")
            sizes = [row["range"][1] - row["range"][0] for row in rows if row.get("group") == ""]
            _require(index["metadata"]["total_size"] == sum(sizes), "5.6: total_size")

    def header(self, index: int) -> tuple[int, dict[str, Any]]:
        """5.1: where a shard's data starts, and what its header says."""
        data = self.shards[index]
        length = int.from_bytes(data[:8], "little")
        _require(8 + length <= len(data), "5.1")
        return 8 + length, _parse(data[8 : 8 + length])

    # Tensors.

    def _tensor(self, row: dict[str, Any]) -> tuple[str, tuple[int, ...], int, bytes]:
        """4.2, 4.7: type, shape, bytes of an element and data of a stored tensor."""
        _require("box" not in row, "4.6")
        first, after_last = row["range"]
        _require(0 <= row["file"] < len(self.shards), "4.7: file")
        shard = self.shards[row["file"]]
        _require(0 <= first <= after_last <= len(shard), "4.7: range")
        _require(type(row.get("stored_name", "")) is str, "4.2: stored_name")
        shape = tuple(row["shape"])
        _require(all(type(dim) is int and dim >= 0 for dim in shape), "4.2: shape")
        item_bytes = _item_bytes(row, shape)
        _require(after_last - first == math.prod(shape) * item_bytes, "4.7: length")
        return row["dtype"], shape, item_bytes, shard[first:after_last]

    def _check_names(self) -> None:
        rows = [*self.part["tensors"], *self.part["aliases"]]
        _require(len({row["name"] for row in rows}) == len(rows), "4.2: names")

    def _check_alias(self, alias: dict[str, Any]) -> None:
        """4.5: views stay inside their tensors."""
        _require(0 <= alias["tensor"] < len(self.tensors), "4.5")
        if "view" not in alias:
            return
        view = alias["view"]
        _require(len(view["shape"]) == len(view["strides"]), "4.5")
        if 0 in view["shape"]:
            return
        reaches = [
            (dim - 1) * step for dim, step in zip(view["shape"], view["strides"], strict=True)
        ]
        low = view["offset"] + sum(min(reach, 0) for reach in reaches)
        high = view["offset"] + sum(max(reach, 0) for reach in reaches)
        _require(low >= 0 and high < math.prod(self.tensors[alias["tensor"]][1]), "4.5")

    def _data(self, kind: str, index: int, view: dict[str, Any] | None) -> Tensor:
        dtype, shape, item_bytes, data = self.tensors[index]
        if view is not None:
            items = [view["offset"]]
            for dim, stride in zip(view["shape"], view["strides"], strict=True):
                items = [item + i * stride for item in items for i in range(dim)]
            shape = tuple(view["shape"])
            data = b"".join(data[item * item_bytes : (item + 1) * item_bytes] for item in items)
        return Tensor(kind, dtype, shape, data)

    def _reference(self, node: dict[str, Any]) -> Tensor:
        """6.2: tensor ``i``, or alias ``a``."""
        if "a" in node:
            alias = self.part["aliases"][node["a"]]
            return self._data(node["$"], alias["tensor"], alias.get("view"))
        return self._data(node["$"], node["i"], None)

    # The tree.

    def _value(self, node: Any, level: int) -> Any:
        """6.1."""
        _require(level <= LEVELS_MAX, "6.3")
        if isinstance(node, list):
            return [self._value(item, level + 1) for item in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: self._value(item, level + 1) for key, item in node.items()}
        return self._tagged(node, level)

    def _tagged(self, node: dict[str, Any], level: int) -> Any:
        """6.2."""
        tag, value = node["$"], node.get("v")
        if tag in ("tensor", "ndarray"):
            return self._reference(node)
        if tag in ("bytes", "bytearray"):
            kind = bytes if tag == "bytes" else bytearray
            return kind(self._reference(node).data if "i" in node else base64.b64decode(value))
        if tag in ("dict", "odict", "counter", "defaultdict"):
            return self._mapping(node, level)
        if tag == "deque":
            return deque((self._value(item, level + 1) for item in value), node["max"])
        if tag in ("sparse", "nested", "jagged", "subclass"):
            return self._made_of_others(node, level)
        if tag == "object":
            _require(0 < len(node["type"]) <= 200, "6.10")
            return Other("object", (node["type"], self._value(value, level + 1)))
        if tag in ("tuple", "set", "frozenset"):
            kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
            return kinds[tag](self._value(item, level + 1) for item in value)
        return _leaf(node)

    def _made_of_others(self, node: dict[str, Any], level: int) -> Other:
        """6.9."""
        tag, members = node["$"], {"$", "v"}
        inner = {key: self._value(child, level + 1) for key, child in node["v"].items()}
        _require(all(isinstance(one, Tensor | Other) for one in inner.values()), "6.9")
        if tag == "sparse":
            is_coo = node["layout"] == "coo"
            parts = {"indices", "values"} if is_coo else {"compressed", "plain", "values"}
            members |= {"layout", "shape"} | ({"coalesced"} if is_coo else set())
            _require(node["layout"] in ("coo", "csr", "csc", "bsr", "bsc"), "6.9: layout")
        elif tag == "nested":
            parts, members = {"values"}, members | {"sizes"}
            counts = sum(math.prod(row) for row in node["sizes"])
            _require(inner["values"].shape == (counts,), "6.9: sizes")
        elif tag == "jagged":
            parts = {"values", "offsets"} | (inner.keys() & {"lengths"})
            members |= {"ragged"} | (node.keys() & {"min", "max"})
        else:
            parts, members = set(inner), members | {"type", "dtype", "shape", "strides", "context"}
        _require(inner.keys() == parts and node.keys() == members, f"6.9: {tag}")
        facts = {key: node[key] for key in sorted(members - {"$", "v", "context"})}
        if "context" in node:
            facts["context"] = self._value(node["context"], level + 1)
        return Other(tag, (facts, inner))

    def _mapping(self, node: dict[str, Any], level: int) -> Any:
        pairs = [(_key(key), self._value(item, level + 1)) for key, item in node["v"]]
        if node["$"] == "counter":
            return Counter(dict(pairs))
        if node["$"] == "defaultdict":
            # The type is named, not constructed: a reader runs no code (6.5).
            return Other("defaultdict", (node["factory"], dict(pairs)))
        value = OrderedDict(pairs) if node["$"] == "odict" else dict(pairs)
        if "attrs" in node:
            return Other("odict", (value, self._value(node["attrs"], level + 1)))
        return value


def boxes_of_shard(path: Path) -> dict[str, dict[str, Any]] | None:
    """5.2: which tensors of a shard are boxes of global ones, by itself; None if it is silent."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = _parse(data[8 : 8 + length])
    text = header.pop("__metadata__").get("penstock.boxes")
    if text is None:
        return None
    boxes: dict[str, dict[str, Any]] = _parse(text)
    for name, box in boxes.items():
        _require(set(box) == {"tensor", "shape", "start"} and box["tensor"] != "", "4.6")
        sizes = zip(box["start"], header[name]["shape"], box["shape"], strict=False)
        _require(all(start + size <= whole for start, size, whole in sizes), "4.6: inside")
    return boxes


def _timed(node: dict[str, Any]) -> Any:
    """6.2: a date, or a time with its fold and zone."""
    value = getattr(dt, node["$"]).fromisoformat(node["v"])
    if node["$"] == "date":
        return value
    zone = _leaf(node["zone"]) if "zone" in node else None
    return value.replace(fold=node.get("fold", 0), tzinfo=zone)


def _zone(node: dict[str, Any]) -> dt.timezone:
    offset = dt.timedelta(*node["v"])
    return dt.timezone(offset, _key(node["name"])) if "name" in node else dt.timezone(offset)


def _path(node: dict[str, Any]) -> pathlib.PurePath:
    kinds = {"posix": pathlib.PurePosixPath, "windows": pathlib.PureWindowsPath}
    return kinds.get(node.get("pure", ""), pathlib.Path)(_key(node["v"]))


TYPED = {
    **dict.fromkeys(("date", "time", "datetime"), _timed),
    "timedelta": lambda node: dt.timedelta(*node["v"]),
    "timezone": _zone,
    "zone": lambda node: zoneinfo.ZoneInfo(node["v"]),
    "path": _path,
    "decimal": lambda node: decimal.Decimal(node["v"]),
    "uuid": lambda node: uuid.UUID(node["v"]),
}


def _leaf(node: dict[str, Any]) -> Any:
    """6.2: what needs nothing but the node itself."""
    tag, value = node["$"], node.get("v")
    if tag == "int":
        return int(value, 16)
    if tag == "float":
        if value.startswith("0x"):
            return struct.unpack(">d", bytes.fromhex(value[2:]))[0]
        return float(value)
    if tag == "str":
        return base64.b64decode(value).decode("utf-8", "surrogatepass")
    if tag == "complex":
        return complex(*(_key(part) for part in value))
    if tag in ("slice", "range"):
        kinds = {"slice": slice, "range": range}
        return kinds[tag](*(_key(part) for part in value))
    if tag in TYPED:
        return TYPED[tag](node)
    if tag == "size":
        return Other("size", tuple(_key(part) for part in value))
    if tag in ("dtype", "device", "np.dtype"):
        return Other(tag, value)
    if tag == "np":
        return Other("np", (node["dtype"], base64.b64decode(value)))
    raise FormatError(f"6.3: unknown tag {tag!r}")


def _key(node: Any) -> Any:
    """6.3: keys, and the numbers inside other values."""
    if not isinstance(node, dict):
        return node
    if node["$"] == "tuple":
        return tuple(_key(item) for item in node["v"])
    _require(node["$"] in ("int", "float", "str"), "6.3")
    return _leaf(node)


def _read_manifest(path: Path) -> dict[str, Any]:
    """3: the commit point."""
    file = path / "manifest.json"
    _require(file.exists(), "1.1: no manifest, incomplete")
    text = file.read_bytes()
    stamped, stamp = text[:-STAMP_BYTES], text[-STAMP_BYTES:]
    match = re.fullmatch(rb',"digest":"(crc64nvme:[0-9a-f]{16})"}\n', stamp)
    _require(match is not None and digest(stamped) == match[1].decode(), "3.3: damaged manifest")
    manifest = _parse(text)
    _require(manifest["format"] == "penstock-checkpoint", "3.1")
    _require(manifest["version"] == 1, "3.4: unknown version")
    _require(re.fullmatch(r"[0-9a-f]{32}", manifest["id"]) is not None, "1.2")
    _require(manifest["world_size"] == len(manifest["parts"]) == 1, "3.5")
    previous = manifest.get("previous", [])
    _require(len(previous) <= 144, "3.9: number")
    _require(all(re.fullmatch(r"[0-9a-f]{32}", one) for one in previous), "3.9: ids")
    return manifest


def _item_bytes(row: dict[str, Any], shape: tuple[int, ...]) -> int:
    """4.3, 4.4: bytes of an element, the carrier checked."""
    dtype = row["dtype"]
    if dtype in NATURAL:
        return NATURAL[dtype][0]
    stored = row["stored"]
    if dtype.startswith("numpy:"):
        item_bytes = stored["shape"][-1]
        _require(stored == {"dtype": "U8", "shape": [*shape, item_bytes]}, "4.4")
        return item_bytes
    _require(dtype in CARRIED, f"4.4: {dtype}")
    item_bytes, carrier, count = CARRIED[dtype]
    expected = [*shape, count] if count > 1 else list(shape)
    allowed = [{"dtype": carrier, "shape": expected}]
    if dtype in NAMED:
        kind, times = NAMED[dtype]
        longer = [*shape[:-1], shape[-1] * times] if shape else []
        if shape or times == 1:
            allowed.append({"dtype": kind, "shape": longer})
    _require(stored in allowed, "4.4")
    return item_bytes


def _check_overlaps(rows: list[dict[str, Any]]) -> None:
    ranges = sorted((row["file"], *row["range"]) for row in rows)
    for (file, _, end), (next_file, begin, _) in pairwise(ranges):
        _require(file != next_file or end <= begin, "4.2: overlap")


def _parse(text: bytes | str) -> Any:
    """Parses JSON without repeated members and without NaN and Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        _require(len(members) == len(pairs), "6.3: repeated member")
        return members

    def refuse(text: str) -> None:
        raise FormatError(f"{text} is no JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _require(holds: bool, paragraph: str) -> None:
    if not holds:
        raise FormatError(paragraph)
