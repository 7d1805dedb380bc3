"""Loads the states of a rank from a checkpoint of as many ranks, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StateMismatchError
from penstock.integrations.dlio.saving import NOTE, key_of
from penstock.plugin import (
    BoxRead,
    OpenCheckpoint,
    Unsealing,
    branches,
    decode_path,
    of_tensor,
    to_native,
)
from penstock.tensors.copying import bump_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.integrations.dlio.ranks import Ranks
    from penstock.integrations.dlio.states import State
    from penstock.plugin import Node

CLEAR = Unsealing()
"""Opens clear checkpoints only."""


def load(ranks: Ranks, path: str, states: dict[str, State], unsealing: Unsealing = CLEAR) -> None:
    """Fills the tensors of all ranks; returns on every rank when all are filled.

    Args:
        ranks: All ranks; each calls this.
        path: The checkpoint's directory.
        states: The states of this rank, by name, whose tensors are filled.
        unsealing: How a sealed checkpoint is opened.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: Bytes are damaged, or a file is missing.
        TamperedError: Somebody without the key has changed a sealed checkpoint.
        NotSealedError: It is clear, and a sealed one is demanded.
        StateMismatchError: Another number of ranks saved it, or another model.
        RankError: Another rank failed.
    """
    path = decode_path(path)
    ranks.on_each(lambda: _fill(path, ranks, states, unsealing))


def _fill(path: str, ranks: Ranks, states: dict[str, State], unsealing: Unsealing) -> None:
    checkpoint = OpenCheckpoint(path, unsealing=unsealing)
    try:
        _check_ranks(checkpoint, ranks.count)
        checkpoint.view_as(ranks.rank)
        with checkpoint.reading():
            key = key_of(ranks.rank)
            stored = dict(branches(checkpoint.root) or ()).get(key)
            # DLIO may use a tensor twice, and memory is filled once.
            reads = {
                id(tensor): (tensor, box) for tensor, box in _boxes(checkpoint, stored, states, key)
            }
            checkpoint.read([box for _, box in reads.values()], to_native(None))
        # Autograd does not notice direct reads.
        bump_versions([tensor for tensor, _ in reads.values()])
    finally:
        checkpoint.release()


def _check_ranks(checkpoint: OpenCheckpoint, count: int) -> None:
    note = checkpoint.metadata().get(NOTE)
    saved = note.get("ranks") if isinstance(note, dict) else None
    if saved is None:
        raise StateMismatchError(
            f"{checkpoint.path} was not saved by DLIO: name the checkpoint_folder of a run of DLIO",
            path=checkpoint.path,
        )
    if saved != count:
        raise StateMismatchError(
            f"{checkpoint.path} was saved by {saved} ranks, and this run has {count}: each rank of "
            f"DLIO loads its own states, so start {saved} ranks (mpirun -np {saved})",
            path=checkpoint.path,
        )


def _boxes(
    checkpoint: OpenCheckpoint, node: Node, state: Any, name: str
) -> Iterator[tuple[torch.Tensor, BoxRead]]:
    """Yields each tensor of a state, with the stored tensor to fill it from."""
    if isinstance(state, torch.Tensor):
        yield state, _box(checkpoint, node, state, name)
        return
    members = dict(branches(node) or ())
    if members.keys() != state.keys():
        only_here = sorted(state.keys() - members.keys())
        only_there = sorted(members.keys() - state.keys())
        raise _mismatch(
            checkpoint,
            f"{name}.{(only_here or only_there)[0]}",
            "is not stored" if only_here else "is stored, and this run has no such state",
        )
    for key, one in state.items():
        yield from _boxes(checkpoint, members[key], one, f"{name}.{key}")


def _box(checkpoint: OpenCheckpoint, node: Any, tensor: torch.Tensor, name: str) -> BoxRead:
    if not isinstance(node, dict) or "$" not in node:
        raise _mismatch(checkpoint, name, "is stored as no tensor")
    stored, memory = checkpoint.tensor(node), of_tensor(tensor, name)
    if (stored.shape, stored.dtype) != (memory.shape, memory.dtype):
        raise _mismatch(
            checkpoint,
            name,
            f"is stored as {stored.dtype} {list(stored.shape)}, and is {memory.dtype} "
            f"{list(memory.shape)} in this run",
        )
    return BoxRead(stored, (0,) * len(stored.shape), memory)


def _mismatch(checkpoint: OpenCheckpoint, name: str, problem: str) -> StateMismatchError:
    return StateMismatchError(
        f"{checkpoint.path}: {name} {problem}: load with the model and the parallelism of the run "
        "that saved it",
        key=name,
        path=checkpoint.path,
    )
