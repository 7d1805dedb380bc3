"""Chunk digests of bytes in memory, and the error for a mismatch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.errors import CorruptCheckpointError
from penstock.tensors.native_rows import TensorSource

if TYPE_CHECKING:
    from collections.abc import Sequence


def chunk_digests(memory: Any) -> list[int]:
    """Returns the CRC-64/NVME of each chunk of a contiguous tensor of bytes.

    The bytes begin at a chunk boundary of a file; the last chunk may be shorter.
    """
    count = memory.numel()
    address = memory.data_ptr()
    source = TensorSource("memory", "uint8", (count,), address, None, 1, memory, None, None)
    return _native.chunk_digests(source)


def combined(first: int, second: int, second_bytes: int) -> int:
    """Returns the digest of two adjacent byte ranges from the digests of each."""
    return _native.combine_digests(first, second, second_bytes)


def differing(found: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Returns the indices of chunks whose digests differ."""
    pairs = enumerate(zip(found, wanted, strict=True))
    return [index for index, (one, other) in pairs if one != other]


def damaged(path: str, name: str, offset: int) -> CorruptCheckpointError:
    """Returns the error that names the damaged bytes."""
    return CorruptCheckpointError(
        f"{path}: the bytes of {name!r} from {offset} on are not what was written there: load the"
        " last checkpoint, which has a copy of its own if it was made before",
        path=os.path.dirname(path),
        file=os.path.basename(path),
        tensor=name,
    )
