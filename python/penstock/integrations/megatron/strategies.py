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
from penstock.integrations.megatron import agreement, retention, structure
from penstock.integrations.megatron.loading import Reader, check_backend
from penstock.integrations.megatron.saving import Writer
from penstock.integrations.megatron.trying import try_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.options import Options

Methods = dict[str, "Callable[..., Any]"]


def saving(base: Any, writer: Writer) -> Methods:
    """The methods of a save strategy.

    Args:
        base: The class whose methods serve what is not on a file system.
        writer: Saves the rest.
    """

    def start(checkpoint_dir: str | os.PathLike[str]) -> None:
        agreement.start_strategy()
        retention.patch()
        root = os.path.dirname(os.path.abspath(checkpoint_dir))
        try_out(root, SaveStrategy, LoadStrategy)

    # Taken now: `enable` puts these methods in their place.
    save_otherwise, save_async_otherwise = base.save, base.async_save

    @wraps(save_otherwise)
    def save(
        self: Any, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], **further: Any
    ) -> None:
        if _is_url(checkpoint_dir):
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
            return save_async_otherwise(
                self, sharded_state_dict, checkpoint_dir, *strategy, **further
            )
        # An error reaches the other ranks only before the start.
        request = _request_class(*strategy, **further)
        start(checkpoint_dir)
        return writer.save_async(sharded_state_dict, checkpoint_dir, request)

    return {"save": agreement.ours(save), "async_save": async_save}


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


def loading(base: Any, options: Options | None) -> Methods:
    """Returns the methods, by name, that replace those of a load strategy.

    Args:
        base: Megatron-Core's strategy, which still loads the checkpoints that Penstock did not
            write.
        options: Settings of the I/O.
    """
    load_otherwise, tensors_otherwise = base.load, base.load_tensors_metadata
    metadata_otherwise = base.load_sharded_metadata

    def reader(checkpoint_dir: str | os.PathLike[str]) -> Reader | None:
        if _is_url(checkpoint_dir) or directory.holds_dcp(os.fspath(checkpoint_dir)):
            return None
        check_backend(os.fspath(checkpoint_dir))
        return Reader(checkpoint_dir, options)

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
        "load": agreement.ours(load),
        "load_tensors_metadata": load_tensors_metadata,
        "load_sharded_metadata": load_sharded_metadata,
    }


class SaveStrategy(theirs.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves through Penstock, as ``sharded_strategy`` or ``checkpointing_context``'s strategy.

    Args:
        options: Settings of the I/O; None for ``Options()``.
        settings: Those of Megatron-Core's strategy, which concern files that this one never writes.

    Example:
        ```python
        context = {"save_strategy": SaveStrategy()}
        save_checkpoint(..., checkpointing_context=context)
        ```
    """

    def __init__(self, *, options: Options | None = None, **settings: Any) -> None:
        super().__init__("torch_dist", 1, **settings)
        structure.compare()
        agreement.install()
        for name, method in saving(theirs.TorchDistSaveShardedStrategy, Writer(options)).items():
            setattr(self, name, method.__get__(self))


class LoadStrategy(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads through Penstock, or through Megatron-Core what it has saved itself.

    Args:
        options: Settings of the I/O; None for ``Options()``.
        settings: Those of Megatron-Core's strategy, for checkpoints of its own.
    """

    def __init__(self, *, options: Options | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        agreement.install()
        for name, method in loading(theirs.TorchDistLoadShardedStrategy, options).items():
            setattr(self, name, method.__get__(self))
