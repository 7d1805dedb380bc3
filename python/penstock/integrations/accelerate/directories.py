"""Accelerate's checkpoint directories: finds the newest, deletes old ones."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PenstockError,
    PenstockWarning,
    ProtectedCheckpointError,
    StorageError,
)
from penstock.integrations.directories import numbered, remove, renamed
from penstock.plugin import AGAINST_KEYS, MANIFEST, durable, is_checkpoint, is_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.plugin import SealingKeys

_NAME = re.compile(r"checkpoint_([0-9]+)")
_REMOVING = ".removing"


def _is_ours(name: str) -> bool:
    return name == MANIFEST or is_of_rank(name)


def number_of(path: str) -> int | None:
    """The iteration in a directory's name; None for other names."""
    found = _NAME.fullmatch(os.path.basename(os.path.normpath(path)))
    return None if found is None else int(found[1])


def missing_of_theirs(path: str, accelerator: Any) -> list[str]:
    """Files that Accelerate would have written and that are missing.

    Accelerate writes them one after the other, and does not mark the end.
    """
    found = set(os.listdir(path)) if os.path.isdir(path) else set()
    ranks = range(accelerator.num_processes)
    loaders = enumerate(accelerator._dataloaders)
    wanted = [f"random_states_{rank}.pkl" for rank in ranks]
    wanted += [f"custom_checkpoint_{i}.pkl" for i in range(len(accelerator._custom_objects))]
    wanted += [f"scheduler{_ending(i)}.bin" for i in range(len(accelerator._schedulers))]
    wanted += [
        f"dl_state_dict{_ending(index)}.bin"
        for index, one in loaders
        if getattr(one, "use_stateful_dataloader", False)
    ]
    if accelerator.scaler is not None:
        wanted.append("scaler.pt")
    if not any(name.startswith("optimizer_") and "." not in name for name in found):
        wanted += [f"optimizer{_ending(i)}.bin" for i in range(len(accelerator._optimizers))]
    return [name for name in wanted if name not in found]


def is_theirs(path: str) -> bool:
    """Whether Accelerate itself has written a checkpoint there."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return any(name.startswith("random_states_") for name in names) or any(
        name.startswith(("pytorch_model", "optimizer", "scheduler")) or name == "model.safetensors"
        for name in names
    )


def newest(root: str, accelerator: Any, keys: SealingKeys) -> str:
    """The complete checkpoint of the highest number; warns of each newer one that is skipped.

    One that was tampered with, that no key opens, or that is clear where sealed ones are demanded,
    is an error: nobody shall choose an older one for the run.
    """
    damaged: PenstockError | None = None
    for _, path in reversed(numbered(root, _NAME)):
        try:
            check(path, accelerator, keys)
        except AGAINST_KEYS:
            raise
        except (CheckpointNotFoundError, IncompleteCheckpointError) as error:
            reason = str(error)
        except PenstockError as error:
            damaged = damaged or error
            reason = str(error)
        else:
            return path
        message = f"{path} is passed over: {reason}"
        warnings.warn(message, PenstockWarning, stacklevel=4)
    # A run must not silently start anew because its checkpoints are damaged.
    raise damaged or CheckpointNotFoundError(
        f"{root} has no complete checkpoint: give load_state the directory of one, or begin anew",
        path=root,
    )


def check(path: str, accelerator: Any, keys: SealingKeys) -> None:
    """Raises unless a checkpoint is complete, as far as that shows without reading all of it."""
    if is_checkpoint(path) or not is_theirs(path):
        penstock.inspect(path, identities=keys.identities)
        return
    keys.refuse_clear(path, "a checkpoint of Accelerate's own")
    missing = missing_of_theirs(path, accelerator)
    if missing:
        raise IncompleteCheckpointError(
            f"{path}: accelerate did not finish it, or saved something else: it lacks "
            f"{', '.join(missing)}; load another one",
            path=path,
        )


def retire(path: str, limit: int, accelerator: Any) -> None:
    """Deletes all but the ``limit`` newest complete checkpoints up to this one.

    Checkpoints of higher numbers stay, as somebody has kept them. Failures to delete are warnings.
    """
    root, number = os.path.dirname(path), number_of(path)
    try:
        for name in os.listdir(root):
            if name.startswith(".") and name.endswith(_REMOVING):
                # Left by a process that was killed while it deleted it.
                with contextlib.suppress(OSError, PenstockError):
                    remove(os.path.join(root, name), foreign=True)
        older = [one for one in numbered(root, _NAME) if number is not None and one[0] <= number]
        kept = [one for one in older if _is_complete(one[1], accelerator)][-limit:]
        for _, old in [one for one in older if kept and one[0] < kept[0][0]]:
            with _warned(path):
                _delete(old)
    except OSError as error:
        _warn(path, error)


@contextlib.contextmanager
def _warned(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, PenstockError) as error:
        _warn(path, error)


def _warn(path: str, error: Exception) -> None:
    message = f"{path} is saved, but older ones could not be deleted: {error}"
    warnings.warn(message, PenstockWarning, stacklevel=3)


def _delete(path: str) -> None:
    if os.path.islink(path) or is_checkpoint(path) or not is_theirs(path):
        remove(path, foreign=True)
        return
    # Renamed first, so that others find all of it or nothing.
    above, name = os.path.split(path)
    gone = os.path.join(above, f".{name}{_REMOVING}")
    if not renamed(path, gone):
        # Without these files nobody takes it for complete.
        for random_state in Path(path).glob("random_states_*"):
            random_state.unlink()
        remove(path, foreign=True)
        return
    try:
        remove(gone, foreign=True)
    except (ProtectedCheckpointError, StorageError) as error:
        if not isinstance(error, StorageError) or error.errno == errno.EBUSY:
            # A protected checkpoint inside forbids it, so nothing was removed.
            os.rename(gone, path)
        raise


def sync_further(path: str) -> None:
    """Makes files durable that the user's hooks have written into a directory."""
    for file in _further(path):
        durable.sync(file)


def _is_complete(path: str, accelerator: Any) -> bool:
    return is_checkpoint(path) or (is_theirs(path) and not missing_of_theirs(path, accelerator))


def _further(path: str) -> Iterator[str]:
    for directory, _, names in os.walk(path):
        yield directory
        yield from (os.path.join(directory, one) for one in names if not _is_ours(one))


def _ending(index: int) -> str:
    return f"_{index}" if index else ""
