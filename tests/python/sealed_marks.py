"""A state to seal in the tests of plug-ins: its marks are looked for in files, as names and values.

A mark is found in every file that is written in the clear: of a tensor the bytes of its elements.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from penstock.sealing import Sealing

KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32

NAME = "hidden_name"
TEXT = "a hidden text"
NUMBER = 1234.5678
FLOATS = struct.pack("<4f", *(4 * [NUMBER]))
"""Four neighbouring elements of a tensor of float32 that is full of `NUMBER`."""

_GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


def sealing():
    return Sealing([KEY])


def files_below(directory):
    return [path for path in Path(directory).rglob("*") if path.is_file()]


def assert_hidden(directory, *further):
    """Asserts that files exist below a directory and that none has a mark in its name or bytes."""
    marks = [NAME.encode(), TEXT.encode(), FLOATS, struct.pack("<d", NUMBER)]
    marks += [mark if isinstance(mark, bytes) else mark.encode() for mark in further]
    found = files_below(directory)
    assert any(path.name.startswith("shard-") for path in found)
    for path in found:
        content = os.fsencode(path) + path.read_bytes()
        assert not any(mark in content for mark in marks), path


def tamper(directory):
    """Changes a sealed shard below a directory in such a way that its digests stay right."""
    shard = max(
        (path for path in files_below(directory) if path.name.startswith("shard-")),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(shard.read_bytes())
    # Behind the header, and within one chunk.
    for place, byte in enumerate(_GENERATOR, 4096):
        data[place] ^= byte
    shard.write_bytes(data)
