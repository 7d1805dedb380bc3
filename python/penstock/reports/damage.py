"""Results of explaining and of salvaging a damaged checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.file_names import FileNames
from penstock.common.report_lines import aligned, counted, first_of, in_bytes, in_seconds

if TYPE_CHECKING:
    from penstock.reports.checks import Problem
    from penstock.reports.contents import MissingInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFate:
    """The state of one tensor of a damaged checkpoint.

    Attributes:
        name: Its name as `penstock.inspect` shows it; if the manifest or a part is lost, the raw
            keys joined by dots.
        dtype: Its element type.
        shape: Its dimensions.
        bytes: Bytes of its data.
        hit: The damage; None for a tensor that is intact or cannot be checked. For a shared tensor,
            that of the first box that is damaged or missing.
        rank: The rank that owns it, if many saved together; None if ranks share it.
        is_vouched_for: Whether manifest and parts prove this result.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    hit: str | None
    rank: int | None = None
    is_vouched_for: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The remaining contents of a checkpoint.

    Attributes:
        path: The checkpoint's directory.
        step: The step it was saved as, if known.
        described_by: ``"whole"`` (manifest and part prove which tensors are intact), ``"part"``
            (the manifest is lost, so nothing proves the part) or ``"headers"`` (the part is lost:
            names and offsets come from the shards' headers, nothing can be checked, and the plain
            values are lost). Among many ranks, the worst of them.
        world_size: Number of ranks that saved it, as far as known.
        ranks_lost: The ranks whose part is lost, with its structure and plain values.
        tensors: All known tensors with their states: first shared tensors, each once, then each
            rank's own.
        missing_files: Files that are missing.
        problems: All problems, by file.
        earlier_step: For a step of a store, the newest earlier complete step that is not known to
            be damaged; None if there is none.
        earlier_is_verified: Whether that step was verified.
        bytes_checked: Bytes read and digested.
        seconds: Wall time of the whole call.
    """

    path: str
    step: int | None
    described_by: str
    world_size: int
    ranks_lost: tuple[int, ...]
    tensors: tuple[TensorFate, ...]
    missing_files: tuple[str, ...]
    problems: tuple[Problem, ...]
    earlier_step: int | None
    earlier_is_verified: bool
    bytes_checked: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def intact(self) -> tuple[TensorFate, ...]:
        """The tensors that are proven unchanged since the save."""
        return tuple(fate for fate in self.tensors if fate.hit is None and fate.is_vouched_for)

    @property
    def unverified(self) -> tuple[TensorFate, ...]:
        """The tensors that are present, but cannot be checked."""
        return tuple(fate for fate in self.tensors if fate.hit is None and not fate.is_vouched_for)

    @property
    def hit(self) -> tuple[TensorFate, ...]:
        """The tensors that are damaged or missing."""
        return tuple(tensor for tensor in self.tensors if tensor.hit is not None)

    def __str__(self) -> str:
        earlier = ""
        if self.earlier_step is not None:
            proof = "read back whole" if self.earlier_is_verified else "complete, not read back"
            earlier = f"{self.earlier_step}, {proof}"
        texts = [*self.missing_files, *map(str, self.problems), *(one.hit for one in self.hit)]
        names = FileNames(self.path, texts)
        counts = [("intact", self.intact), ("unverified", self.unverified), ("hit", self.hit)]
        return aligned(
            ("explained", self.path),
            ("result", "nothing is wrong" if self.ok else counted(len(self.problems), "problem")),
            *(
                (what, f"{counted(len(some), 'tensor')}, {in_bytes(sum(t.bytes for t in some))}")
                for what, some in counts
                if some
            ),
            ("lost parts", ", ".join(f"of rank {rank}" for rank in self.ranks_lost)),
            *first_of([("missing", names.short(name)) for name in self.missing_files]),
            *first_of([("problem", names.short(str(one))) for one in self.problems]),
            *first_of([("hit", names.short(f"{one.name}: {one.hit}")) for one in self.hit]),
            ("step before", earlier),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvageReport:
    """The result of salvaging a damaged checkpoint.

    Attributes:
        path: The new checkpoint.
        source: The damaged checkpoint.
        step: The step it was saved as, if known.
        checkpoint_id: Identity of the new checkpoint.
        source_id: Identity of the damaged checkpoint, if known.
        tensors: Number of salvaged tensors; a shared tensor counts once.
        tensor_bytes: Bytes of their data.
        bytes: Bytes of all files written.
        missing: Tensors and further names that were not salvaged.
        files_lost: Small files that were not salvaged, by name, with the reason.
        unverified: Whether nothing could be checked.
        values_lost: Whether structure and plain values are lost, for any of the ranks.
        ranks_lost: The ranks whose structure and plain values are lost.
        seconds: Wall time of the whole call.
    """

    path: str
    source: str
    step: int | None
    checkpoint_id: str
    source_id: str | None
    tensors: int
    tensor_bytes: int
    bytes: int
    missing: tuple[MissingInfo, ...]
    files_lost: dict[str, str]
    unverified: bool
    values_lost: bool
    ranks_lost: tuple[int, ...]
    seconds: float

    @property
    def is_partial(self) -> bool:
        """Whether the new checkpoint is marked partial; False if nothing is missing."""
        return bool(self.missing) or self.unverified

    def __str__(self) -> str:
        kind = "partial" if self.is_partial else "complete"
        lost = ", ".join(f"of rank {rank}" for rank in self.ranks_lost) or "all"
        names = FileNames(self.source, (one.reason for one in self.missing))
        missing = [("missing", names.short(f"{one.name}: {one.reason}")) for one in self.missing]
        lost_files = [("file lost", f"{name}: {why}") for name, why in self.files_lost.items()]
        return aligned(
            ("salvaged", self.source),
            ("into", f"{self.path}, {kind}"),
            (
                "tensors",
                f"{self.tensors:,}, {in_bytes(self.tensor_bytes)}, in {in_seconds(self.seconds)}",
            ),
            ("unverified", "nothing proves what they hold" if self.unverified else ""),
            ("values lost", lost if self.values_lost else ""),
            *first_of(missing),
            *first_of(lost_files),
        )
