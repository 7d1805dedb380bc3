"""`resume`: restores the newest complete checkpoint of a run, registered or not."""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import ray.train

import penstock
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockError,
    PenstockWarning,
    RankError,
    TamperedError,
)
from penstock.integrations.directories import remove
from penstock.integrations.ray.reporting import register
from penstock.integrations.ray.run import NOTE, current
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from penstock import Training
    from penstock.integrations.ray.run import RayRun
    from penstock.sealing import Identities, Key
    from penstock.signing import SignatureKey, Signers


class _RunCheckpoints(NamedTuple):
    """The checkpoints of a run, as the worker of rank 0 sees them.

    Attributes:
        complete: Paths of complete checkpoints, the newest first.
        steps: The step of each.
        metrics: The metrics reported with each.
        registered: Paths that Ray has registered.
        leftovers: Paths of unfinished saves.
        bad: Errors of checkpoints that should be complete and are not.
    """

    complete: list[str]
    steps: dict[str, int]
    metrics: dict[str, dict[str, Any]]
    registered: list[str]
    leftovers: list[str]
    bad: list[PenstockError]


def resume(
    training: Training | Any,
    *,
    storage_path: str | os.PathLike[str] | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> int | None:
    """Restores a training from the newest complete checkpoint of the run.

    It loads the complete checkpoint of the highest step that every worker can read without damage,
    and skips damaged ones with a `PenstockWarning`. A checkpoint that was durable when earlier
    workers ended but not registered yet counts, too: Ray registers it now, with the metrics it was
    saved with. The remains of unfinished saves are removed.

    All workers call this, once, before their first `report`.

    Args:
        training: The training to restore, built as for a new run; or a state whose tensors are
            filled, as by ``penstock.load(into=…)``.
        storage_path: The run's storage path in local mode, where Ray does not provide it; None for
            Ray's default.
        identities: Keys that open sealed checkpoints; see `penstock.load`. A clear one is then
            refused, as `penstock.load` does. After tampering no older one is tried.
        signed_by: Public keys of which one must have signed the checkpoint; see `penstock.load`. No
            older one is tried in place of one that is not signed.

    Returns:
        The step; None if there is no checkpoint, in a new run.

    Raises:
        CorruptCheckpointError: There are checkpoints, and none is good; or the newest that Ray has
            is not Penstock's.
        TamperedError: Somebody without the key has changed a sealed checkpoint.
        SealedError: A checkpoint is sealed, and there are no identities.
        NotSealedError: ``identities`` are given and a checkpoint is clear.
        SignatureError: None of ``signed_by`` has signed a checkpoint.
        StateMismatchError: The training does not fit.
        RankError: Another worker could not restore it.
        StorageError: The operating system failed an operation.
    """
    run = current(storage_path)
    keys = SealingKeys.of(None, identities, signed_by=signed_by)
    found: _RunCheckpoints | Exception = run.first(_seen(run, keys))
    if isinstance(found, Exception):
        raise found
    for error in found.bad:
        _pass_over(str(error))
    for index, path in enumerate(found.complete):
        damage = _load(run, path, training, keys)
        if damage is None:
            _register(run, found, index)
            if run.rank == 0:
                for leftover in found.leftovers:
                    # A directory in which a save is running stays.
                    with contextlib.suppress(OSError, PenstockError):
                        remove(leftover)
            return found.steps[path]
        _pass_over(damage)
    if found.complete or found.bad:
        raise CorruptCheckpointError(
            f"{run.root}: none of its checkpoints is good: `penstock salvage` takes out what is "
            "intact; to begin anew in spite of them, give the run another name",
            path=run.root,
        )
    return None


def _pass_over(why: str) -> None:
    warnings.warn(f"passed over: {why}", PenstockWarning, stacklevel=3)


def _load(run: RayRun, path: str, training: Any, keys: SealingKeys) -> str | None:
    """Loads a checkpoint on all workers; returns the damage that any of them has found."""
    own: PenstockError | None = None
    try:
        penstock.load(path, into=training, **keys.opening)
    except PenstockError as error:
        own = error
    is_damage = isinstance(
        own, CorruptCheckpointError | IncompleteCheckpointError
    ) and not isinstance(own, TamperedError)
    told = run.everyone(None if own is None else (is_damage, str(own)))
    for rank, one in enumerate(told):
        if one is not None and not one[0]:
            raise own or RankError(f"worker {rank} cannot resume: {one[1]}", rank=rank)
    return next((one[1] for one in told if one is not None), None)


def _seen(run: RayRun, keys: SealingKeys) -> _RunCheckpoints | Exception | None:
    """The checkpoints that rank 0 sees, or its error, which all workers raise."""
    if run.rank:
        return None
    try:
        return _inspect(run, keys)
    except Exception as error:
        return error


def _inspect(run: RayRun, keys: SealingKeys) -> _RunCheckpoints:
    """Inspects the run's directory, and asks Ray for its checkpoints."""
    found = _RunCheckpoints([], {}, {}, _registered(run), [], [])
    paths = [path for _, path in run.directories()]
    latest = ray.train.get_checkpoint()
    if latest is not None and latest.path not in paths:
        paths.append(latest.path)
    for path in paths:
        try:
            info = penstock.inspect(path, identities=keys.identities)
        except TamperedError:
            raise
        except (
            CheckpointNotFoundError,
            IncompleteCheckpointError,
            CorruptCheckpointError,
        ) as error:
            if not run.is_own(path):
                raise _not_ours(path, error) from error
            is_leftover = isinstance(error, IncompleteCheckpointError)
            if is_leftover and path not in found.registered:
                found.leftovers.append(path)
            else:
                found.bad.append(error)
            continue
        if info.step is None:
            raise _not_ours(path, "it has no step")
        note = info.metadata.get(NOTE)
        found.complete.append(path)
        found.steps[path] = info.step
        metrics = note.get("metrics") if isinstance(note, dict) else None
        found.metrics[path] = json.loads(metrics) if isinstance(metrics, str) else {}
    # The last checkpoint that Ray has may not be named by its step.
    found.complete.sort(key=lambda path: found.steps[path], reverse=True)
    return found


def _registered(run: RayRun) -> list[str]:
    """Paths of checkpoints that Ray has registered and keeps, in its order."""
    if run.is_local:
        return []
    # Ray before 2.53 lacks it, and returns committed checkpoints only.
    modes = getattr(ray.train, "CheckpointConsistencyMode", None)
    further = () if modes is None else (modes.COMMITTED,)
    return [one.checkpoint.path for one in ray.train.get_all_reported_checkpoints(*further)]


def _register(run: RayRun, found: _RunCheckpoints, index: int) -> None:
    """Registers checkpoints that Ray does not know, up to the one that was loaded.

    Only those newer than all that Ray knows: it orders them by their registration. Older ones were
    meant to be deleted.
    """
    loaded = found.complete[index]
    known = [path for path in found.complete if path in found.registered]
    last = found.steps[known[0]] if known else None
    missing = [
        path
        for path in reversed(found.complete[index:])
        if path not in found.registered
        and (last is None or found.steps[path] > last)
        and (path == loaded or not run.is_local)
    ]
    for path in missing:
        register(run, path, found.metrics[path])


def _not_ours(path: str, why: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: the newest checkpoint that Ray has of this run was not reported by Penstock: "
        "load it as it was saved, from ray.train.get_checkpoint(), in the place of the first "
        f"resume, or give the run another name ({why})",
        path=path,
    )
