"""Makes an error of one rank in Megatron-Core's `save` and `load` an error of all ranks.

Both exchange descriptions of the state by collectives, and one rank alone judges them. A rank that
raises, there or between two collectives, would leave the others in the next one until the timeout
of their process group. So barriers that fail for all stand before and after each exchange.

A save also checks that every tensor is stored by some rank. ``--ckpt-assume-constant-structure``
switches Megatron-Core's check off after the first save; here it is left out only while no rank's
structure has changed since a save that was checked.
"""

from __future__ import annotations

import inspect
import math
import os
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization, state_dict_utils, validation
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as theirs

from penstock.errors import UnsupportedStateError
from penstock.integrations.megatron import common_state, structure
from penstock.plugin import Barriers, SealingKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_SECONDS = 1800
"""Longest wait for a rank that reads more slowly than the others: PyTorch's for a collective."""

_KEYS = "_penstock_keys"
_BARRED = "_penstock_barred"

_barriers: ContextVar[Barriers | None] = ContextVar("barriers", default=None)
_checked: bytes | None = None
"""Digest of this rank's structure in the last save, which all ranks have checked."""


def install() -> None:
    """Puts the barriers into Megatron-Core, for saves and loads by Penstock's strategies.

    They stay, as strategies that were made meanwhile may be used later.
    """
    if hasattr(serialization.save, _BARRED):
        return
    wrapper = fully_parallel.FullyParallelSaveStrategyWrapper
    patches: tuple[tuple[tuple[Any, ...], str, Callable[..., Any]], ...] = (
        ((serialization, dist_checkpointing), "save", _saving),
        ((serialization, dist_checkpointing), "load", _loading),
        ((serialization,), "save_preprocess", _preprocessing),
        ((serialization, state_dict_utils), "determine_global_metadata", _after_barrier),
        ((state_dict_utils,), "validate_sharding_integrity", _validating),
        ((serialization,), "validate_integrity_and_strict_load", _before_barrier),
        ((wrapper,), "apply_saving_parallelization", _after_barrier),
    )
    for owners, name, wrap in patches:
        barred = wrap(getattr(owners[0], name))
        setattr(barred, _BARRED, True)
        for owner in owners:
            setattr(owner, name, barred)


def ours(method: Callable[..., Any], keys: SealingKeys) -> Callable[..., Any]:
    """Marks a method of a strategy as one that saves or loads through Penstock with these keys."""
    setattr(method, _KEYS, keys)
    return method


def start_strategy() -> None:
    """Waits for all ranks before a save by a strategy, which then reports errors itself."""
    barriers = _barriers.get()
    if barriers is not None:
        barriers.wait()
        barriers.close()


@contextmanager
def together(label: str, process_group: Any = None) -> Iterator[Barriers]:
    """Runs a block that fails on all ranks if it fails on one.

    Args:
        label: The block's subject; the same on all ranks.
        process_group: The ranks; None for all.

    Raises:
        RankError: The block failed on another rank.
    """
    with Barriers(label, process_group=process_group, timeout_seconds=TIMEOUT_SECONDS) as barriers:
        yield barriers
        barriers.wait()


def _keys_of(strategy: Any, base: type, method: str) -> SealingKeys | None:
    """The keys of a strategy given to Megatron-Core; None if it is not Penstock's."""
    strategy = getattr(strategy, "base_strategy", strategy)
    # Megatron-Core takes its own strategy for None and, before 0.17, for names.
    if strategy is None or isinstance(strategy, tuple):
        strategy = _registered(strategy, method) or base
    return getattr(getattr(strategy, method, None), _KEYS, None)


def _registered(name: Any, method: str) -> Any:
    """The strategy that is registered under a name; None if there is none."""
    if name is None:
        return None
    try:
        from megatron.core.dist_checkpointing.strategies.base import (
            StrategyAction,
            get_default_strategy,
        )

        action = {"save": StrategyAction.SAVE_SHARDED, "load": StrategyAction.LOAD_SHARDED}
        return get_default_strategy(action[method], *name)
    except Exception:
        # Megatron-Core raises it again.
        return None


def _label(doing: str, checkpoint_dir: str | os.PathLike[str]) -> str:
    return f"the {doing} of {os.path.basename(os.path.abspath(checkpoint_dir))} by Megatron-Core"


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save)

    @wraps(save)
    def barred(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        path, strategy = (given.arguments[name] for name in ("checkpoint_dir", "sharded_strategy"))
        keys = _keys_of(strategy, theirs.TorchDistSaveShardedStrategy, "save")
        if keys is None:
            with common_state.saved_with(SealingKeys()):
                return save(*positional, **named)
        with (
            common_state.saved_with(keys),
            Barriers(_label("save", path), timeout_seconds=TIMEOUT_SECONDS) as barriers,
        ):
            return _within(barriers, save, *positional, **named)

    return barred


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load)

    @wraps(load)
    def barred(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        one = given.arguments
        strict = validation.parse_strict_flag(one["strict"])
        # Without an exchange Megatron-Core lets a rank load alone.
        is_common = one["validate_access_integrity"] or (
            validation.StrictHandling.requires_global_app_metadata(strict)
        )
        keys = _keys_of(one["sharded_strategy"], theirs.TorchDistLoadShardedStrategy, "load")
        if keys is None:
            return load(*positional, **named)
        with common_state.loaded_with(keys):
            if not is_common:
                return load(*positional, **named)
            label = _label("load", one["checkpoint_dir"])
            with together(label, one.get("process_group")) as barriers:
                return _within(barriers, load, *positional, **named)

    return barred


def _within(barriers: Barriers, call: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    token = _barriers.set(barriers)
    try:
        return call(*positional, **named)
    finally:
        _barriers.reset(token)


def wait() -> None:
    """Waits for all ranks, within a save or load of all of them."""
    barriers = _barriers.get()
    if barriers is not None:
        barriers.wait()


def _after_barrier(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def barred(*positional: Any, **named: Any) -> Any:
        wait()
        return call(*positional, **named)

    return barred


def _before_barrier(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def barred(*positional: Any, **named: Any) -> Any:
        found = call(*positional, **named)
        wait()
        return found

    return barred


def _preprocessing(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(preprocess)

    @wraps(preprocess)
    def barred(*positional: Any, **named: Any) -> Any:
        global _checked
        found = preprocess(*positional, **named)
        barriers = _barriers.get()
        if barriers is None:
            return found
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        digest = structure.digest(found[0])
        is_checked = given.arguments["validate_access_integrity"] or digest == _checked
        if not barriers.wait(is_checked):
            metadata = state_dict_utils.determine_global_metadata(found[0])[1]
            if dist.get_rank() == 0:
                check_stored(metadata)
            barriers.wait()
        _checked = digest
        return found

    return barred


def _validating(validate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(validate)
    def barred(global_metadata: Any, *positional: Any, **named: Any) -> Any:
        validate(global_metadata, *positional, **named)
        if _barriers.get() is not None and dist.get_rank() == 0:
            check_stored(global_metadata)

    return barred


def check_stored(descriptions: list[list[Any]]) -> None:
    """Refuses tensors and objects that no rank stores.

    Megatron-Core looks only at tensors that are cut into equal parts. Tensors that are stored in
    part are found at the commit, from what every rank has written.

    Args:
        descriptions: The tensors and objects of each rank, as Megatron-Core gathers them.

    Raises:
        UnsupportedStateError: Every rank takes one for another rank's replica, or some of the
            objects of one key are on no rank.
    """
    held = dict.fromkeys(_name(one) for of_rank in descriptions for one in of_rank)
    stored = {
        _name(one): one
        for of_rank in descriptions
        for one in of_rank
        if is_main_replica(one.replica_id)
    }
    for name in held:
        if name not in stored:
            raise UnsupportedStateError(
                f"{name}: no rank stores it: its replica_id is that of a copy on every rank that "
                "holds it: give it a replica_id of zeros on one of them",
                key=name,
            )
    counts = Counter(one.key for one in stored.values() if isinstance(one, ShardedObject))
    for one in stored.values():
        if isinstance(one, ShardedObject) and counts[one.key] < math.prod(one.global_shape):
            raise UnsupportedStateError(
                f"{one.key}: {counts[one.key]} of {math.prod(one.global_shape)} objects of this "
                "key are there: each rank that its global_shape counts has to give its own",
                key=one.key,
            )


def _name(one: Any) -> str:
    name: str = one.unique_key if isinstance(one, ShardedObject) else one.key
    return name
