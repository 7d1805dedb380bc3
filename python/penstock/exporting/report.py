"""`ExportReport`: what an export made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export made.

    Attributes:
        path: The directory.
        tensors: Tensors in it.
        tensor_bytes: Bytes of their elements.
        bytes_written: Bytes of data that were written for it: none where files got a second
            name, or share the blocks of the checkpoint's.
        way: ``"in place"``, ``"reflink"``, ``"hard link"``, or ``"copy"`` of what was read and
            verified.
        files: Names of all files, weights first.
        seconds: How long it took.
    """

    path: str
    tensors: int
    tensor_bytes: int
    bytes_written: int
    way: str
    files: tuple[str, ...]
    seconds: float
