"""A damaged checkpoint: `explain` tells what is left of it, `salvage` saves that."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.inspection import MissingInfo, missing_of
from penstock.checkpoint.loading.foreign import telling
from penstock.checkpoint.loading.leaf_names import LeafNames, names_of, problems_of
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
    """What became of a tensor of a damaged checkpoint.

    Attributes:
        name: Its name as `penstock.inspect` shows it; where the manifest or a part is lost, the
            keys as they are, joined by dots.
        dtype: Its element type.
        shape: Its dimensions.
        bytes: Bytes of its data.
        hit: What is wrong with it; None for one that is intact, or that cannot be checked. Of a
            tensor that ranks share, the first of its boxes that is hit or gone.
        rank: The rank whose own it is, where many saved together; None for what they share.
        is_vouched_for: Whether manifest and parts prove what is said of it.
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
    """What is left of a checkpoint.

    Attributes:
        path: Its directory.
        step: The step it was saved as, where that is known.
        described_by: ``"whole"`` (manifest and part vouch for what is intact), ``"part"`` (the
            manifest is lost, so nothing vouches for the part) or ``"headers"`` (the part is lost:
            names and places come from the shards' headers, nothing can be checked, and the plain
            values are lost). Of many ranks, what is true of the one of which least is left.
        world_size: How many ranks saved it, as far as anything tells.
        ranks_lost: The ranks whose part is lost, with structure and plain values.
        tensors: Every tensor that anything tells of, with what became of it: first those that ranks
            share, each once, then what each has for itself.
        missing_files: Files that are not there.
        problems: Everything that is wrong, by file.
        earlier_step: Of a step of a store, the newest complete one before it that is not known to
            be damaged; None if there is none.
        earlier_is_verified: Whether that one was read back whole.
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
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def intact(self) -> tuple[TensorFate, ...]:
        """The tensors that are proven to be what was saved."""
        return tuple(fate for fate in self.tensors if fate.hit is None and fate.is_vouched_for)

    @property
    def unverified(self) -> tuple[TensorFate, ...]:
        """The tensors that are there, with nothing left that vouches for them."""
        return tuple(fate for fate in self.tensors if fate.hit is None and not fate.is_vouched_for)

    @property
    def hit(self) -> tuple[TensorFate, ...]:
        """The tensors that are damaged or gone."""
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
    """What a salvage got out of a damaged checkpoint.

    Attributes:
        path: The new checkpoint.
        source: The damaged one.
        step: The step it was saved as, where that is known.
        checkpoint_id: Identity of the new checkpoint.
        source_id: Identity of the damaged one, where that is known.
        tensors: Tensors that were taken over; one that ranks share counts once.
        tensor_bytes: Bytes of their data.
        bytes: Bytes of all files written.
        missing: Tensors and further names that were not taken over.
        files_lost: Small files that do not go with the new checkpoint, by name, with the reason.
        unverified: Whether nothing could be checked.
        values_lost: Whether structure and plain values are lost, of many ranks those of any.
        ranks_lost: Which of many ranks that is true of.
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
        """Whether the new checkpoint is marked partial; it is not if nothing is missing."""
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
    """Reads everything of a damaged checkpoint that can be read, and says which tensors are intact.

    Args:
        path: The checkpoint's directory.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        CorruptCheckpointError: Nothing tells any more what tensors there were.
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
    with shown(progress, "explaining") as update, telling(where):
        fields = _native.survey(where, options=to_native(options), progress=update)
    ranks = fields["ranks"]
    names = names_of(where, [(row[0], row[5]) for row in fields["tensors"]])
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
                dtype=dtype,
                shape=shape,
                bytes=nbytes,
                hit=hit,
                rank=rank,
                is_vouched_for=is_vouched_for,
            )
            for shown, (_, dtype, shape, nbytes, hit, rank, is_vouched_for) in zip(
                names, fields["tensors"], strict=True
            )
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
    """Saves exactly the intact tensors of a damaged checkpoint, and its plain values, as a new one.

    The new checkpoint is marked partial and lists what is missing: `penstock.load` of it names
    that in a `PartialCheckpointError`, or leaves it out with ``allow_partial=True``. If nothing is
    missing after all, it is a complete checkpoint. The damaged one is not changed.

    What many ranks saved is saved as they had it: with as many parts, each with its tree, and loads
    into every layout as before. A tensor that ranks share is taken over whole or not at all. Where
    the part of a rank is lost, so is all that it had for itself, while what others have stays
    theirs. One process does it all; what it takes over of one rank is in memory at a time.

    Tensors of a group stay in shards of their own, with the names that a model has for them, and
    small files stay beside them. There is an index only where all of its group was taken over, so
    that nobody takes what is left of a model for the model. Where a small file is damaged, its copy
    is taken if that is what was saved. Where the manifest is lost, so are the small files, and
    where the part is, which group a tensor is of.

    Args:
        path: The damaged checkpoint's directory.
        out: The new one's; there must be none yet.
        unverified: Where manifest or parts are lost, take over what nothing vouches for. Without
            its part that is, of a rank, a flat dictionary of what the shards' headers list: plain
            values, ties and types that safetensors has no name for are lost, and tensors of a type
            that only a newer Penstock knows are listed as missing. Of many ranks only shards count
            that say which of their tensors are boxes of larger ones.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        CorruptCheckpointError: Nothing vouches for what is left, and ``unverified`` is False.
        FormatVersionError: A newer Penstock wrote it.
        StorageError: ``out`` is neither new nor empty, or lies in ``path``; or the operating system
            failed an operation.

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
    with shown(progress, "salvaging") as update, telling(source):
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
    """Of a step in a store, the newest complete one before it, and whether it was read back."""
    directory, name = os.path.split(absolute(path))
    own = _native.Store.step_of(name)
    if own is None:
        return None, False
    store = _native.Store(directory)
    marks = {}
    # Not to be had, they are no reason to tell nothing.
    with contextlib.suppress(PenstockError):
        marks = {step: is_damaged for step, _, _, is_damaged in store.marks()}
    newest = store.newest_complete(below=own)
    return newest, newest in marks
