"""Saves the states of all ranks of an MPI run as one checkpoint.

Rank 0 begins the attempt and commits it; every rank writes the tensors of its states.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from penstock.plugin import (
    ROOT,
    Boxes,
    Flattener,
    HandedKey,
    KeyOffer,
    RankAttempt,
    check_no_store,
    decode_path,
    encode_metadata,
    to_native,
)

if TYPE_CHECKING:
    from penstock.integrations.dlio.ranks import Ranks
    from penstock.integrations.dlio.states import State
    from penstock.plugin import Node, PartVote, TensorSource
    from penstock.sealing import Sealing

NOTE = "dlio"
"""The member of a checkpoint's note with facts about the run."""


def key_of(rank: int) -> str:
    """The member of the checkpoint's state that holds the states of a rank."""
    return f"rank_{rank}"


def save(
    ranks: Ranks, path: str, states: dict[str, State], sealing: Sealing | None = None
) -> dict[str, Any]:
    """Saves the states of all ranks; returns on every rank when all of it is durable.

    Args:
        ranks: All ranks; each calls this.
        path: The checkpoint's directory, which all ranks see. A checkpoint there is replaced.
        states: The states of this rank, by name.
        sealing: For whom the checkpoint is sealed; None for a clear one.

    Returns:
        Fields of a `SaveReport` about this rank's files.

    Raises:
        UnsupportedPathError: The path is a URL.
        RankError: Another rank failed, or does not share the directory.
        StorageError: The operating system failed an operation.
    """
    path, options = decode_path(path), to_native(None)
    attempt: RankAttempt | None = None
    offer = KeyOffer() if sealing is not None and ranks.rank else None

    def begin() -> tuple[str, list[HandedKey | None]]:
        nonlocal attempt
        check_no_store(path)
        attempt = RankAttempt.begin(path, overwrite=True, sealing=sealing)
        others = [attempt.handed(offered[rank], rank) for rank in range(1, ranks.count)]
        return attempt.id, [None, *others]

    def write() -> tuple[Node, PartVote | None]:
        nonlocal attempt
        tree, tensors = _flatten(states, ranks.rank)
        if attempt is not None:
            attempt.write_shards(ranks.rank, tensors, options)
            return tree, None
        attempt = RankAttempt.join(
            path, attempt_id, ranks.rank, offer=offer, handed=handed[ranks.rank]
        )
        return tree, attempt.write(ranks.rank, tensors, options)

    def commit() -> None:
        if attempt is None:
            raise AssertionError("rank 0 has begun the attempt")
        whole: dict[str, Node] = {}
        for tree, _ in written:
            whole |= tree
        own = attempt.write_part(json.dumps(whole, ensure_ascii=False))
        votes = {rank: vote or own for rank, (_, vote) in enumerate(written)}
        note = encode_metadata({NOTE: {"ranks": ranks.count}})
        attempt.commit(votes, metadata=note, overwrite=True)

    try:
        offered = ranks.on_each(lambda: None if offer is None else offer.recipient)
        attempt_id, handed = ranks.on_first(begin)
        written = ranks.on_each(write)
        ranks.on_first(commit)
        if attempt is None:
            raise AssertionError("every rank has an attempt by now")
        return attempt.written
    finally:
        if attempt is not None:
            attempt.abandon()


def _flatten(states: dict[str, State], rank: int) -> tuple[dict[str, Node], list[TensorSource]]:
    """The tree and the tensors of a rank's states.

    Each tensor has a name of its own in all parts, so that the tree of rank 0 can refer to it.
    DLIO writes a tensor that several of its files share to each of them, and once to a file.
    """
    walk = Flattener()
    marked = {name: _in_boxes(state, {}) for name, state in states.items()}
    tree = walk.encode({key_of(rank): marked}, ROOT, 0)
    tensors, _ = walk.finish()
    return tree, tensors


def _in_boxes(state: Any, known: dict[int, Boxes]) -> Any:
    if not isinstance(state, torch.Tensor):
        return {name: _in_boxes(one, known) for name, one in state.items()}
    if id(state) not in known:
        start = (0,) * state.dim()
        known[id(state)] = Boxes(tuple(state.shape), state.dtype, [(start, state)])
    return known[id(state)]
