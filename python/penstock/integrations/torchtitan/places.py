"""Positions in the data: stores as plain values what torchtitan's loaders pickle.

The state of its `ParallelAwareDataloader` is ``{"dp_rank_3": bytes, "world_size": 8}``: the bytes
are the pickled state of torchdata's loader. They are unpickled while their origin is known to be
this process, and pickled again when restored, so that a checkpoint cannot run code.
"""

from __future__ import annotations

import pickle
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import DATALOADER
from torchtitan.components.dataloader import ParallelAwareDataloader

import penstock
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.plugin import SealingKeys, flatten

_SIZE = "world_size"

_AFRESH = f"exclude_from_loading=[{DATALOADER!r}] begins anew with the data and restores all else"


def capture(loader: Any, *, is_trusted: bool) -> Any:
    """The state of a loader, without pickles."""
    state: Any = None if loader is None else loader.state_dict()
    if not isinstance(loader, ParallelAwareDataloader):
        return state
    name = loader._rank_id
    place = pickle.loads(state[name])
    try:
        flatten({DATALOADER: {name: place}})
    except UnsupportedStateError as error:
        if is_trusted:
            return state
        raise UnsupportedStateError(
            f"{error}; or set trust=True in the config of the checkpoints, which stores the place "
            "in the data pickled: such a checkpoint can have any code run when it is loaded",
            key=error.key,
        ) from error
    return {**state, name: place}


def to_restore(loader: Any, state: Any, path: str, *, is_trusted: bool, keys: SealingKeys) -> Any:
    """The state for a loader to restore, from a loaded state; changes nothing."""
    if not isinstance(loader, ParallelAwareDataloader):
        return state
    name, size = loader._rank_id, loader.dp_world_size
    if not isinstance(state, dict) or state.get(_SIZE) != size:
        saved = state.get(_SIZE, "none") if isinstance(state, dict) else "none"
        raise StateMismatchError(
            f"{path} has the places in the data of {saved} data-parallel ranks, and there are "
            f"{size}: torchtitan cannot divide them anew; {_AFRESH}",
            key=f"{DATALOADER}.{_SIZE}",
            path=path,
        )
    place = state[name] if name in state else _of_another(name, path, keys)
    saved = _workers(place)
    if saved is not None and saved != loader.num_workers:
        raise StateMismatchError(
            f"{path} has the places in the data of {saved} workers on each rank, and there are "
            f"{loader.num_workers}: set num_workers={saved} in the config of the loader; {_AFRESH}",
            key=f"{DATALOADER}.{name}",
            path=path,
        )
    if isinstance(place, bytes) and not is_trusted:
        raise UnsupportedStateError(
            f"{path}: {DATALOADER}.{name} is pickled, and can have any code run when it is loaded: "
            f"set trust=True in the config of the checkpoints if you trust its origin, or "
            f"{_AFRESH}",
            key=f"{DATALOADER}.{name}",
        )
    return {name: place if isinstance(place, bytes) else pickle.dumps(place), _SIZE: size}


def begin(loader: Any) -> None:
    """Creates the iterator of a restored loader, at the loader's saved position in the data.

    Creating it draws a number from PyTorch's generator, as in the saved run. Call this function
    before you restore the random states. The next ``iter(loader)`` returns this iterator.
    """
    if isinstance(loader, StatefulDataLoader):
        loader.state_dict()


def _workers(place: Any) -> int | None:
    """The number of workers whose positions it holds; None if it does not say."""
    if not isinstance(place, dict):
        return None
    if "_snapshot" in place:
        return int(place["_snapshot"]["_main_snapshot"]["_num_workers"])
    return 0 if "_num_yielded" in place else None


def _of_another(name: str, path: str, keys: SealingKeys) -> Any:
    """The position saved by another rank, for runs whose ranks are arranged differently."""
    for rank in range(penstock.inspect(path, identities=keys.identities).world_size):
        loaded = penstock.load(path, keys=f"{DATALOADER}.*", rank=rank, **keys.opening)
        state = loaded[DATALOADER]
        if name in state:
            return state[name]
    raise StateMismatchError(
        f"{path} has no place in the data for {name}: {_AFRESH}",
        key=f"{DATALOADER}.{name}",
        path=path,
    )
