"""Safetensors files written byte by byte."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
"""Text that Git LFS puts in the place of a file."""

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""All types of the safetensors library, with their bits per element."""

FLOAT6 = ("F6_E2M3", "F6_E3M2")
"""Types without a counterpart in PyTorch."""


def entry(kind: str, shape: Any, begin: int, end: int, **more: Any) -> dict[str, Any]:
    """Returns a tensor's entry in a header."""
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end], **more}


def write(path: Path, header: str | dict[str, Any], data: bytes) -> Path:
    """Writes a file of a header and the bytes after it."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
