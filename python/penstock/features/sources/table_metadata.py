"""`TableMetadata`: the metadata of a table in a checkpoint; specified by `docs/gather.md`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.checkpoint.state.tree.names import escaped
from penstock.errors import CorruptCheckpointError
from penstock.tensors.arguments import encode_metadata

MEMBER = "penstock.features"
"""The member of the checkpoint's metadata that holds a note for each table, by key."""
BLOCK_BYTES = 4096
"""Bytes of a table that share one checksum, or are sealed together.

A device reads no less for a row. Larger blocks would read more for a row of 512 bytes, smaller ones
have more tags and are not faster to read.
"""
TAG_BYTES = 16
"""Bytes of the tag of a sealed block."""
_DIGEST = "crc32c"
_CIPHER = "aes256gcm"


@dataclass(frozen=True, slots=True)
class TableMetadata:
    """The metadata of a table, beside its tensor.

    Attributes:
        row_shape: The shape of a row; elements behind it are padding.
        checks: Name of the tensor with the checksum of each block; None for none.
        tags: Name of the tensor with the tag of each block; None if they are not sealed.
    """

    row_shape: tuple[int, ...]
    checks: str | None
    tags: str | None = None

    @classmethod
    def of(cls, key: str, row_shape: tuple[int, ...], *, is_sealed: bool = False) -> TableMetadata:
        """The note of a table written with checksums, or with tags."""
        name = beside_name(key, is_sealed=is_sealed)
        return cls(row_shape, None, name) if is_sealed else cls(row_shape, name)

    def to_json(self) -> dict[str, Any]:
        """The note as the checkpoint's metadata stores it."""
        beside = (
            {"checks": {"tensor": self.checks, "digest": _DIGEST, "block_bytes": BLOCK_BYTES}}
            if self.tags is None
            else {"seals": {"tensor": self.tags, "cipher": _CIPHER, "block_bytes": BLOCK_BYTES}}
        )
        return {"row_shape": list(self.row_shape), **beside}


def with_table_metadata(metadata: Mapping[str, Any] | None, notes: Mapping[str, Any]) -> str:
    """A caller's metadata with the notes of tables added, as a checkpoint stores it."""
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata={metadata!r:.80}: must be a dict or None")
    if metadata is not None and MEMBER in metadata:
        raise ValueError(f"metadata: the member {MEMBER!r} is ours: give it another name")
    return encode_metadata({**(metadata or {}), MEMBER: notes})


def beside_name(key: str, *, is_sealed: bool = False) -> str:
    """Name of the tensor that holds the checksums of a table, or its tags."""
    return f"{key}.{_CIPHER if is_sealed else _DIGEST}"


def table_metadata_of(metadata: Mapping[str, Any], path: str) -> dict[str, TableMetadata]:
    """The notes of all tables of a checkpoint, by the names of their leaves."""
    notes = metadata.get(MEMBER, {})
    if not isinstance(notes, dict):
        raise _senseless(path, MEMBER)
    return {escaped(key): _table_metadata(path, key, note) for key, note in notes.items()}


def _table_metadata(path: str, key: str, note: Any) -> TableMetadata:
    try:
        row_shape, checks, seals = note["row_shape"], note.get("checks"), note.get("seals")
        if not all(type(size) is int and size >= 0 for size in row_shape):
            raise _senseless(path, key)
        # A newer writer may use other checksums; they are ignored, as if there were none.
        is_known = checks is not None and (
            (checks["digest"], checks["block_bytes"]) == (_DIGEST, BLOCK_BYTES)
        )
        name = checks["tensor"] if is_known else None
        tags = None
        if seals is not None:
            # Rows that cannot be opened cannot be read.
            if (seals["cipher"], seals["block_bytes"]) != (_CIPHER, BLOCK_BYTES):
                raise _senseless(path, key)
            tags = seals["tensor"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _senseless(path, key) from error
    if not isinstance(name, str | None) or not isinstance(tags, str | None):
        raise _senseless(path, key)
    names = (None if one is None else escaped(one) for one in (name, tags))
    return TableMetadata(tuple(row_shape), *names)


def _senseless(path: str, key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: what its metadata says of the table {key!r} makes no sense: write the table again"
        " with penstock.features.write",
        path=path,
        tensor=key,
    )


Align: TypeAlias = Literal["auto"] | bool

_GAIN_MIN = 0.1
"""Share of blocks read times bytes stored that padding must save; readers that do not know about
padding see additional columns."""


def row_bytes_for(value_bytes: int, item_bytes: int, align: Align) -> int:
    """Bytes that a row takes in its file.

    Args:
        value_bytes: Bytes of its elements.
        item_bytes: Bytes of one element.
        align: Whether rows are padded to straddle as few blocks as possible: always (True), never
            (False), or where it saves more than it costs (``"auto"``).
    """
    if align not in ("auto", True, False):
        raise ValueError(f"align={align!r}: must be 'auto', True or False")
    if align is False:
        return value_bytes
    lengths = [value_bytes, *_longer(value_bytes, item_bytes)]
    if align is True:
        return min(lengths, key=lambda length: (blocks_per_row(length), length))
    best = min(lengths, key=lambda length: (_cost(length), length))
    return best if _cost(best) <= (1 - _GAIN_MIN) * _cost(value_bytes) else value_bytes


def blocks_per_row(row_bytes: int) -> float:
    """Average number of blocks that hold part of a row, if rows are stored from a block on.

    Within blocks, rows begin at all multiples of the greatest common divisor of row and block.
    """
    return 1 + (row_bytes - math.gcd(row_bytes, BLOCK_BYTES)) / BLOCK_BYTES


def _cost(row_bytes: int) -> float:
    """Blocks read times bytes stored: a tenth more of either costs the same."""
    return blocks_per_row(row_bytes) * row_bytes


def _longer(value_bytes: int, item_bytes: int) -> list[int]:
    """Candidates for a padded length that may straddle fewer blocks."""
    if value_bytes <= BLOCK_BYTES:
        lengths = [1 << (value_bytes - 1).bit_length()]
    else:
        steps = (BLOCK_BYTES >> shift for shift in range(4))
        lengths = [-(-value_bytes // step) * step for step in steps]
    return [length for length in lengths if length % item_bytes == 0 and length > value_bytes]
