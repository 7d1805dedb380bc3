"""`SaveReport` and `LoadReport`: how the bytes of a save or a load moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.common.report_lines import (
    aligned,
    counted,
    gb_per_second,
    in_bytes,
    in_seconds,
)

if TYPE_CHECKING:
    from penstock.common.report_lines import Row
    from penstock.reports.fallbacks import Fallback


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
            with reasons, because they were not given or exceeded the available memory; why a state
            of 16 MiB or more was copied although ``zero_copy`` is on; with
            ``save_every="auto"``, on rank 0, the number of steps until the next save.
        device: The block device of the directory, with its driver; None if unknown.
        io_threads: Threads that moved bytes.
        queue_depth: Largest number of requests in flight per thread.
        extent_bytes: Largest size of one request, in bytes.
        staging_peak_bytes: Peak memory used for staging.
        linked_bytes: Bytes of files that were hard-linked into the checkpoint instead of written:
            those of an optimizer that keeps its state on storage. Not included in ``bytes``.
        device_bytes: Bytes of tensor data that GPUs copied from their memory to pinned host memory.
            Tensors on other devices are not included, because PyTorch copies them to the host.
        zero_copy_bytes: Bytes of tensor data written from the tensors' own memory, without a copy.
        sealed_bytes: Bytes of tensor data that were sealed; 0 in a clear save.
        rank: Number of the rank that this report describes; bytes, tensors and files are its own.
        world_size: Number of ranks that saved together.
        total_bytes: Bytes of the files that all ranks wrote, manifest included; None but on the
            rank that commits.
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
    zero_copy_bytes: int = 0
    sealed_bytes: int = 0
    rank: int = 0
    world_size: int = 1
    total_bytes: int | None = None

    @property
    def gb_per_second(self) -> float:
        """Bytes of all files written, divided by the time of the whole call."""
        return gb_per_second(self.bytes, self.seconds)

    def __str__(self) -> str:
        linked = f", and {in_bytes(self.linked_bytes)} linked" if self.linked_bytes else ""
        of_gpus = f", {in_bytes(self.device_bytes)} from GPUs" if self.device_bytes else ""
        uncopied = (
            f", {in_bytes(self.zero_copy_bytes)} without a copy" if self.zero_copy_bytes else ""
        )
        return aligned(
            ("saved", _titled(self.path, self.step)),
            ("rank", f"{self.rank} of {self.world_size}" if self.world_size > 1 else ""),
            (
                "wrote",
                f"{in_bytes(self.bytes)} in {in_seconds(self.seconds)},"
                f" {in_bytes(round(1e9 * self.gb_per_second))}/s"
                + (", sealed" if self.sealed_bytes else "")
                + uncopied,
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
        engine: ``"uring"``, ``"threads"``, or ``"sync"``: plain calls of the I/O threads, for files
            in memory.
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
        opened_bytes: Bytes of sealed chunks that were opened; 0 for a clear checkpoint.
        verified: Whether all returned bytes were checked against their digests.
        skipped: Newer steps that `CheckpointStore.load` skipped because they are not good, each
            with its reason.
        world_size: Number of ranks that saved the checkpoint together.
        previous: Ids of the checkpoints that its writer knew before it, newest first; see
            `CheckpointInfo.previous`.
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
    opened_bytes: int = 0
    skipped: tuple[tuple[int, str], ...] = ()
    world_size: int = 1
    previous: tuple[str, ...] = ()

    @property
    def gb_per_second(self) -> float:
        """Bytes returned, divided by the time of the whole call."""
        return gb_per_second(self.bytes, self.seconds)

    def __str__(self) -> str:
        ranks = f", saved by {self.world_size} ranks" if self.world_size > 1 else ""
        return aligned(
            ("loaded", _titled(self.path, self.step) + ranks),
            (
                "gave",
                f"{in_bytes(self.bytes)} in {in_seconds(self.seconds)},"
                f" {in_bytes(round(1e9 * self.gb_per_second))}/s,"
                f" {'verified' if self.verified else 'not verified'}"
                + (", opened" if self.opened_bytes else ""),
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


class SaveProgress(NamedTuple):
    """Progress of a save.

    Attributes:
        bytes_done: Bytes of this rank submitted to storage.
        bytes_total: Bytes of this rank to write.
    """

    bytes_done: int
    bytes_total: int


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
