"""Places in the data: what torchtitan's loaders pickle, stored as the plain values that it is.

Its `ParallelAwareDataloader` has a state ``{"dp_rank_3": bytes, "world_size": 8}``: the bytes are
the pickled state of torchdata's loader. They are taken apart while their origin is known, this
process, and pickled anew when they are restored, so that no checkpoint can have code run.
"""

from __future__ import annotations

import pickle
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import DATALOADER
from torchtitan.components.dataloader import ParallelAwareDataloader

import penstock
from penstock.checkpoint.state.flatten import flatten
from penstock.errors import StateMismatchError, UnsupportedStateError

_SIZE = "world_size"

_AFRESH = f"exclude_from_loading=[{DATALOADER!r}] begins anew with the data and restores all else"


def capture(loader: Any, *, is_trusted: bool) -> Any:
    """The state of a loader, without pickles.

    Args:
        loader: The loader; None where there is none.
        is_trusted: Whether what cannot be stored otherwise may be pickled.

    Raises:
        UnsupportedStateError: It holds what cannot be stored.
    """
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


def found(loader: Any, state: Any, path: str, *, is_trusted: bool) -> Any:
    """The state that a loader takes over, of what was loaded; nothing is changed.

    Args:
        loader: The loader.
        state: What this rank, or the one in its place, has saved.
        path: The checkpoint.
        is_trusted: Whether pickles may be loaded.

    Raises:
        StateMismatchError: It is not for as many data-parallel ranks, or not for this one.
        UnsupportedStateError: It was pickled, and is not trusted.
    """
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
    place = state[name] if name in state else _of_another(name, path)
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
    """Has a loader that was restored go to its place.

    To begin draws a number from PyTorch's generator, which the run that was saved had drawn: so it
    comes before the random states are restored. What it begins is what ``iter(loader)`` gives out.
    """
    if isinstance(loader, StatefulDataLoader):
        loader.state_dict()


def _workers(place: Any) -> int | None:
    """How many workers have their place in it; None where it does not say."""
    if not isinstance(place, dict):
        return None
    if "_snapshot" in place:
        return int(place["_snapshot"]["_main_snapshot"]["_num_workers"])
    return 0 if "_num_yielded" in place else None


def _of_another(name: str, path: str) -> Any:
    """The place that another rank has saved, where the ranks lie otherwise than they did."""
    for rank in range(penstock.inspect(path).world_size):
        state = penstock.load(path, keys=f"{DATALOADER}.*", rank=rank)[DATALOADER]
        if name in state:
            return state[name]
    raise StateMismatchError(
        f"{path} has no place in the data for {name}: {_AFRESH}",
        key=f"{DATALOADER}.{name}",
        path=path,
    )
