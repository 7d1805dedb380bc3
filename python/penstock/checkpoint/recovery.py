"""Damaged checkpoints: `explain` reports their losses, `salvage` saves the remaining leaves."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.inspection import missing_info, missing_of
from penstock.checkpoint.loading.leaf_names import LeafNames, names_of, problems_of
from penstock.checkpoint.loading.path_kind import describing_contents, is_sealed
from penstock.common.paths import absolute
from penstock.common.progress import Progress, shown
from penstock.errors import KmsError, PenstockError, SealedError, WrongKeyError
from penstock.reports import Explanation, MissingInfo, SalvageReport, TensorFate
from penstock.sealing.sealing import check_sealing
from penstock.sealing.unsealing import Unsealing
from penstock.tensors.arguments import decode_path, to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing


def explain(
    path: str | os.PathLike[str] | bytes,
    *,
    identities: Identities | Key | Iterable[Key] | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> Explanation:
    """Reads all readable bytes of a damaged checkpoint, and reports which tensors are intact.

    Args:
        path: The checkpoint's directory.
        identities: Keys that open a sealed checkpoint; see `penstock.load`. Its bytes are compared
            with their digests and not opened, so this finds no tampering with tensors.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        CorruptCheckpointError: Too much is lost to know which tensors existed; of a sealed
            checkpoint the manifest, which has its keys.
        SealedError: The checkpoint is sealed, and there are no identities.
        NotSealedError: ``identities`` are given and the checkpoint is clear.
        TamperedError: Somebody without the key has changed the manifest.
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
    unsealing = Unsealing.of(identities)
    with shown(progress, "explaining") as update, describing_contents(where):
        fields = _native.survey(
            where,
            unsealing.native,
            demanded=unsealing.is_demanded,
            options=to_native(options),
            progress=update,
        )
    ranks = fields["ranks"]
    names = names_of(where, [(one.name, one.rank) for one in fields["tensors"]], unsealing)
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
        problems=problems_of(where, fields["problems"], unsealing),
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
    sealing: Sealing | None = None,
    unseal: bool = False,
    identities: Identities | Key | Iterable[Key] | None = None,
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

    A sealed checkpoint is salvaged by its identities: chunks that do not open count as damaged,
    with all tensors in them. Without its manifest, which has its keys, nothing opens. The result is
    sealed by ``sealing``, or clear if ``unseal`` asks for it.

    Args:
        path: The damaged checkpoint's directory.
        out: The new checkpoint's directory; it must not contain a checkpoint yet.
        unverified: If manifest or parts are lost, salvage the tensors that cannot be checked.
            Without its part, a rank's state becomes a flat dictionary of the tensors in the shards'
            headers: plain values, ties and types without a safetensors name are lost, and tensors
            of types that only a newer Penstock knows are listed as missing. Among many ranks, only
            shards that mark boxes of larger tensors are used.
        sealing: For whom the new checkpoint is sealed; see `penstock.save`.
        unseal: Whether the new checkpoint of a sealed one may be clear.
        identities: Keys that open a sealed checkpoint; see `penstock.load`. A clear one is then
            refused.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        CorruptCheckpointError: The remaining tensors cannot be checked, and ``unverified`` is
            False; or the manifest of a sealed checkpoint is lost.
        SealedError: The checkpoint is sealed, and there are no ``identities``, or neither
            ``sealing`` nor ``unseal``.
        NotSealedError: ``identities`` are given and the checkpoint is clear.
        TamperedError: Somebody without the key has changed the manifest.
        CannotSealError: With ``sealing``, small files beside the shards would stay clear.
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
    check_sealing(sealing)
    unsealing = Unsealing.of(identities)
    asks = unseal and identities is not None
    if sealing is None and not asks and is_sealed(source):
        raise SealedError(
            f"{source} is sealed: give sealing= and identities=, so that what is salvaged is "
            "sealed again, or unseal=True and identities= for a clear checkpoint",
            path=source,
        )
    with shown(progress, "salvaging") as update, describing_contents(source):
        fields = _native.salvage(
            source,
            where,
            unsealing.native,
            demanded=unsealing.is_demanded,
            sealing=None if sealing is None else sealing.wrap_new(),
            unverified=bool(unverified),
            options=to_native(options),
            progress=update,
        )
    fields |= {
        "missing": _missing_in(where, fields["missing"], unsealing),
        "values_lost": bool(fields["ranks_lost"]),
        "ranks_lost": tuple(fields["ranks_lost"]),
        "files_lost": dict(fields["files_lost"]),
    }
    return SalvageReport(**{**fields, "path": where, "source": source})


def _missing_in(
    path: str, rows: list[_native.MissingTensor], unsealing: Unsealing
) -> tuple[MissingInfo, ...]:
    """Describes what a new checkpoint lacks, by the names of leaves if it can be opened."""
    try:
        made = unsealing._replace(is_demanded=False).open(path)
    except (SealedError, WrongKeyError, KmsError):
        # It is sealed for others than the old one.
        return tuple(missing_info(row, row.name) for row in rows)
    return missing_of(made, LeafNames.of(made))


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
