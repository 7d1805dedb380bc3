"""The checkpoints of a run: lists them, finds the newest complete one, deletes old ones.

A Penstock checkpoint is complete if it has a valid manifest. One by the Trainer has no such mark:
it
counts as complete if it has all files that the Trainer resumes from.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, NamedTuple

import penstock
from penstock.errors import IncompleteCheckpointError, PenstockError, PenstockWarning
from penstock.integrations import directories
from penstock.plugin import AGAINST_KEYS, MANIFEST, SealingKeys, is_checkpoint, is_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.sealing import Identities, Key

STATE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"
"""The Trainer's mark of unfinished checkpoints saved on a signal; the Trainer never reads it."""

_NAME = re.compile(r"checkpoint-([0-9]+)")
"""Files of a save, finished or not."""
_WEIGHTS = re.compile(
    r"(model|pytorch_model)\.(safetensors|bin)|pytorch_model_fsdp.*|global_step[0-9]+"
)
_INDEX = re.compile(r"(model|pytorch_model)\.(safetensors|bin)\.index\.json")
_OPTIMIZER = re.compile(
    r"optimizer\.(pt|bin)|optimizer_[0-9]+|global_step[0-9]+|rank.*-optimizer\.pt"
)
_ADAPTER = re.compile(r"(^|/)adapter_model\.(safetensors|bin)$")
_SCHEDULER = re.compile(r"scheduler\.pt|global_step[0-9]+")


class CheckpointDirectory(NamedTuple):
    """A directory named like a checkpoint.

    Attributes:
        step: Its step.
        path: The directory.
        lacks: Why it is no complete checkpoint; None if it is one.
    """

    step: int
    path: str
    lacks: str | None


def find(directory: str) -> list[CheckpointDirectory]:
    """All checkpoints of a run, complete or not, the newest step first."""
    return list(_found(directory, None))


def _found(directory: str, keys: SealingKeys | None) -> Iterator[CheckpointDirectory]:
    for step, path in reversed(directories.numbered(directory, _NAME)):
        if os.path.isdir(path):
            yield CheckpointDirectory(step, path, lacking(path, keys))


def newest_checkpoint(
    directory: str | os.PathLike[str],
    *,
    identities: Identities | Key | Iterable[Key] | None = None,
) -> str | None:
    """The newest complete checkpoint of a run, by step; None if none was ever complete.

    Each newer one that is skipped gives a `PenstockWarning`. For runs that resume if they can:
    ``trainer.train(newest_checkpoint(output_dir))``.

    Args:
        directory: The run's directory, the trainer's ``output_dir``; it may not exist yet.
        identities: Keys that open sealed checkpoints; see `penstock.load`. A clear one is then
            refused.

    Raises:
        IncompleteCheckpointError: All that were complete are damaged.
        TamperedError: Somebody without the key has changed a sealed checkpoint: no older one is
            taken.
        NotSealedError: ``identities`` are given and the newest checkpoint is clear.

    Example:
        >>> import tempfile
        >>> from penstock.integrations.transformers import newest_checkpoint
        >>> newest_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    return newest_by(os.fspath(directory), SealingKeys.of(None, identities), stacklevel=3)


def newest_by(where: str, keys: SealingKeys, *, stacklevel: int) -> str | None:
    """The newest complete checkpoint of a run; see `newest_checkpoint`."""
    passed_over = []
    for found in _found(where, keys):
        if found.lacks is None:
            if not is_checkpoint(found.path):
                keys.refuse_clear(found.path, "a checkpoint of the Trainer's own")
            return found.path
        told = f"passed over {found.path}: {found.lacks}"
        warnings.warn(told, PenstockWarning, stacklevel=stacklevel)
        passed_over.append(found)
    for found in passed_over:
        if is_checkpoint(found.path):
            raise IncompleteCheckpointError(
                f"{where} has no good checkpoint left: {found.path} was complete, and "
                f"{found.lacks}; use an empty directory to begin anew",
                path=where,
            )
    return None


def lacking(path: str, keys: SealingKeys | None = None) -> str | None:
    """Why a directory holds no complete checkpoint; None if it does.

    Args:
        path: The directory.
        keys: The keys that open a sealed checkpoint. None to look at it from outside: its manifest
            then says that it is complete.

    Raises:
        TamperedError: With ``keys``, somebody without the key has changed it.
        PenstockError: With ``keys``, another of the errors `AGAINST_KEYS`.
    """
    if is_checkpoint(path):
        try:
            info = penstock.inspect(path, identities=None if keys is None else keys.identities)
        except AGAINST_KEYS as error:
            if keys is not None:
                raise
            return str(error)
        except PenstockError as error:
            return str(error)
        if info.is_closed:
            return None
        note = info.metadata.get("trainer", {})
        saved, sealed = note.get("parts", ["model"]), note.get("files", [])
        has_adapters = any(map(_ADAPTER.search, sealed)) or _has_adapters(path)
        if "model" not in saved and not has_adapters:
            return "it lacks the weights of its adapters"
        is_there = STATE in sealed or os.path.isfile(os.path.join(path, STATE))
        return None if is_there else f"it lacks {STATE}"
    if not os.path.isdir(path):
        return "there is nothing"
    names = set(os.listdir(path))
    if SENTINEL in names:
        return f"its save was interrupted: {SENTINEL} is still there"
    if is_leftover(path):
        return "its save never finished: it has no manifest.json"
    has_weights = any(
        kind.fullmatch(name) for name in names for kind in (_WEIGHTS, _INDEX)
    ) or _has_adapters(path)
    missing = [] if has_weights else ["weights"]
    missing += [] if STATE in names else [STATE]
    return f"its save never finished: it lacks {' and '.join(missing)}" if missing else None


def lacking_to_resume(path: str) -> list[str]:
    """Files missing from a Trainer's checkpoint, without which it would silently begin anew."""
    names = os.listdir(path)
    wanted = {
        "the optimizer (optimizer.pt)": _OPTIMIZER,
        "the scheduler (scheduler.pt)": _SCHEDULER,
    }
    return [what for what, kind in wanted.items() if not any(map(kind.fullmatch, names))]


def rotate(directory: str, step: int, limit: int | None, kept: set[str]) -> None:
    """Deletes the oldest complete checkpoints of a run beyond a limit.

    Called once the checkpoint of a step is durable. Checkpoints of later steps, left by a run that
    was resumed from an earlier one, stay.

    Args:
        directory: The run's directory.
        step: The step that was just saved, which stays.
        limit: The number to keep; None or 0 for all.
        kept: Other checkpoints that stay, such as the best.
    """
    if not limit or limit < 0:
        return
    seen = [found for found in find(directory) if found.step <= step]
    complete = [found for found in seen if found.lacks is None]
    paths = {os.path.realpath(path) for path in kept}
    protected = [one for one in complete if one.step == step or os.path.realpath(one.path) in paths]
    excess = len(complete) - max(limit, len(protected))
    for found in reversed([one for one in complete if one not in protected]):
        if excess <= 0:
            break
        remove(found.path)
        excess -= 1
    for found in seen:
        if found.lacks is not None and found.step < step and is_leftover(found.path):
            remove(found.path)


def is_leftover(path: str) -> bool:
    """Whether a directory is the rest of an unfinished Penstock save, without others' weights.

    Small files and the index of the weights are written before the manifest.
    """
    names = os.listdir(path)
    return (
        MANIFEST not in names
        and any(is_of_rank(name) or name.startswith("beside.") for name in names)
        and not any(kind.fullmatch(name) for name in names for kind in (_WEIGHTS, _OPTIMIZER))
    )


def remove(path: str) -> None:
    """Deletes a checkpoint: its manifest first, so that the rest is never taken for one.

    Does not follow links. A checkpoint that cannot be deleted, or that is being read, stays, with a
    `PenstockWarning`.
    """
    try:
        directories.remove(path, foreign=True)
    except (OSError, PenstockError) as error:
        warnings.warn(f"{path} is not deleted: {error}", PenstockWarning, stacklevel=2)


def _has_adapters(path: str) -> bool:
    """Whether there are weights of PEFT adapters, here or in subdirectories."""
    return any(
        os.path.isfile(os.path.join(path, name, f"adapter_model.{kind}"))
        for name in (".", *os.listdir(path))
        for kind in ("safetensors", "bin")
    )
