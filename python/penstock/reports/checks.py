"""Results of verifying a checkpoint, of scrubbing a store, and of retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.file_names import FileNames
from penstock.common.report_lines import (
    aligned,
    counted,
    first_of,
    gb_per_second,
    in_bytes,
    in_seconds,
)

if TYPE_CHECKING:
    from penstock.common.report_lines import Row


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
        is_sealed: Whether the checkpoint is sealed. Digests cover the sealed bytes, so they find
            damage; tampering shows when the checkpoint is loaded with a key.
        signer: The key that signed it, in public: ``SHA256:…`` of ssh, ``P-256 key …`` of OpenSSF.
            None if no signature was asked for.
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
    is_sealed: bool = False
    signer: str | None = None

    @property
    def gb_per_second(self) -> float:
        """Bytes checked, divided by the time of the whole call."""
        return gb_per_second(self.bytes_checked, self.seconds)

    def __str__(self) -> str:
        verdict = "good" if self.ok else counted(len(self.problems), "problem")
        return aligned(
            ("verified", self.path + (", sealed: tags were not checked" if self.is_sealed else "")),
            ("result", f"{verdict}, holds only what was salvaged" if self.is_partial else verdict),
            (
                "checked",
                f"{in_bytes(self.bytes_checked)} in {in_seconds(self.seconds)},"
                f" {in_bytes(round(1e9 * self.gb_per_second))}/s: {counted(self.tensors, 'tensor')}"
                f" in {counted(self.files, 'file')}",
            ),
            *([("signed by", self.signer)] if self.signer is not None else []),
            *first_of(_short(self.path, [("problem", str(one)) for one in self.problems])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignResult:
    """The result of signing a checkpoint.

    Attributes:
        path: The checkpoint's directory.
        checkpoint_id: The checkpoint's id.
        signers: The keys that signed, in public: ``SHA256:…`` of ssh, ``P-256 key …`` of OpenSSF.
        files: Files that the signatures cover.
        bytes_hashed: Bytes of the checkpoint that were read, verified and hashed.
        seconds: Wall time of the whole call.
    """

    path: str
    checkpoint_id: str
    signers: tuple[str, ...]
    files: int
    bytes_hashed: int
    seconds: float

    def __str__(self) -> str:
        return aligned(
            ("signed", self.path),
            *(("by", signer) for signer in self.signers),
            (
                "covered",
                f"{in_bytes(self.bytes_hashed)} in {counted(self.files, 'file')},"
                f" in {in_seconds(self.seconds)}",
            ),
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


def _short(path: str, rows: list[Row]) -> list[Row]:
    """Shortens the names of the checkpoint's files in the rows' texts."""
    names = FileNames(path, (text for _, text in rows))
    return [(name, names.short(text)) for name, text in rows]
