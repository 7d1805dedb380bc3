"""The common state of sealed and signed checkpoints, which Megatron-Core does not write itself.

Before 0.19, Megatron-Core writes the common state to ``common.pt`` before it asks a strategy to
save, and all versions read that file apart from the strategy. In a save that seals or signs the
state is kept for the strategy instead: a sealed one has it among the objects, and a signed one
writes the file that it signs, as a file that was there could be of anybody. A load takes it from
there.
"""

from __future__ import annotations

import inspect
import io
import os
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import common

from penstock.errors import CannotSealError, OtherCheckpointError, UnsupportedStateError
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "common_state"
"""Key of the object that holds the common state; Megatron-Core's own from 0.19 on."""

UNIQUE_KEY: str = ShardedObject(KEY, None, (1,), (0,)).unique_key
"""The key with the place of the object."""

_REPLACED = "_penstock_keeps_common_state"

_held: ContextVar[_Held | None] = ContextVar("held", default=None)
_opening: ContextVar[_Opening | None] = ContextVar("opening", default=None)
_keys: SealingKeys | None = None
"""The keys of `enable`; None without it."""


class _Held:
    """The common state of one save, once it is known.

    Attributes:
        data: The bytes of the state; None on other ranks than the first, and from Megatron-Core
            0.19 on.
        as_object: Likewise as Megatron-Core writes an object, which is a list of one.
    """

    data: bytes | None = None
    as_object: bytes | None = None


class _Opening:
    """A load, which opens a checkpoint several times.

    Attributes:
        keys: The keys that open and check it.
        ids: Ids of the checkpoints that it has opened, by their paths.
    """

    def __init__(self, keys: SealingKeys) -> None:
        self.keys = keys
        self.ids: dict[str, str] = {}


_PLAIN = _Held()
"""Stands for the common state of a save that neither seals nor signs."""

_kept_for: set[str] = set()
"""Whether some strategy of this process ``"seals"`` or ``"signs"``."""


def pickled(value: Any) -> bytes:
    """The bytes of an object as Megatron-Core writes it."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def use_keys(keys: SealingKeys | None) -> None:
    """Sets the keys of saves and loads that name no strategy."""
    global _keys
    _keys = keys


@contextmanager
def saved_with(keys: SealingKeys) -> Iterator[None]:
    """Keeps the common state of the save in the block, if that save seals or signs."""
    is_plain = keys.sealing is None and keys.signing is None
    token = _held.set(_PLAIN if is_plain else _Held())
    try:
        yield
    finally:
        _held.reset(token)


@contextmanager
def loaded_with(keys: SealingKeys) -> Iterator[None]:
    """Opens the common state of the load in the block with these keys."""
    token = _opening.set(_Opening(keys))
    try:
        yield
    finally:
        _opening.reset(token)


def expect_one(path: str, checkpoint_id: str) -> None:
    """Refuses a checkpoint that was replaced since this load has opened it.

    Raises:
        OtherCheckpointError: It is another one.
    """
    opening = _opening.get()
    if opening is None:
        return
    first = opening.ids.setdefault(os.path.abspath(path), checkpoint_id)
    if first != checkpoint_id:
        raise OtherCheckpointError(
            f"{path} was replaced while it was loaded: load it again",
            path=path,
            expected=first,
            found=checkpoint_id,
        )


def held() -> bytes | None:
    """The bytes of the common state of this save; None if the state has it, or this rank not."""
    found = _held.get()
    return None if found is None else found.data


def held_object() -> bytes | None:
    """The object of the common state of this save, likewise."""
    found = _held.get()
    return None if found is None else found.as_object


def expect_kept(keys: SealingKeys) -> None:
    """Refuses from now on a common state of which it is not known whether it is to be kept."""
    if keys.sealing is not None:
        _kept_for.add("seals")
    if keys.signing is not None:
        _kept_for.add("signs")


def install(load: Callable[[str, SealingKeys], Any]) -> None:
    """Puts this between Megatron-Core and the file, for saves and loads by Penstock's strategies.

    Args:
        load: Returns the common state of a checkpoint, or `NotImplemented` if Megatron-Core is to
            read it.
    """
    if hasattr(serialization.load_common_state_dict, _REPLACED):
        return

    def loading(theirs: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(theirs)
        def load_common(*arguments: Any, **named: Any) -> Any:
            (where,) = (*arguments, *named.values())[-1:]
            opening = _opening.get()
            keys = _keys if opening is None else opening.keys
            found = load(os.fspath(where), keys or SealingKeys())
            return theirs(*arguments, **named) if found is NotImplemented else found

        return load_common

    owners: list[tuple[Any, str, Callable[..., Any]]] = [
        (owner, "load_common_state_dict", loading) for owner in (serialization, dist_checkpointing)
    ]
    # Classes before 0.17; functions, which `serialization` imports by name, in 0.17 and 0.18.
    for name, owner, wrap in (
        ("load_common", getattr(common, "TorchCommonLoadStrategy", serialization), loading),
        ("save_common", getattr(common, "TorchCommonSaveStrategy", serialization), _keeping),
    ):
        if hasattr(owner, name):
            owners.append((owner, name, wrap))
    for owner, name, wrap in owners:
        ours = wrap(getattr(owner, name))
        setattr(ours, _REPLACED, True)
        setattr(owner, name, ours)


def _keeping(theirs: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(theirs)

    @wraps(theirs)
    def save_common(*arguments: Any, **named: Any) -> None:
        found = _held.get()
        if found is _PLAIN or (found is None and not _kept_for):
            theirs(*arguments, **named)
            return
        given = signature.bind(*arguments, **named).arguments
        where = os.fspath(given["checkpoint_dir"])
        if found is None:
            what = (
                f"{where}: `megatron.core.dist_checkpointing.save` was imported by its name before "
                "a strategy with keys was made, so Megatron-Core would write the common state by "
                "itself: call it by its module, or import it later"
            )
            if "seals" in _kept_for:
                raise CannotSealError(what, path=where)
            raise UnsupportedStateError(what, key=KEY)
        if dist.get_rank() == 0:
            # At once, as the caller may change it after the call of a save in the background.
            state = given["common_state_dict"]
            found.data, found.as_object = pickled(state), pickled([state])

    return save_common
