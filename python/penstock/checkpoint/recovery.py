"""Damaged checkpoints: `explain` reports their losses, `salvage` saves the remaining leaves."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.inspection import MissingInfo, missing_of
from penstock.checkpoint.loading.leaf_names import LeafNames, names_of, problems_of
from penstock.checkpoint.loading.path_kind import describing_contents
from penstock.common.file_names import FileNames
from penstock.common.paths import absolute
from penstock.common.progress import Progress, shown
from penstock.common.report_lines import aligned, counted, first_of, in_bytes, in_seconds
from penstock.errors import PenstockError
from penstock.io.arguments import decode_path, to_native
from penstock.reports import Problem

if TYPE_CHECKING:
    from penstock.options import Options
    from penstock.reports import Problem


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


def explain(
    path: str | os.PathLike[str] | bytes,
    *,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> Explanation:
    """Reads all readable bytes of a damaged checkpoint, and reports which tensors are intact.

    Args:
        path: The checkpoint's directory.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        CorruptCheckpointError: Too much is lost to know which tensors existed.
        FormatVersionError: A newer Penstock wrote it.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"a": np.zeros(3), "b": np.ones(3)})
        >>> [tensor.name for tensor in penstock.explain(path).intact]
        ['a', 'b']
    """
    where = decode_path(path)
    with shown(progress, "explaining") as update, describing_contents(where):
        fields = _native.survey(where, options=to_native(options), progress=update)
    ranks = fields["ranks"]
    names = names_of(where, [(one.name, one.rank) for one in fields["tensors"]])
    earlier_step, earlier_is_verified = _earlier(where)
    return Explanation(
        path=where,
        step=fields["step"],
        described_by=fields["described_by"],
        world_size=len(ranks),
        ranks_lost=tuple(rank for rank, source in enumerate(ranks) if source == "headers"),
        tensors=tuple(
            TensorFate(
                name=shown,
                dtype=one.dtype,
                shape=one.shape,
                bytes=one.bytes,
                hit=one.hit,
                rank=one.rank,
                is_vouched_for=one.is_vouched_for,
            )
            for shown, one in zip(names, fields["tensors"], strict=True)
        ),
        missing_files=tuple(fields["missing_files"]),
        problems=problems_of(where, fields["problems"]),
        earlier_step=earlier_step,
        earlier_is_verified=earlier_is_verified,
        bytes_checked=fields["bytes_checked"],
        seconds=fields["seconds"],
    )


def salvage(
    path: str | os.PathLike[str] | bytes,
    out: str | os.PathLike[str] | bytes,
    *,
    unverified: bool = False,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> SalvageReport:
    """Saves the intact tensors and plain values of a damaged checkpoint as a new one.

    The new checkpoint is marked partial and lists the missing leaves: `penstock.load` names them in
    a `PartialCheckpointError`, or leaves them out with ``allow_partial=True``. If nothing is
    missing, the new checkpoint is complete. The damaged one is not changed.

    A checkpoint of many ranks keeps their structure: as many parts, each with its tree, so it can
    be loaded into any layout as before. A tensor that ranks share is salvaged whole or not at all.
    If the part of a rank is lost, so are all its own values, but not those of other ranks. One
    process does the work; the salvaged tensors of one rank are in memory at a time.

    Tensors of a group stay in separate shards, under the model's names for them, and small files
    stay beside them. A group gets an index only if all of its tensors were salvaged, so that no
    reader takes an incomplete model for the model. A damaged small file is replaced by its copy if
    the copy is intact. If the manifest is lost, so are the small files; if a part is lost, so are
    the groups of its tensors.

    Args:
        path: The damaged checkpoint's directory.
        out: The new checkpoint's directory; it must not contain a checkpoint yet.
        unverified: If manifest or parts are lost, salvage the tensors that cannot be checked.
            Without its part, a rank's state becomes a flat dictionary of the tensors in the shards'
            headers: plain values, ties and types without a safetensors name are lost, and tensors
            of types that only a newer Penstock knows are listed as missing. Among many ranks, only
            shards that mark boxes of larger tensors are used.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        CorruptCheckpointError: The remaining tensors cannot be checked, and ``unverified`` is
            False.
        FormatVersionError: A newer Penstock wrote it.
        StorageError: ``out`` is neither new nor empty, or is inside ``path``; or the operating
            system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> root = tempfile.mkdtemp()
        >>> report = penstock.save(root + "/bad", {"a": np.zeros(3), "b": np.ones(3), "step": 7})
        >>> info = penstock.inspect(root + "/bad").tensors[0]
        >>> with open(f"{root}/bad/{info.file}", "r+b") as file:
        ...     position = file.seek(info.begin)
        ...     written = file.write(b"x")
        >>> [missing.name for missing in penstock.salvage(root + "/bad", root + "/good").missing]
        ['a']
        >>> penstock.load(root + "/good", allow_partial=True)
        {'b': array([1., 1., 1.]), 'step': 7}
    """
    source, where = decode_path(path), decode_path(out)
    with shown(progress, "salvaging") as update, describing_contents(source):
        fields = _native.salvage(
            source,
            where,
            unverified=bool(unverified),
            options=to_native(options),
            progress=update,
        )
    made = _native.open(where)
    fields |= {
        "missing": missing_of(made, LeafNames.of(made)),
        "values_lost": bool(fields["ranks_lost"]),
        "ranks_lost": tuple(fields["ranks_lost"]),
        "files_lost": dict(fields["files_lost"]),
    }
    return SalvageReport(**{**fields, "path": where, "source": source})


def _earlier(path: str) -> tuple[int | None, bool]:
    """Returns the newest complete step before a given one, and whether it was verified."""
    directory, name = os.path.split(absolute(path))
    own = _native.Store.step_of(name)
    if own is None:
        return None, False
    store = _native.Store(directory)
    marks = {}
    # The report is made even if the marks are unreadable.
    with contextlib.suppress(PenstockError):
        marks = {step: is_damaged for step, _, _, is_damaged in store.marks()}
    newest = store.newest_complete(below=own)
    return newest, newest in marks
