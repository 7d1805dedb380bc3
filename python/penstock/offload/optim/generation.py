"""The generation of a state that lasts: a checkpoint of what its files hold.

It is committed as checkpoints are, in the place of the one before: at every moment one of the two
is there, whole. What is in files is linked.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, TypeAlias

from penstock import _native
from penstock.calls.arguments import to_native
from penstock.errors import StateMismatchError
from penstock.loading.load import Wanted, read
from penstock.loading.opened import OpenCheckpoint
from penstock.state.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.state.file_tensor import FileTarget, FileTensor

State: TypeAlias = "Mapping[str, Mapping[str, FileTensor]]"
Targets: TypeAlias = "Mapping[str, Mapping[str, FileTarget]]"
Loaded: TypeAlias = "tuple[dict[str, dict[str, FileTensor]], dict[str, float]]"


def commit(path: str, kind: str, state: State, steps: Mapping[str, float]) -> None:
    """Makes a state the generation that is found after a crash.

    Args:
        path: Where the generation is.
        kind: The class of the optimizer.
        state: The moments of each parameter, by its number.
        steps: How many steps each has made.

    Raises:
        StorageError: The system failed.
    """
    flat = flatten({"state": {number: dict(moments) for number, moments in state.items()}})
    _native.save(
        path,
        flat.tensors,
        flat.aliases,
        flat.tree,
        linked=flat.linked,
        step=None,
        metadata=json.dumps({"optimizer": kind, "steps": dict(steps)}),
        overwrite=True,
        options=to_native(None),
        progress=None,
    )


def load(path: str, kind: str, targets: Targets) -> Loaded | None:
    """The generation at a path; None for none.

    Args:
        path: Where it is.
        kind: The class of the optimizer.
        targets: Where the moments of each parameter go, by its number.

    Returns:
        The moments of each parameter that has some, and how many steps it has made.

    Raises:
        StateMismatchError: It is of another optimizer, or of other parameters.
        CorruptCheckpointError: It is damaged.
    """
    if not os.path.exists(os.path.join(path, _native.MANIFEST)):
        return None
    source = OpenCheckpoint(path)
    try:
        with source.reading():
            note = source.metadata()
    finally:
        source.release()
    if note.get("optimizer") != kind or not isinstance(note.get("steps"), dict):
        raise StateMismatchError(
            f"{path} is of {note.get('optimizer')}, not of {kind}", key="optimizer", path=path
        )
    if unknown := sorted(note["steps"].keys() - targets.keys()):
        raise StateMismatchError(
            f"{path} has parameter {unknown[0]}, the optimizer {len(targets)}",
            key=unknown[0],
            path=path,
        )
    wanted = {"state": {number: dict(targets[number]) for number in note["steps"]}}
    found = read(path, Wanted(into=wanted, rank=0), None).state
    return found["state"], note["steps"]
