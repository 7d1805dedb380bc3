"""Strategies for loops that hand their own to `megatron.core.dist_checkpointing`.

They are Megatron-Core's for ``torch_dist``, whose saves and loads are Penstock's. `methods` makes
these for `penstock.integrations.megatron.enable`, too, which puts them into Megatron-Core's own.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as theirs

from penstock.integrations.dcp import directory
from penstock.integrations.dcp.directory import NO_KEYS
from penstock.integrations.megatron import (
    agreement,
    clear_files,
    common_state,
    retention,
    structure,
)
from penstock.integrations.megatron.loading import Reader, check_backend, load_common
from penstock.integrations.megatron.saving import Writer
from penstock.integrations.megatron.trying import try_out
from penstock.plugin import SealingKeys, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys

Methods = dict[str, "Callable[..., Any]"]


def saving(base: Any, options: Options | None, keys: SealingKeys) -> Methods:
    """The methods of a save strategy.

    Args:
        base: The class whose methods serve what is not on a file system.
        options: Settings of the I/O.
        keys: The keys that seal and sign.
    """
    writer = Writer(options, keys)

    def start(checkpoint_dir: str | os.PathLike[str]) -> None:
        agreement.start_strategy()
        retention.patch()
        clear_files.patch(keys)
        root = os.path.dirname(os.path.abspath(checkpoint_dir))
        try_out(root, _ClearSaves, _ClearLoads)

    # Taken now: `enable` puts these methods in their place.
    save_otherwise, save_async_otherwise = base.save, base.async_save

    @wraps(save_otherwise)
    def save(
        self: Any, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], **further: Any
    ) -> None:
        if _is_url(checkpoint_dir):
            _refuse_url(checkpoint_dir, keys)
            save_otherwise(self, sharded_state_dict, checkpoint_dir, **further)
        else:
            start(checkpoint_dir)
            writer.save(sharded_state_dict, checkpoint_dir)

    @wraps(save_async_otherwise)
    def async_save(
        self: Any,
        sharded_state_dict: Any,
        checkpoint_dir: str | os.PathLike[str],
        *strategy: str,
        **further: str,
    ) -> Any:
        if _is_url(checkpoint_dir):
            _refuse_url(checkpoint_dir, keys)
            return save_async_otherwise(
                self, sharded_state_dict, checkpoint_dir, *strategy, **further
            )
        # An error reaches the other ranks only before the start.
        request = _request_class(*strategy, **further)
        start(checkpoint_dir)
        return writer.save_async(sharded_state_dict, checkpoint_dir, request)

    return {"save": agreement.ours(save, keys), "async_save": async_save}


def _refuse_url(checkpoint_dir: str | os.PathLike[str], keys: SealingKeys) -> None:
    """Refuses a URL of Megatron-Core's storage client, which seals and signs nothing."""
    where = os.fspath(checkpoint_dir)
    keys.refuse_sealing(where, "Megatron-Core's own storage client seals nothing")
    keys.refuse_signing(where, "Megatron-Core's own storage client signs nothing")


def _is_url(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether Megatron-Core takes this for a URL of its storage client."""
    # A `pathlib.Path` of one has a single slash.
    return os.fspath(checkpoint_dir).startswith("msc:/")


def _request_class(async_strategy: str | None = None) -> Any:
    """The class of requests of the queue that will run them."""
    if not hasattr(theirs, "get_async_strategy"):
        # Before 0.17 there was one.
        return async_utils.AsyncRequest
    _, modules = theirs.get_async_strategy(async_strategy or "nvrx")
    return modules["AsyncRequest"]


def loading(base: Any, options: Options | None, keys: SealingKeys) -> Methods:
    """Returns the methods, by name, that replace those of a load strategy.

    Args:
        base: Megatron-Core's strategy, which still loads the checkpoints that Penstock did not
            write.
        options: Settings of the I/O.
        keys: The keys that open and check.
    """
    load_otherwise, tensors_otherwise = base.load, base.load_tensors_metadata
    metadata_otherwise = base.load_sharded_metadata

    def reader(checkpoint_dir: str | os.PathLike[str]) -> Reader | None:
        where = os.fspath(checkpoint_dir)
        # A sealed or signed one is taken whatever lies beside it: anybody could put files there.
        is_taken = keys.refuses_others and is_checkpoint(where)
        if not is_taken and (_is_url(where) or directory.holds_dcp(where, keys)):
            keys.refuse_clear(where, "a checkpoint of Megatron-Core's own")
            return None
        check_backend(where)
        return Reader(where, options, keys)

    @wraps(load_otherwise)
    def load(
        self: Any,
        sharded_state_dict: Any,
        checkpoint_dir: str | os.PathLike[str],
        *further: Any,
        **settings: Any,
    ) -> Any:
        retention.patch()
        opened = reader(checkpoint_dir)
        if opened is None:
            loaded = load_otherwise(self, sharded_state_dict, checkpoint_dir, *further, **settings)
        else:
            with opened:
                loaded = opened.load(sharded_state_dict)
        # Loads in parallel exchange tensors next.
        agreement.wait()
        return loaded

    @wraps(tensors_otherwise)
    def load_tensors_metadata(
        self: Any, checkpoint_dir: str | os.PathLike[str], *metadata: Any, **further: Any
    ) -> Any:
        # With metadata it is called of the other method, for a checkpoint of Megatron-Core's.
        opened = None if metadata or further else reader(checkpoint_dir)
        if opened is None:
            return tensors_otherwise(self, checkpoint_dir, *metadata, **further)
        with opened:
            return opened.tensors_metadata()

    @wraps(metadata_otherwise)
    def load_sharded_metadata(self: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        opened = reader(checkpoint_dir)
        if opened is None:
            return metadata_otherwise(self, checkpoint_dir)
        with opened:
            return opened.metadata()

    return {
        "load": agreement.ours(load, keys),
        "load_tensors_metadata": load_tensors_metadata,
        "load_sharded_metadata": load_sharded_metadata,
    }


class SaveStrategy(theirs.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves through Penstock, as ``sharded_strategy`` or ``checkpointing_context``'s strategy.

    Args:
        options: Settings of the I/O; None for ``Options()``.
        sealing: For whom checkpoints are sealed; see `penstock.save`. None for the key that
            ``PENSTOCK_RECIPIENTS`` names, if any.
        sign: Private keys that sign checkpoints; see `penstock.save`.
        settings: Those of Megatron-Core's strategy, which concern files that this one never writes.

    Raises:
        KeyFileError: A text or a file is no key.

    Example:
        ```python
        context = {"save_strategy": SaveStrategy()}
        save_checkpoint(..., checkpointing_context=context)
        ```
    """

    def __init__(
        self,
        *,
        options: Options | None = None,
        sealing: Sealing | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__("torch_dist", 1, **settings)
        keys = keys_of(sealing, None, sign=sign)
        install()
        for name, method in saving(theirs.TorchDistSaveShardedStrategy, options, keys).items():
            setattr(self, name, method.__get__(self))


class LoadStrategy(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads through Penstock, or through Megatron-Core what it has saved itself.

    Args:
        options: Settings of the I/O; None for ``Options()``.
        identities: Keys that open sealed checkpoints; see `penstock.load`. Clear ones are then
            refused, also those of Megatron-Core's own.
        signed_by: Public keys of which one must have signed the checkpoint; see `penstock.load`.
        settings: Those of Megatron-Core's strategy, for checkpoints of its own.

    Raises:
        KeyFileError: A text or a file is no key.
    """

    def __init__(
        self,
        *,
        options: Options | None = None,
        identities: Identities | Key | Iterable[Key] | None = None,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        keys = keys_of(None, identities, signed_by=signed_by)
        install()
        for name, method in loading(theirs.TorchDistLoadShardedStrategy, options, keys).items():
            setattr(self, name, method.__get__(self))


def keys_of(
    sealing: Sealing | None,
    identities: Identities | Key | Iterable[Key] | None,
    **further: Any,
) -> SealingKeys:
    """Returns the keys of a strategy; those that the environment names, if there are none."""
    keys = SealingKeys.of(sealing, identities, **further)
    if sealing is not None:
        return keys
    named = SealingKeys.of_environment()
    return keys._replace(sealing=named.sealing, identities=keys.identities or named.identities)


def install() -> None:
    """Puts into Megatron-Core what saves and loads by any of Penstock's strategies need."""
    structure.compare()
    agreement.install()
    common_state.install(load_common)


class _ClearSaves(theirs.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves without keys, for a trial."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        for name, method in saving(theirs.TorchDistSaveShardedStrategy, None, NO_KEYS).items():
            setattr(self, name, method.__get__(self))


class _ClearLoads(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads without keys, for a trial."""

    def __init__(self) -> None:
        super().__init__()
        for name, method in loading(theirs.TorchDistLoadShardedStrategy, None, NO_KEYS).items():
            setattr(self, name, method.__get__(self))
