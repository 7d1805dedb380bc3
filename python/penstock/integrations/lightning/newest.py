"""Chooses the checkpoint to resume from: the complete one of the highest step."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import penstock
from penstock.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    NotSealedError,
    PenstockError,
    PenstockWarning,
)
from penstock.integrations.directories import numbered
from penstock.integrations.lightning.directories import SUFFIX
from penstock.integrations.lightning.loading import check_whole
from penstock.plugin import AGAINST_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.plugin import SealingKeys

_UNKNOWN = -1
"""The step of a file that would have to be unpickled to read it."""

_HPC = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete checkpoint from which a run could resume.

    Attributes:
        path: The directory, the file, or a link to either.
        step: The training step.
        is_last: Whether its name begins with ``last``.
    """

    path: str
    step: int
    is_last: bool


def newest(paths: Iterable[str], keys: SealingKeys) -> list[str]:
    """Complete checkpoints from which a run can resume, those of the highest step first.

    Unfinished checkpoints and those with weights only are left out; damaged ones are, too, with a
    `PenstockWarning`. A checkpoint that was tampered with, or that no key opens, is an error: nobody
    shall choose an older one for the run. So is a newest one that is clear where sealed ones are
    demanded.

    Args:
        paths: Paths of possible checkpoints.
        keys: The keys that open sealed checkpoints.
    """
    found: list[Candidate] = []
    damaged: list[PenstockError] = []
    clear: list[tuple[int, PenstockError]] = []
    for path in sorted(set(paths)):
        try:
            step = _step(path, keys)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            continue
        except NotSealedError as error:
            clear.append((_clear_step(path), error))
            continue
        except AGAINST_KEYS:
            raise
        except PenstockError as error:
            damaged.append(error)
            continue
        if step is not None:
            is_last = os.path.basename(path).startswith("last")
            found.append(Candidate(path, step, is_last))
    for step, not_sealed in clear:
        # Older ones are those of a run that has sealed its checkpoints since.
        if all(step >= candidate.step for candidate in found):
            raise not_sealed
    if damaged and not found:
        raise damaged[0]
    for one in damaged:
        warnings.warn(f"a checkpoint is passed over: {one}", PenstockWarning, stacklevel=1)
    # Of equal steps the one named last was saved after the others, and records them.
    found.sort(key=lambda candidate: (candidate.step, candidate.is_last), reverse=True)
    return [candidate.path for candidate in found]


def beside(directory: str) -> list[str]:
    """Directories and links named like checkpoints; no files of `torch.save`."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    return [entry.path for entry in entries if entry.name.endswith(SUFFIX) and entry.is_dir()]


def of_slurm(directory: str, keys: SealingKeys) -> str | None:
    """The complete checkpoint of the highest number saved before Slurm queued a job again.

    Args:
        directory: The directory of the run.
        keys: The keys that open sealed checkpoints.
    """
    try:
        found = numbered(directory, _HPC)
    except OSError:
        return None
    damaged: PenstockError | None = None
    for _, path in reversed(found):
        try:
            if _step(path, keys) is not None:
                return path
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            continue
        except AGAINST_KEYS:
            raise
        except PenstockError as error:
            damaged = damaged or error
            warnings.warn(f"a checkpoint is passed over: {error}", PenstockWarning, stacklevel=1)
    if damaged is not None:
        raise damaged
    return None


def _step(path: str, keys: SealingKeys) -> int | None:
    """The step of a complete checkpoint; None if a run cannot resume from it."""
    if os.path.isfile(path):
        keys.refuse_clear(path, "a file of Lightning's own")
        return _step_of_file(path)
    info = penstock.inspect(path, identities=keys.identities)
    if info.partial or not (info.metadata or {}).get("resumes", True):
        return None
    return _UNKNOWN if info.step is None else info.step


def _clear_step(path: str) -> int:
    """The step of a clear checkpoint; `_UNKNOWN` if it is not known."""
    try:
        step = _step_of_file(path) if os.path.isfile(path) else penstock.inspect(path).step
    except PenstockError:
        step = None
    return _UNKNOWN if step is None else step


def _step_of_file(path: str) -> int:
    """The step in a file of `torch.save`, if it can be read without running code."""
    check_whole(path)
    try:
        # Reads no tensor data.
        state = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        step = state.get("global_step")
    except Exception:
        return _UNKNOWN
    return step if type(step) is int else _UNKNOWN
