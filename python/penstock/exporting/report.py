"""`ExportReport`: what an export made."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.report_lines import aligned, in_bytes, in_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export made; ``str`` of it is a few lines for people.

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

    def __str__(self) -> str:
        return aligned(
            ("exported", self.path),
            ("tensors", f"{self.tensors:,}, {in_bytes(self.tensor_bytes)}"),
            (self.way, f"{in_bytes(self.bytes_written)} written in {in_seconds(self.seconds)}"),
            ("files", ", ".join(self.files)),
        )
