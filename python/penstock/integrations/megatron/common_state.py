"""The common state of sealed and signed checkpoints: no file of Megatron-Core's holds it in clear.

Before 0.19, Megatron-Core writes the common state to ``common.pt`` before it asks a strategy to
save, and all versions read that file apart from the strategy. In a save that is sealed the state
is kept for the strategy instead, which seals it with the objects. A load takes it from there, and
in a signed checkpoint from the signed file.
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

from penstock.errors import CannotSealError, OtherCheckpointError
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
        data: The object of the state, as Megatron-Core writes objects; None on other ranks than
            the first, and from Megatron-Core 0.19 on.
    """

    data: bytes | None = None


class _Opening:
    """A load, which opens a checkpoint several times.

    Attributes:
        keys: The keys that open and check it.
        ids: Ids of the checkpoints that it has opened, by their paths.
    """

    def __init__(self, keys: SealingKeys) -> None:
        self.keys = keys
        self.ids: dict[str, str] = {}


_CLEAR = _Held()
"""Stands for the common state of a save that is not sealed."""

_seals = False
"""Whether some strategy of this process seals."""


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
    """Keeps the common state of the save in the block, if that save is sealed."""
    token = _held.set(_CLEAR if keys.sealing is None else _Held())
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
    """The object of the common state of this save; None if the state has it, or this rank not."""
    found = _held.get()
    return None if found is None else found.data


def expect_sealed() -> None:
    """Refuses from now on a common state of which it is not known whether it is to be sealed."""
    global _seals
    _seals = True


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
        if found is _CLEAR or (found is None and not _seals):
            theirs(*arguments, **named)
            return
        given = signature.bind(*arguments, **named).arguments
        where = os.fspath(given["checkpoint_dir"])
        if found is None:
            raise CannotSealError(
                f"{where}: `megatron.core.dist_checkpointing.save` was imported by its name before "
                "a strategy that seals was made, so Megatron-Core would write the common state in "
                "the clear: call it by its module, or import it later",
                path=where,
            )
        if dist.get_rank() == 0:
            # At once, as the caller may change it after the call of a save in the background.
            found.data = pickled([given["common_state_dict"]])

    return save_common
