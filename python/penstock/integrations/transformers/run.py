"""The checkpoints of a run: lists them, finds the newest complete one, deletes old ones.

A Penstock checkpoint is complete if it has a valid manifest. One by the Trainer has no such mark:
it
counts as complete if it has all files that the Trainer resumes from.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import NamedTuple

import penstock
from penstock.errors import IncompleteCheckpointError, PenstockError, PenstockWarning
from penstock.integrations import directories
from penstock.plugin import MANIFEST, is_checkpoint, is_of_rank

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
    found = reversed(directories.numbered(directory, _NAME))
    return [
        CheckpointDirectory(step, path, lacking(path))
        for step, path in found
        if os.path.isdir(path)
    ]


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint of a run, by step; None if none was ever complete.

    Each newer one that is skipped gives a `PenstockWarning`. For runs that resume if they can:
    ``trainer.train(newest_checkpoint(output_dir))``.

    Args:
        directory: The run's directory, the trainer's ``output_dir``; it may not exist yet.

    Raises:
        IncompleteCheckpointError: All that were complete are damaged.

    Example:
        >>> import tempfile
        >>> from penstock.integrations.transformers import newest_checkpoint
        >>> newest_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    where = os.fspath(directory)
    passed_over = []
    for found in find(where):
        if found.lacks is None:
            return found.path
        warnings.warn(f"passed over {found.path}: {found.lacks}", PenstockWarning, stacklevel=2)
        passed_over.append(found)
    for found in passed_over:
        if is_checkpoint(found.path):
            raise IncompleteCheckpointError(
                f"{where} has no good checkpoint left: {found.path} was complete, and "
                f"{found.lacks}; use an empty directory to begin anew",
                path=where,
            )
    return None


def lacking(path: str) -> str | None:
    """Why a directory holds no complete checkpoint; None if it does."""
    if is_checkpoint(path):
        try:
            saved = penstock.inspect(path).metadata.get("trainer", {}).get("parts", ["model"])
        except PenstockError as error:
            return str(error)
        if "model" not in saved and not _has_adapters(path):
            return "it lacks the weights of its adapters"
        return None if os.path.isfile(os.path.join(path, STATE)) else f"it lacks {STATE}"
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
