"""Copies steps to a mirror once, for `penstock mirror`, and compares both."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.progress import shown
from penstock.errors import CheckpointExistsError, CorruptCheckpointError
from penstock.reports import MirrorReport
from penstock.tensors.arguments import to_native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.mirroring.mirror import Mirror
    from penstock.common.progress import Progress
    from penstock.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopies:
    """The copies of a step.

    Attributes:
        step: The step.
        here: Its state in the store; None if the store does not have it.
        there: Its state at the mirror; ``"another"`` if that is another checkpoint.
    """

    step: int
    here: str | None
    there: str | None


def compared(root: str, mirror: Mirror) -> list[StepCopies]:
    """Returns all steps of a store and its mirror, oldest first."""
    local, remote = _native.Store(root), _native.Store(mirror.url)
    here = {step: state for step, state, _ in local.steps()}
    there = {step: state for step, state, _ in remote.steps()}
    for step in here.keys() & there.keys():
        if here[step] == there[step] == "complete":
            ours, theirs = local.identity(step), identity_there(remote, step, mirror)
            # A checkpoint that cannot be read now is not compared. A clear one is no sealed copy.
            is_unread = ours is None or (theirs is None and mirror.sealing is None)
            if not is_unread and ours != theirs:
                there[step] = "another"
    return [
        StepCopies(step=step, here=here.get(step), there=there.get(step))
        for step in sorted(here.keys() | there.keys())
    ]


def mirror_step(
    root: str,
    step: int,
    mirror: Mirror,
    *,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> MirrorReport:
    """Copies the files of a step that the mirror lacks."""
    local, remote = _native.Store(root), _native.Store(mirror.url)
    with shown(progress, "mirroring") as update, explaining_conflict(remote.step_path(step)):
        fields = _native.mirror(
            local.step_path(step),
            remote.step_path(step),
            sealing=None if mirror.sealing is None else mirror.sealing.wrap_new(),
            bytes_per_second=mirror.bytes_per_second,
            connections=mirror.connections,
            options=to_native(options),
            progress=update,
        )
    return MirrorReport(**fields)


def identity_there(remote: _native.Store, step: int, mirror: Mirror) -> str | None:
    """Returns the identity of the local step that a mirror has a copy of.

    A sealed copy has an identity of its own, and names the step's; None where it does not.
    """
    return remote.identity(step) if mirror.sealing is None else remote.copy_of(step)


@contextmanager
def explaining_conflict(there: str) -> Iterator[None]:
    """Adds remedies to errors about the copy of a step, as a mirror replaces nothing."""
    try:
        yield
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{error.path} holds another checkpoint, which stays: delete it there, or mirror to "
            "another URL",
            path=error.path,
        ) from None
    except CorruptCheckpointError as error:
        if error.path == there:
            error.add_note(f"remove all objects below {there}/, and the step is copied again")
        raise
