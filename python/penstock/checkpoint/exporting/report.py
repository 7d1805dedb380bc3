"""`ExportReport`: the result of an export."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.report_lines import aligned, in_bytes, in_seconds

_CONFIGS = ("config.json", "adapter_config.json")
"""Files that identify the model of the weights: a whole one, or an adapter of one."""

REMEDY = "from_pretrained needs it: give files= (--files), the directory of the base model"

RENAMED = "without words of their names that were taken for a wrapper's"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The result of an export; ``str`` of it is a few lines for people.

    Attributes:
        path: The directory.
        tensors: Number of tensors in it.
        tensor_bytes: Bytes of their elements.
        bytes_written: Bytes of data written: none if files were hard-linked, or share the blocks of
            the checkpoint's files.
        way: ``"in place"``, ``"reflink"``, ``"hard link"``, or ``"copy"`` for data that was read
            and verified.
        files: Names of all files, weights first.
        seconds: Wall time of the whole call.
        renamed: Tensors whose names were shortened by the words of wrappers. Names in a group were
            shortened by the save, whose report says so.
        missing: Names of files that ``from_pretrained`` needs and that are not in `files`:
            ``config.json`` if it was neither saved with the checkpoint nor given.
    """

    path: str
    tensors: int
    tensor_bytes: int
    bytes_written: int
    way: str
    files: tuple[str, ...]
    seconds: float
    renamed: int = 0

    @property
    def missing(self) -> tuple[str, ...]:
        """Files that `from_pretrained` needs and that are missing."""
        return () if any(name in self.files for name in _CONFIGS) else _CONFIGS[:1]

    def __str__(self) -> str:
        return aligned(
            ("exported", self.path),
            ("tensors", f"{self.tensors:,}, {in_bytes(self.tensor_bytes)}"),
            (self.way, f"{in_bytes(self.bytes_written)} written in {in_seconds(self.seconds)}"),
            ("files", ", ".join(self.files)),
            *((("renamed", f"{self.renamed:,}, {RENAMED}"),) if self.renamed else ()),
            *(("missing", f"{name}: {REMEDY}") for name in self.missing),
        )
