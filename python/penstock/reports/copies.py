"""Results of exporting, converting and mirroring a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.report_lines import aligned, first_of, in_bytes, in_seconds

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion; ``str`` of it is a few lines for people.

    Attributes:
        path: The new checkpoint.
        source: The source.
        kind: The kind of source: ``"torch"``, ``"lightning"``, ``"dcp"``, ``"deepspeed"``,
            ``"accelerate"`` or ``"megatron"``; ``"penstock"`` if the new one is Megatron-Core's.
        step: The step stored with the new checkpoint; None if unknown.
        checkpoint_id: Identity of the one that is Penstock's.
        tensors: Number of tensors stored.
        tensor_bytes: Bytes of their data.
        bytes: Bytes of all files written.
        trusted: Classes and functions that were called to unpickle values that are not plain.
        pickled: Dotted names of values stored as pickled bytes, because the format does not support
            them: `pickle.loads` restores one.
        seconds: Wall time of the whole call.
    """

    path: str
    source: str
    kind: str
    step: int | None
    checkpoint_id: str
    tensors: int
    tensor_bytes: int
    bytes: int
    trusted: tuple[str, ...]
    pickled: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return aligned(
            ("converted", f"{self.source} ({self.kind})"),
            ("into", self.path),
            ("step", "" if self.step is None else str(self.step)),
            ("tensors", f"{self.tensors:,}, {in_bytes(self.tensor_bytes)}"),
            ("wrote", f"{in_bytes(self.bytes)} in {in_seconds(self.seconds)}"),
            *first_of([("called", name) for name in self.trusted]),
            *first_of([("pickled", name) for name in self.pickled]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """The result of copying one checkpoint.

    Attributes:
        path: The checkpoint.
        url: Its copy.
        checkpoint_id: The identity of both.
        bytes: Bytes of all files of the copy.
        sent_bytes: Bytes sent by this call; the others were already there.
        files: Files of the copy.
        seconds: Wall time of the copy.
    """

    path: str
    url: str
    checkpoint_id: str
    bytes: int
    sent_bytes: int
    files: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """The state of copying a store's steps, in this process.

    Attributes:
        url: The mirror.
        mirrored: Steps that this process knows to be complete at the mirror, oldest first.
        waiting: Complete local steps that are still to be copied, oldest first.
        refused: Steps that cannot be copied, with the reason: the local step is damaged, or the
            mirror has another checkpoint. They are tried again after each save and by
            `wait_for_mirror`.
        step: The step that is being sent; None if none is.
        sent_bytes: Bytes of that step already sent.
        total_bytes: Total bytes of that step.
        failures: Number of consecutive failed attempts; they are repeated at growing intervals.
        last_error: The message of the last failure or refusal; None if there was none.
    """

    url: str
    mirrored: tuple[int, ...]
    waiting: tuple[int, ...]
    refused: dict[int, str]
    step: int | None
    sent_bytes: int
    total_bytes: int
    failures: int
    last_error: str | None
