"""Reports of finished calls, such as `SaveReport`, `LoadReport` and `VerifyResult`.

A report shows how the bytes moved: the engine, direct I/O, and each fallback with its reason. GB is
10**9 bytes. ``str`` of a report is a few lines for people, ``repr`` all of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from penstock.common.file_names import FileNames
from penstock.common.report_lines import aligned, counted, first_of, in_bytes, in_seconds

if TYPE_CHECKING:
    from penstock.common.report_lines import Row


def _gb_per_second(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


FallbackKind: TypeAlias = Literal[
    "engine",
    "buffered",
    "eager",
    "unreserved",
    "unlinked",
    "leftover",
    "unindexed",
    "untied",
    "renamed",
    "copy",
    "unpinned",
]
"""Kinds of `Fallback`."""


class Fallback(str):
    """The reason why a preferred method was not used: a text with a ``kind``.

    Attributes:
        kind: ``"engine"`` (threads move the bytes instead of io_uring), ``"buffered"`` (bytes go
            through the page cache although this was not requested), ``"eager"`` (a lazy save copied
            the state at its call), ``"unreserved"`` (space is not reserved before writing),
            ``"unlinked"`` (a file of tensors could not be hard-linked: its blocks are shared, or it
            is copied), ``"leftover"`` (replaced files are not removed yet), ``"unindexed"`` (a
            group has no index for readers of models), ``"untied"`` (tensors that share a part of
            their memory come back independent of each other), ``"renamed"`` (readers of models find
            tensors of a group under other names than in the state), ``"copy"`` (damaged chunks were
            read from another copy of the checkpoint) or ``"unpinned"`` (memory that a GPU copies to
            or from could not be pinned).
    """

    __slots__ = ("kind",)
    kind: FallbackKind

    def __new__(cls, reason: str, kind: FallbackKind) -> Self:
        """Creates a reason of this kind."""
        self = super().__new__(cls, reason)
        self.kind = kind
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        # Reports are copied and cross process boundaries.
        return str(self), self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The result of a save: bytes written, timings, and the methods used.

    Attributes:
        path: The checkpoint's directory.
        step: The step it was saved as, if any.
        checkpoint_id: Identity of this save; `penstock.inspect` reports the same.
        bytes: Bytes of all files written, manifest included.
        tensor_bytes: Bytes of tensor data in them.
        seconds: Wall time of the whole call.
        phases: Wall time of each phase: ``flatten`` (walking the state), ``plan``, ``write``,
            ``sync``, ``commit``. ``stage``, the copying of an asynchronous save, overlaps with
            others; ``commit`` includes waiting for other ranks.
        tensors: Tensors stored; tied ones count once.
        files: Files of the checkpoint.
        engine: ``"uring"`` or ``"threads"``.
        engine_setup: How the engine runs: the ring's flags, or the calls that the threads make.
        direct_io: Whether the page cache was bypassed.
        fallbacks: Preferred methods that could not be used, each a reason with a ``kind``; see
            `Fallback`.
        choices: Values of ``extent_bytes``, ``io_threads`` and ``queue_depth`` that Penstock chose,
            with reasons, because they were not given or exceeded the available memory.
        device: The block device of the directory, with its driver; None if unknown.
        io_threads: Threads that moved bytes.
        queue_depth: Largest number of requests in flight per thread.
        extent_bytes: Largest size of one request, in bytes.
        staging_peak_bytes: Peak memory used for staging.
        linked_bytes: Bytes of files that were hard-linked into the checkpoint instead of written:
            those of an optimizer that keeps its state on storage. Not included in ``bytes``.
        device_bytes: Bytes of tensor data that GPUs copied from their memory to pinned host memory.
            Tensors on other devices are not included, because PyTorch copies them to the host.
        rank: Number of the rank that this report describes; bytes, tensors and files are its own.
        world_size: Number of ranks that saved together.
    """

    path: str
    step: int | None
    checkpoint_id: str
    bytes: int
    tensor_bytes: int
    seconds: float
    phases: dict[str, float]
    tensors: int
    files: int
    engine: str
    engine_setup: str
    direct_io: bool
    fallbacks: list[Fallback]
    choices: list[str]
    device: str | None
    io_threads: int
    queue_depth: int
    extent_bytes: int
    staging_peak_bytes: int
    linked_bytes: int = 0
    device_bytes: int = 0
    rank: int = 0
    world_size: int = 1

    @property
    def gb_per_second(self) -> float:
        """Bytes of all files written, divided by the time of the whole call."""
        return _gb_per_second(self.bytes, self.seconds)

    def __str__(self) -> str:
        linked = f", and {in_bytes(self.linked_bytes)} linked" if self.linked_bytes else ""
        of_gpus = f", {in_bytes(self.device_bytes)} from GPUs" if self.device_bytes else ""
        return aligned(
            ("saved", _titled(self.path, self.step)),
            ("rank", f"{self.rank} of {self.world_size}" if self.world_size > 1 else ""),
            (
                "wrote",
                f"{in_bytes(self.bytes)} in {in_seconds(self.seconds)},"
                f" {in_bytes(round(1e9 * self.gb_per_second))}/s",
            ),
            (
                "tensors",
                f"{self.tensors:,}, {in_bytes(self.tensor_bytes)},"
                f" in {counted(self.files, 'file')}{of_gpus}{linked}",
            ),
            *_how(self),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load: bytes read, timings, and the methods used.

    Attributes:
        path: The checkpoint's directory.
        step: The step it was saved as, if any.
        checkpoint_id: Identity of the save it came from.
        bytes: Bytes of tensor data returned to the caller.
        bytes_read: Bytes read from storage.
        seconds: Wall time of the whole call.
        phases: Wall time of each phase: ``open`` (manifest and part), ``read``, ``build`` (building
            the state from the bytes read).
        tensors: Tensors read.
        files: Files read.
        engine: ``"uring"`` or ``"threads"``.
        engine_setup: How the engine runs: the ring's flags, or the calls that the threads make.
        direct_io: Whether the page cache was bypassed.
        fallbacks: Preferred methods that could not be used, each a reason with a ``kind``; see
            `Fallback`.
        choices: Values of ``extent_bytes``, ``io_threads`` and ``queue_depth`` that Penstock chose,
            with reasons, because they were not given or exceeded the available memory.
        device: The block device of the directory, with its driver; None if unknown.
        io_threads: Threads that moved bytes.
        queue_depth: Largest number of requests in flight per thread.
        extent_bytes: Largest size of one request, in bytes.
        staging_peak_bytes: Peak memory used for staging.
        bounced_bytes: Bytes copied after reading because the target was not aligned.
        device_bytes: Bytes that GPUs copied from pinned host memory into their memory, for tensors
            filled in place and new ones; 0 if PyTorch made the copies.
        verified: Whether all returned bytes were checked against their digests.
        skipped: Newer steps that `CheckpointStore.load` skipped because they are not good, each
            with its reason.
        world_size: Number of ranks that saved the checkpoint together.
    """

    path: str
    step: int | None
    checkpoint_id: str
    bytes: int
    bytes_read: int
    seconds: float
    phases: dict[str, float]
    tensors: int
    files: int
    engine: str
    engine_setup: str
    direct_io: bool
    fallbacks: list[Fallback]
    choices: list[str]
    device: str | None
    io_threads: int
    queue_depth: int
    extent_bytes: int
    staging_peak_bytes: int
    bounced_bytes: int
    verified: bool
    device_bytes: int = 0
    skipped: tuple[tuple[int, str], ...] = ()
    world_size: int = 1

    @property
    def gb_per_second(self) -> float:
        """Bytes returned, divided by the time of the whole call."""
        return _gb_per_second(self.bytes, self.seconds)

    def __str__(self) -> str:
        ranks = f", saved by {self.world_size} ranks" if self.world_size > 1 else ""
        return aligned(
            ("loaded", _titled(self.path, self.step) + ranks),
            (
                "gave",
                f"{in_bytes(self.bytes)} in {in_seconds(self.seconds)},"
                f" {in_bytes(round(1e9 * self.gb_per_second))}/s,"
                f" {'verified' if self.verified else 'not verified'}",
            ),
            (
                "read",
                f"{in_bytes(self.bytes_read)}: {counted(self.tensors, 'tensor')}"
                f" from {counted(self.files, 'file')}"
                + (f", {in_bytes(self.device_bytes)} to GPUs" if self.device_bytes else ""),
            ),
            *(("skipped", f"step {step}: {reason}") for step, reason in self.skipped),
            ("copied", in_bytes(self.bounced_bytes) if self.bounced_bytes else ""),
            *_how(self),
        )


def _short(path: str, rows: list[Row]) -> list[Row]:
    """Shortens the names of the checkpoint's files in the rows' texts."""
    names = FileNames(path, (text for _, text in rows))
    return [(name, names.short(text)) for name, text in rows]


def _titled(path: str, step: int | None) -> str:
    return path if step is None else f"{path}, step {step}"


def _how(report: SaveReport | LoadReport) -> list[Row]:
    """Report rows on the way that the bytes took, and the reasons."""
    way = "past the page cache" if report.direct_io else "through the page cache"
    if report.engine == "objects":
        way = "over HTTP"
    phases = [f"{name} {in_seconds(seconds)}" for name, seconds in report.phases.items()]
    return [
        ("phases", ", ".join(phases)),
        ("way", f"{way}, {report.engine}" + (f" on {report.device}" if report.device else "")),
        (
            "requests",
            f"of {in_bytes(report.extent_bytes)}, {counted(report.io_threads, 'thread')}"
            f" with {report.queue_depth} in flight each",
        ),
        ("memory", f"{in_bytes(report.staging_peak_bytes)} at most beside the state"),
        *(("chosen", choice) for choice in report.choices),
        *(("instead", str(fallback)) for fallback in report.fallbacks),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One defect of a checkpoint.

    Attributes:
        file: Name of the file inside the checkpoint, where known.
        offset: First byte of the damaged range in that file, where known.
        tensor: Name of the tensor whose bytes are damaged, where known.
        message: Description of the defect.
        is_proven: Whether the stored bytes are proven wrong; see `CorruptCheckpointError`.
    """

    file: str | None
    offset: int | None
    tensor: str | None
    message: str
    is_proven: bool = False

    def __str__(self) -> str:
        place = [self.file, None if self.offset is None else f"offset {self.offset}", self.tensor]
        named = ", ".join(one for one in place if one)
        return f"{named}: {self.message}" if named else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The result of comparing every byte of a checkpoint with its digest.

    Attributes:
        path: The checkpoint's directory.
        ok: Whether no problem was found.
        problems: All problems found, in the order of the files.
        bytes_checked: Bytes read and digested.
        files: Files checked.
        tensors: Tensors whose bytes were checked.
        is_partial: Whether the checkpoint holds only the tensors that `penstock.salvage` recovered
            from a damaged one.
        seconds: Wall time of the whole call.
    """

    path: str
    ok: bool
    problems: tuple[Problem, ...]
    bytes_checked: int
    files: int
    tensors: int
    seconds: float
    is_partial: bool = False

    @property
    def gb_per_second(self) -> float:
        """Bytes checked, divided by the time of the whole call."""
        return _gb_per_second(self.bytes_checked, self.seconds)

    def __str__(self) -> str:
        verdict = "good" if self.ok else counted(len(self.problems), "problem")
        return aligned(
            ("verified", self.path),
            ("result", f"{verdict}, holds only what was salvaged" if self.is_partial else verdict),
            (
                "checked",
                f"{in_bytes(self.bytes_checked)} in {in_seconds(self.seconds)},"
                f" {in_bytes(round(1e9 * self.gb_per_second))}/s: {counted(self.tensors, 'tensor')}"
                f" in {counted(self.files, 'file')}",
            ),
            *first_of(_short(self.path, [("problem", str(one)) for one in self.problems])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubbedStep:
    """The result of scrubbing one step.

    Attributes:
        step: The training step.
        state: ``"verified"`` (read, and all digests match), ``"skipped"`` (not read: verified
            recently, incomplete, or removed meanwhile), ``"damaged"`` (found damaged now, or
            recently and not read again) or ``"failed"`` (the operating system could not read it).
        reason: Why the step is not verified; None if it is.
        read_at_seconds: When the step was last verified, in seconds since 1970; None if unknown.
        problems: Problems found by this scrub.
        bytes_checked: Bytes read and digested.
        seconds: Wall time.
    """

    step: int
    state: str
    reason: str | None
    read_at_seconds: int | None
    problems: tuple[Problem, ...]
    bytes_checked: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReport:
    """The result of scrubbing a store.

    Attributes:
        root: The store's directory.
        steps: Every step, oldest first.
        seconds: Wall time of the whole call.
    """

    root: str
    steps: tuple[ScrubbedStep, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no step is damaged and every step to be checked could be read."""
        return all(step.state in ("verified", "skipped") for step in self.steps)

    @property
    def bytes_checked(self) -> int:
        """Bytes read and digested."""
        return sum(step.bytes_checked for step in self.steps)

    def __str__(self) -> str:
        verdict = "good" if self.ok else "damaged, or could not be read"
        steps = _short(
            self.root,
            [
                ("step", f"{one.step} {one.state}" + (f": {one.reason}" if one.reason else ""))
                for one in self.steps
            ],
        )
        return aligned(
            ("scrubbed", self.root),
            ("result", verdict),
            ("checked", f"{in_bytes(self.bytes_checked)} in {in_seconds(self.seconds)}"),
            *first_of(steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """The steps that retention deleted or would delete, and why it kept the others.

    Attributes:
        dry_run: Whether nothing was deleted because the call was a dry run.
        deleted: The steps deleted (in a dry run: to be deleted), oldest first.
        kept: The reason for each step that was kept, oldest first.
    """

    dry_run: bool
    deleted: tuple[int, ...]
    kept: dict[int, str]

    def __str__(self) -> str:
        deleted = "would delete" if self.dry_run else "deleted"
        return aligned(
            (deleted, ", ".join(map(str, self.deleted)) or "nothing"),
            *first_of([("kept", f"{step}: {reason}") for step, reason in self.kept.items()]),
        )
