"""What a call did: `SaveReport`, `LoadReport`, `VerifyResult`.

A report proves which path ran: engine, direct I/O or not, and why something was fallen back
from. GB is 10**9 bytes. ``str`` of one is a few lines for people, ``repr`` the whole of it.
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
"""What a `Fallback` may be a reason for."""


class Fallback(str):
    """A way that was not open: the reason, as text, which knows what it is a reason for.

    Attributes:
        kind: ``"engine"`` (threads move the bytes, not io_uring), ``"buffered"`` (they go through
            the page cache, though nobody asked for that), ``"eager"`` (a lazy save copied the state
            at its call), ``"unreserved"`` (space is not reserved before it is written),
            ``"unlinked"`` (a file of tensors could not have a second name: its blocks are shared,
            or it is copied), ``"leftover"`` (replaced files are not removed yet), ``"unindexed"``
            (readers of models find no index of a group), ``"untied"`` (tensors that share memory
            in part come back independent of each other), ``"renamed"`` (readers of models find
            tensors of a group by other names than the state has), ``"copy"`` (damaged chunks were
            read from another copy of the checkpoint) or ``"unpinned"`` (memory that a GPU copies
            to or from could not be pinned).
    """

    __slots__ = ("kind",)
    kind: FallbackKind

    def __new__(cls, reason: str, kind: FallbackKind) -> Self:
        """A reason of a kind."""
        self = super().__new__(cls, reason)
        self.kind = kind
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        # Reports are copied and cross process boundaries.
        return str(self), self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save wrote and how.

    Attributes:
        path: The checkpoint's directory.
        step: The step it was saved as, if any.
        checkpoint_id: Identity of this very save; `penstock.inspect` reports the same.
        bytes: Bytes of all files that were written, manifest included.
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
        fallbacks: What was tried first and why it was not used; each is a text with a ``kind``,
            see `Fallback`.
        choices: What was chosen and why, of ``extent_bytes``, ``io_threads`` and
            ``queue_depth``, where they were not given or there was no room for what was.
        device: The block device behind the directory, with its driver; None where it is not
            known.
        io_threads: Threads that moved bytes.
        queue_depth: Requests in flight per thread, at most.
        extent_bytes: Bytes of one request, at most.
        staging_peak_bytes: Most memory that was staged at one time.
        linked_bytes: Bytes of the files that became part of it without being written: those of an
            optimizer that keeps its state on storage. They are not among ``bytes``.
        device_bytes: Bytes of tensor data that GPUs copied out of their memory, to pinned memory of
            the host. What another device has counts as the host's: PyTorch copies it.
        rank: Number of the rank that this is the report of; bytes, tensors and files are its own.
        world_size: How many ranks saved together.
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
        """Bytes of all files that were written over the whole call's time."""
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
    """What a load read and how.

    Attributes:
        path: The checkpoint's directory.
        step: The step it was saved as, if any.
        checkpoint_id: Identity of the save it came from.
        bytes: Bytes of tensor data handed out.
        bytes_read: Bytes read from storage.
        seconds: Wall time of the whole call.
        phases: Wall time of each phase: ``open`` (manifest and part), ``read``, ``build``
            (making the state out of what was read).
        tensors: Tensors read.
        files: Files read.
        engine: ``"uring"`` or ``"threads"``.
        engine_setup: How the engine runs: the ring's flags, or the calls that the threads make.
        direct_io: Whether the page cache was bypassed.
        fallbacks: What was tried first and why it was not used; each is a text with a ``kind``,
            see `Fallback`.
        choices: What was chosen and why, of ``extent_bytes``, ``io_threads`` and
            ``queue_depth``, where they were not given or there was no room for what was.
        device: The block device behind the directory, with its driver; None where it is not
            known.
        io_threads: Threads that moved bytes.
        queue_depth: Requests in flight per thread, at most.
        extent_bytes: Bytes of one request, at most.
        staging_peak_bytes: Most memory that was staged at one time.
        bounced_bytes: Bytes that had to be copied after reading, for want of alignment.
        device_bytes: Bytes that GPUs copied into their memory, out of pinned memory of the host, to
            tensors that were filled and to new ones. It is 0 where PyTorch made the copies.
        verified: Whether everything handed out was checked against its digest.
        skipped: Newer steps that `CheckpointStore.load` passed over for want of a good one, each
            with the reason.
        world_size: How many ranks saved it together.
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
        """Bytes handed out over the whole call's time."""
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
    """Rows with short names of the files at a path."""
    names = FileNames(path, (text for _, text in rows))
    return [(name, names.short(text)) for name, text in rows]


def _titled(path: str, step: int | None) -> str:
    return path if step is None else f"{path}, step {step}"


def _how(report: SaveReport | LoadReport) -> list[Row]:
    """Which way the bytes went, and why no other."""
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
    """One thing that is wrong with a checkpoint.

    Attributes:
        file: Name of the file inside the checkpoint, where known.
        offset: First byte of the damaged range in that file, where known.
        tensor: Name of the tensor whose bytes are hit, where known.
        message: What is wrong, in words.
        is_proven: Whether the stored bytes themselves are wrong; see `CorruptCheckpointError`.
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
    """Whether every byte of a checkpoint still has its digest.

    Attributes:
        path: The checkpoint's directory.
        ok: Whether no problem was found.
        problems: Everything that was found, in the order of the files.
        bytes_checked: Bytes read and digested.
        files: Files checked.
        tensors: Tensors whose bytes were checked.
        is_partial: Whether it holds only what `penstock.salvage` got out of a damaged one.
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
        """Bytes checked over the whole call's time."""
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
    """What a scrub did with a step.

    Attributes:
        step: The training step.
        state: ``"verified"`` (read and right), ``"skipped"`` (not read: recently read back, not
            complete, or removed meanwhile), ``"damaged"`` (found so now, or recently and not read
            again) or ``"failed"`` (the system did not let it be read).
        reason: Why it is not verified; None where it is.
        read_at_seconds: When it was read back last, in seconds since 1970; None where that is not
            known.
        problems: What is wrong, where it was read now.
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
    """What a scrub of a store found.

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
        """Whether no step is damaged, and none was kept from being read."""
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
    """What retention deleted, or would delete, and why it kept the rest.

    Attributes:
        dry_run: Whether nothing was deleted, but would have been.
        deleted: The steps that went, or would go, oldest first.
        kept: Every other step with the reason, oldest first.
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
