"""Standard-library values that are one leaf of the tree: ranges, times, paths, UUIDs.

As in `penstock.checkpoint.state.tree.scalars`, both directions of each kind are adjacent, and only
exact types are accepted: a `pandas.Timestamp` is a `datetime` with more properties.
"""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import uuid
import zoneinfo
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.refusals import refusal
from penstock.checkpoint.state.tree.scalars import (
    TreeError,
    decode,
    encode_int,
    encode_str,
    integers,
    member,
)
from penstock.errors import MissingDependencyError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.state.tree.tree import Node


def encode_time(value: Any, name: str) -> Node:
    """Encodes a `datetime` or `time`: text without the zone, the fold if it is 1, and the zone."""
    node: dict[str, Any] = {
        "$": type(value).__name__,
        "v": value.replace(tzinfo=None).isoformat(),
    }
    if value.fold:
        node["fold"] = 1
    if value.tzinfo is not None:
        node["zone"] = encode_zone(value.tzinfo, name)
    return node


def encode_zone(value: Any, name: str) -> Node:
    """Encodes a `timezone` as its offset and name, a `ZoneInfo` as its key."""
    if type(value) is dt.timezone:
        # As `pickle` stores it: the offset, and the name if one was given.
        arguments: Any = value.__reduce__()[1]
        offset, *names = arguments
        named = {"name": encode_str(names[0])} if names else {}
        return {"$": "timezone", "v": encode_timedelta(offset, name)["v"], **named}
    if type(value) is zoneinfo.ZoneInfo and value.key is not None:
        return {"$": "zone", "v": value.key}
    raise refusal(value, name)


def encode_timedelta(value: dt.timedelta, name: str) -> Node:
    """Encodes days, seconds and microseconds."""
    return {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]}


def _encode_range(value: range, name: str) -> Node:
    return {"$": "range", "v": [encode_int(n) for n in (value.start, value.stop, value.step)]}


def _encode_slice(value: slice, name: str) -> Node:
    ends = (value.start, value.stop, value.step)
    if not all(end is None or type(end) is int for end in ends):
        raise UnsupportedStateError(
            f"{name}: {value!r} cannot be stored: only slices of ints and None can", key=name
        )
    return {"$": "slice", "v": [None if end is None else encode_int(end) for end in ends]}


def _encode_date(value: dt.date, name: str) -> Node:
    return {"$": "date", "v": value.isoformat()}


def _encode_path(value: pathlib.PurePath, name: str) -> Node:
    node = {"$": "path", "v": encode_str(str(value))}
    pure = _PURE.get(type(value))
    return node if pure is None else {**node, "pure": pure}


def _encode_decimal(value: decimal.Decimal, name: str) -> Node:
    return {"$": "decimal", "v": str(value)}


def _encode_uuid(value: uuid.UUID, name: str) -> Node:
    return {"$": "uuid", "v": str(value)}


_PURE: dict[type[pathlib.PurePath], str] = {
    pathlib.PurePosixPath: "posix",
    pathlib.PureWindowsPath: "windows",
}

TYPED: dict[type, Callable[[Any, str], Node]] = {
    range: _encode_range,
    slice: _encode_slice,
    dt.datetime: encode_time,
    dt.time: encode_time,
    dt.date: _encode_date,
    dt.timedelta: encode_timedelta,
    dt.timezone: encode_zone,
    zoneinfo.ZoneInfo: encode_zone,
    type(pathlib.Path()): _encode_path,
    pathlib.PurePosixPath: _encode_path,
    pathlib.PureWindowsPath: _encode_path,
    decimal.Decimal: _encode_decimal,
    uuid.UUID: _encode_uuid,
}
"""The encoder of each exact type, called with the value and the leaf's name."""


# Decoding. Texts must be those that a writer produces: each value has one form.


def _decode_time(node: dict[str, Node]) -> Any:
    kind: Any = {"datetime": dt.datetime, "time": dt.time}[node["$"]]
    text = member(node, "v", str)
    value = _parsed(node, kind.fromisoformat)
    if value.tzinfo is not None or value.isoformat() != text:
        raise TreeError(f"{text!r:.80} is no {node['$']}")
    fold = node.get("fold", 0)
    if type(fold) is not int or fold not in (0, 1):
        raise TreeError(f"{fold!r:.80} is no fold")
    zone = None
    if "zone" in node:
        inner = node["zone"]
        decoder = _ZONES.get(inner.get("$")) if type(inner) is dict else None
        if decoder is None:
            raise TreeError(f"{inner!r:.80} is no time zone")
        zone = decoder(inner)
    return value.replace(fold=fold, tzinfo=zone)


def _decode_date(node: dict[str, Node]) -> dt.date:
    value: dt.date = _parsed(node, dt.date.fromisoformat)
    if value.isoformat() != node["v"]:
        raise TreeError(f"{node['v']!r:.80} is no date")
    return value


def _decode_timedelta(node: dict[str, Node]) -> dt.timedelta:
    numbers = integers(node)
    try:
        value = dt.timedelta(*numbers)
    except (TypeError, OverflowError) as error:
        raise TreeError(f"no timedelta: {error}") from None
    if [value.days, value.seconds, value.microseconds] != numbers:
        raise TreeError(f"{numbers!r:.80} is no timedelta")
    return value


def _decode_timezone(node: dict[str, Node]) -> dt.timezone:
    offset = _decode_timedelta(node)
    try:
        return dt.timezone(offset, _text(node["name"])) if "name" in node else dt.timezone(offset)
    except ValueError as error:
        raise TreeError(f"no timezone: {error}") from None


def _decode_zone(node: dict[str, Node]) -> zoneinfo.ZoneInfo:
    key = member(node, "v", str)
    try:
        # `ZoneInfo` accepts no key that leads out of its database, and reads nothing else.
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError:
        raise MissingDependencyError(
            f"this machine knows no time zone {key!r:.80}: pip install tzdata", name="tzdata"
        ) from None
    except (ValueError, OSError) as error:
        raise TreeError(f"{key!r:.80} is no time zone: {error}") from None


def _decode_path(node: dict[str, Node]) -> pathlib.PurePath:
    text = _text(node.get("v"))
    kinds: dict[str, type[pathlib.PurePath]] = {name: kind for kind, name in _PURE.items()}
    pure = node.get("pure")
    if "pure" not in node:
        return pathlib.Path(text)
    if type(pure) is not str or pure not in kinds:
        raise TreeError(f"{pure!r:.80} is no kind of path")
    return kinds[pure](text)


def _decode_decimal(node: dict[str, Node]) -> decimal.Decimal:
    text = member(node, "v", str)
    try:
        value = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise TreeError(f"{text!r:.80} is no decimal") from None
    if str(value) != text:
        raise TreeError(f"{text!r:.80} is no decimal")
    return value


def _decode_uuid(node: dict[str, Node]) -> uuid.UUID:
    value: uuid.UUID = _parsed(node, uuid.UUID)
    if str(value) != node["v"]:
        raise TreeError(f"{node['v']!r:.80} is no UUID")
    return value


def _parsed(node: dict[str, Node], parse: Callable[[str], Any]) -> Any:
    text = member(node, "v", str)
    try:
        return parse(text)
    except ValueError:
        raise TreeError(f"{text!r:.80} is no {node['$']}") from None


def _text(node: Node) -> str:
    """Decodes a text in either of its forms."""
    value = decode(node) if type(node) is dict and node.get("$") == "str" else node
    if type(value) is not str:
        raise TreeError(f"{node!r:.80} is no text")
    return value


_ZONES: dict[Any, Callable[[dict[str, Node]], Any]] = {
    "timezone": _decode_timezone,
    "zone": _decode_zone,
}

DECODERS: dict[str, Callable[[dict[str, Node]], Any]] = {
    "datetime": _decode_time,
    "time": _decode_time,
    "date": _decode_date,
    "timedelta": _decode_timedelta,
    "path": _decode_path,
    "decimal": _decode_decimal,
    "uuid": _decode_uuid,
    **_ZONES,
}
"""The decoder of each tag; an invalid node raises `TreeError`."""
