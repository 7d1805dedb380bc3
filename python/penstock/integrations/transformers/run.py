"""The checkpoints of a run: which there are, which is the newest complete one, which may go.

A checkpoint of Penstock is complete where its manifest is there and valid. One that the Trainer has
written has no such mark: it is taken for complete where all files are there that it resumes from.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import NamedTuple

import penstock
from penstock.checkpoint.loading.foreign import is_checkpoint
from penstock.checkpoint.loading.opened import MANIFEST, is_of_rank
from penstock.errors import IncompleteCheckpointError, PenstockError, PenstockWarning
from penstock.integrations import directories

STATE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"
"""What the Trainer marks checkpoints with that it saves when a signal comes, and never looks at."""

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


class Found(NamedTuple):
    """A directory that is called as a checkpoint.

    Attributes:
        step: Its step.
        path: The directory.
        lacks: Why it is no complete checkpoint; None for one that is.
    """

    step: int
    path: str
    lacks: str | None


def find(directory: str) -> list[Found]:
    """All checkpoints of a run, complete or not, the newest step first."""
    found = reversed(directories.numbered(directory, _NAME))
    return [Found(step, path, lacking(path)) for step, path in found if os.path.isdir(path)]


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint of a run, by its step; None where none was ever complete.

    Each newer one that is passed over is a `PenstockWarning`. For runs that go on where there is
    something, and else begin: ``trainer.train(newest_checkpoint(output_dir))``.

    Args:
        directory: The run's, which the trainer has as ``output_dir``; it may not be there yet.

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
    """Why a directory holds no complete checkpoint; None where it does."""
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
    """What a checkpoint of the Trainer lacks that it would go on without, and say nothing."""
    names = os.listdir(path)
    wanted = {
        "the optimizer (optimizer.pt)": _OPTIMIZER,
        "the scheduler (scheduler.pt)": _SCHEDULER,
    }
    return [what for what, kind in wanted.items() if not any(map(kind.fullmatch, names))]


def rotate(directory: str, step: int, limit: int | None, kept: set[str]) -> None:
    """Deletes the oldest complete checkpoints of a run that are too many.

    Called once that of a step is durable. Later steps, of a run that was resumed from before them,
    are left alone.

    Args:
        directory: The run's.
        step: The step that was just saved, which stays.
        limit: How many to keep; None or 0 for all.
        kept: Others that stay, such as the best.
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
    """Whether a directory holds what a save that never finished has left, and no weights of others.

    Small files and the index of the weights come before the manifest.
    """
    names = os.listdir(path)
    return (
        MANIFEST not in names
        and any(is_of_rank(name) or name.startswith("beside.") for name in names)
        and not any(kind.fullmatch(name) for name in names for kind in (_WEIGHTS, _OPTIMIZER))
    )


def remove(path: str) -> None:
    """Deletes a checkpoint: its manifest first, so that what is left of it is never taken for one.

    Links are not followed. A checkpoint that cannot be deleted, or that somebody reads, stays, with
    a `PenstockWarning`.
    """
    try:
        directories.remove(path, foreign=True)
    except (OSError, PenstockError) as error:
        warnings.warn(f"{path} is not deleted: {error}", PenstockWarning, stacklevel=2)


def _has_adapters(path: str) -> bool:
    """Whether there are weights of adapters of PEFT, here or in directories of their own."""
    return any(
        os.path.isfile(os.path.join(path, name, f"adapter_model.{kind}"))
        for name in (".", *os.listdir(path))
        for kind in ("safetensors", "bin")
    )
