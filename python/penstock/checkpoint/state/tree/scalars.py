"""Encodes plain values as nodes of the tree, and decodes them; both directions are adjacent.

`encode` functions return a JSON value, or an object tagged ``{"$": kind, …}`` for values that JSON
cannot express. `decode` accepts any node and raises `TreeError` for invalid ones; it looks names up
in tables and evaluates nothing.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import MissingDependencyError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

INT_BITS = 53
"""Many readers parse JSON numbers as doubles; larger integers are tagged."""
_INT_LIMIT = 1 << INT_BITS
_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_HEX_BITS = re.compile(r"0x[0-9a-f]{16}")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(?::[0-9]{1,5})?")
_QUIET_NAN = struct.pack(">d", math.nan)


COLLIDING_MAX = 256
"""Largest number of keys of a container with the same hash. Hashes of numbers are predictable, and
each such key is compared with all others: 30,000 of them would take half a minute.
"""


class TreeError(ValueError):
    """The tree of a checkpoint was not written by Penstock."""


class UnknownError(TreeError):
    """The tree contains something that this version of Penstock does not know."""


def refused(error: ValueError) -> TreeError:
    """Converts an error to a `TreeError`; unknown types become an `UnknownError`."""
    kind = UnknownError if isinstance(error, dtypes.UnknownTypeError | UnknownError) else TreeError
    return kind(str(error))


def check_hashes(values: Collection[Any]) -> None:
    """Refuses values that a set or dictionary would take quadratic time for.

    Raises:
        TreeError: Too many of them have the same hash.
        TypeError: A value is not hashable.
    """
    if len(values) > COLLIDING_MAX:
        _, most = Counter(map(hash, values)).most_common(1)[0]
        if most > COLLIDING_MAX:
            raise TreeError(f"{most} keys or members have the same hash")


def member(node: dict[str, Any], name: str, kind: type) -> Any:
    """Returns a member of a tagged object, which must exist and have exactly this type."""
    value = node.get(name)
    if type(value) is not kind:
        raise TreeError(f"{node.get('$')!r} needs a member {name!r} of type {kind.__name__}")
    return value


def label(key: Any) -> str:
    """Returns the part of a leaf's dotted name that a dictionary key or index contributes."""
    try:
        return str(key)
    except (ValueError, RecursionError):
        # Python refuses to print integers of thousands of digits, and deep nesting.
        return f"<long {type(key).__name__}>"


# Encoding.


def encode_as_is(value: Any) -> Any:
    """Returns None and booleans unchanged."""
    return value


def encode_int(value: int) -> Any:
    """Encodes large integers as hexadecimal text: exact, and linear in their length."""
    if -_INT_LIMIT < value < _INT_LIMIT:
        return value
    return {"$": "int", "v": hex(value)}


def encode_float(value: float) -> Any:
    """Encodes finite numbers unchanged; `json` writes the shortest text that is read back equal."""
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    if value == value or bits == _QUIET_NAN:
        return {"$": "float", "v": repr(value)}
    return {"$": "float", "v": f"0x{bits.hex()}"}


def encode_str(value: str) -> Any:
    """Encodes text unchanged, unless it has lone surrogates, which JSON cannot express portably."""
    if value.isascii() or is_unicode(value):
        return value
    return {"$": "str", "v": encode_base64(value.encode("utf-8", "surrogatepass"))}


def is_unicode(value: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def are_json_keys(value: dict[Any, Any]) -> bool:
    """Whether the keys can be the member names of an untagged object."""
    if not value:
        return True
    if set(map(type, value)) != {str} or "$" in value:
        return False
    keys = "".join(value)
    # Two surrogates could join to a character that neither key has.
    return keys.isascii() or all(map(is_unicode, value))


def encode_complex(value: complex) -> Any:
    """Encodes the real and imaginary part."""
    return {"$": "complex", "v": [encode_float(value.real), encode_float(value.imag)]}


def encode_numpy(value: Any) -> Any:
    """Encodes a NumPy scalar as its type and bytes; None if it is no plain data."""
    if type(value) is np.str_:
        # An array would drop trailing NULs.
        data = value.encode("utf-32-le", "surrogatepass")
        return {"$": "np", "dtype": f"<U{len(value)}", "v": encode_base64(data)}
    if type(value) is np.bytes_:
        return {"$": "np", "dtype": f"|S{len(value)}", "v": encode_base64(bytes(value))}
    text = dtypes.numpy_text(value.dtype)
    if text is None or type(value) is not value.dtype.type:
        return None
    node = {"$": "np", "dtype": text, "v": encode_base64(np.asarray(value).tobytes())}
    return with_twin(node, value.dtype)


def with_twin(node: dict[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Adds NumPy's type character to a node if the type's name is ambiguous."""
    char = dtypes.twin(dtype)
    return node if char is None else {**node, "char": char}


def encode_base64(data: bytes | bytearray) -> str:
    """Encodes bytes as text."""
    return base64.b64encode(data).decode("ascii")


ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): encode_as_is,
    bool: encode_as_is,
    int: encode_int,
    float: encode_float,
    str: encode_str,
    complex: encode_complex,
}
"""Encoders by exact type; they never fail. Subclasses (enum members, …) deliberately have none."""


def encode_key(key: Any, levels: int) -> Any:
    """Encodes a dictionary key; raises `TypeError` for an invalid key."""
    if type(key) is tuple and levels > 0:
        return {"$": "tuple", "v": [encode_key(item, levels - 1) for item in key]}
    if type(key) not in (str, int, float, bool, type(None)):
        raise TypeError(key)
    return ENCODERS[type(key)](key)


# Decoding.


def decode(node: Any) -> Any:
    """Decodes a leaf node.

    Raises:
        TreeError: The node is invalid.
        UnknownError: This version does not know the node's kind.
        MissingDependencyError: A required package is not installed, or lacks the value's type.
    """
    if type(node) is not dict:
        return node
    tag = node.get("$")
    decoder = _DECODERS.get(tag) if type(tag) is str else None
    if decoder is None:
        if type(tag) is str and tag not in TAGS:
            raise UnknownError(f"unknown tag {tag!r:.80}")
        raise TreeError(f"a tag {tag!r:.80} is out of place")
    return decoder(node)


def decode_keys(nodes: Iterable[Any]) -> list[Any]:
    """Decodes the keys of one dictionary.

    Raises:
        TreeError: A node is no key, or a dictionary of the keys would take quadratic time.
    """
    keys = [decode_key(node) for node in nodes]
    check_hashes(keys)
    return keys


def decode_key(node: Any) -> Any:
    """Decodes a dictionary key."""
    return _decode_key(node, 128)


def _decode_key(node: Any, levels: int) -> Any:
    if type(node) is dict and node.get("$") == "tuple" and levels > 0:
        return tuple(_decode_key(item, levels - 1) for item in member(node, "v", list))
    if type(node) is dict and node.get("$") not in ("int", "float", "str"):
        tag = node.get("$")
        # A newer version may allow these as keys, as sets allow them as members.
        is_newer = type(tag) is str and (tag not in TAGS or tag in TYPED_TAGS)
        raise (UnknownError if is_newer else TreeError)(f"{node!r:.80} is no key")
    if type(node) is list:
        raise TreeError("a list is no key")
    return decode(node)


def _decode_int(node: dict[str, Any]) -> int:
    text = member(node, "v", str)
    if not _HEX_INT.fullmatch(text):
        raise TreeError(f"{text!r:.80} is no integer")
    return int(text, 16)


def _decode_float(node: dict[str, Any]) -> float:
    text = member(node, "v", str)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if not _HEX_BITS.fullmatch(text):
        raise TreeError(f"{text!r:.80} is no float")
    value: float = struct.unpack(">d", bytes.fromhex(text[2:]))[0]
    return value


def _decode_str(node: dict[str, Any]) -> str:
    try:
        return decode_base64(node).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise TreeError(f"'str' is no UTF-8: {error}") from None


def decode_base64(node: dict[str, Any]) -> bytes:
    """Returns the bytes in a tagged object's member ``"v"``."""
    text = member(node, "v", str)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise TreeError(f"{node['$']!r} is no base64") from None


def _decode_complex(node: dict[str, Any]) -> complex:
    parts = [_number(part, float) for part in member(node, "v", list)]
    if len(parts) != 2:
        raise TreeError("'complex' needs two floats")
    return complex(*parts)


def _number(node: Any, kind: type) -> Any:
    """Decodes an int or a float in either of its forms."""
    if type(node) is dict and node.get("$") == kind.__name__:
        return decode(node)
    if type(node) is not kind:
        raise TreeError(f"{node!r:.80} is no {kind.__name__}")
    return node


def _decode_numpy(node: dict[str, Any]) -> Any:
    text = member(node, "dtype", str)
    data = decode_base64(node)
    try:
        if text == f"<U{len(data) // 4}":
            return np.str_(data.decode("utf-32-le", "surrogatepass"))
        if text == f"|S{len(data)}":
            return np.bytes_(data)
        dtype = dtypes.parse_numpy(text, node.get("char"))
        if dtype.itemsize != len(data):
            raise TreeError(f"{len(data)} bytes for a {text}")
        return np.ndarray((), dtype, data)[()]
    except dtypes.UnknownTypeError as error:
        raise refused(error) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise TreeError(f"no NumPy scalar: {error}") from None


def _decode_numpy_dtype(node: dict[str, Any]) -> np.dtype[Any]:
    try:
        return dtypes.parse_numpy(member(node, "v", str), node.get("char"))
    except ValueError as error:
        raise refused(error) from None


def _decode_torch_dtype(node: dict[str, Any]) -> Any:
    try:
        return dtypes.any_torch_dtype(member(node, "v", str))
    except ValueError as error:
        raise refused(error) from None


def _decode_device(node: dict[str, Any]) -> Any:
    text = member(node, "v", str)
    torch = dtypes.import_torch()
    if not _DEVICE.fullmatch(text):
        raise TreeError(f"{text!r:.80} is no device")
    try:
        device = torch.device(text)
    except RuntimeError:
        kind = text.partition(":")[0]
        raise MissingDependencyError(
            f"the device {text!r} is of no kind that this PyTorch knows: import the package that "
            f"brings {kind!r} devices before loading",
            name=kind,
        ) from None
    # PyTorch stores the index in eight bits and lets larger ones wrap around.
    if str(device) != text:
        raise TreeError(f"{text!r:.80} is no device")
    return device


def integers(node: dict[str, Any]) -> list[int]:
    """Returns the integers in a tagged object's member ``"v"``."""
    return [_number(item, int) for item in member(node, "v", list)]


def _decode_size(node: dict[str, Any]) -> Any:
    values = integers(node)
    try:
        return dtypes.import_torch().Size(values)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise TreeError(f"no torch.Size: {error}") from None


def _decode_range(node: dict[str, Any]) -> range:
    try:
        start, stop, step = integers(node)
        return range(start, stop, step)
    except ValueError as error:
        raise TreeError(f"no range: {error}") from None


def _decode_slice(node: dict[str, Any]) -> slice:
    ends = member(node, "v", list)
    if len(ends) != 3:
        raise TreeError("'slice' needs three members")
    return slice(*(None if end is None else _number(end, int) for end in ends))


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": _decode_str,
    "bytes": decode_base64,
    "bytearray": lambda node: bytearray(decode_base64(node)),
    "complex": _decode_complex,
    "np": _decode_numpy,
    "np.dtype": _decode_numpy_dtype,
    "dtype": _decode_torch_dtype,
    "device": _decode_device,
    "size": _decode_size,
    "range": _decode_range,
    "slice": _decode_slice,
}

TYPED_TAGS = frozenset(
    ("date", "time", "datetime", "timedelta", "timezone", "zone", "path", "decimal", "uuid")
)
"""Tags of `penstock.checkpoint.state.typed`."""

TAGS = (
    frozenset(_DECODERS)
    | TYPED_TAGS
    | {
        *("tensor", "ndarray", "missing", "tuple", "set", "frozenset"),
        *("dict", "odict", "counter", "defaultdict", "deque", "first"),
        *("object", "subclass", "sparse", "nested", "jagged"),
    }
)
"""All tags of the format; others belong to a newer version. `crates/store/src/format/tree.rs` has
the same list.
"""
