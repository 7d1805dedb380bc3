"""`enable`: makes Megatron-Core save and load ``torch_dist`` checkpoints through Penstock.

``pretrain_gpt.py``, Megatron Bridge and what stands on them make the strategies of
`megatron.core.dist_checkpointing` themselves, so the methods of its two classes are replaced.
`fitting.check` looks first whether they are as expected.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as theirs

from penstock.integrations.megatron import clear_files, common_state, retention
from penstock.integrations.megatron.strategies import (
    LoadStrategy,
    SaveStrategy,
    install,
    keys_of,
    loading,
    saving,
)
from penstock.plugin import SealingKeys, is_checkpoint, to_native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys

_MISSING: Any = object()


class _Patch(NamedTuple):
    """A replaced attribute.

    Attributes:
        owner: A class or module.
        name: The attribute.
        before: Its own value before; `_MISSING` if it had inherited it.
    """

    owner: Any
    name: str
    before: Any


class Enabled:
    """The active replacements; as a context manager, it takes them back at the end of the block."""

    def __init__(self, options: Options | None, datasets: bool, keys: SealingKeys) -> None:
        self._patches: list[_Patch] = []
        for owner, name, ours in _replacements(options, datasets, keys):
            self._patches.append(_Patch(owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, ours)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # A second call of `enable` has taken back the first.
        if _enabled is self:
            disable()

    def take_back(self) -> None:
        """Makes Megatron-Core save and load as before."""
        for owner, name, before in self._patches:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_enabled: Enabled | None = None


def enable(
    *,
    options: Options | None = None,
    datasets: bool = False,
    sealing: Sealing | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> Enabled:
    """Makes Megatron-Core save and load through Penstock.

    Call it on every rank, before the first save or load; `python -m penstock.megatron` does it for
    a program that is not edited. Checkpoints that Megatron-Core has saved itself are loaded by it
    as before, and so is everything at a URL (``msc://…``). Another call replaces the settings of
    the one before.

    Args:
        options: Settings of the I/O of checkpoints; None for ``Options()``.
        datasets: Whether Penstock also reads the indexed datasets that are opened from now on, past
            the page cache, and the samples of GPT datasets ahead of their use.
        sealing: For whom checkpoints are sealed; see `penstock.save`. Clear ones are refused then.
            None for the key that ``PENSTOCK_RECIPIENTS`` names, if any.
        identities: Keys that open sealed checkpoints; see `penstock.load`. Clear ones are refused
            then, also those of Megatron-Core's own.
        sign: Private keys that sign checkpoints while they are saved; see `penstock.save`.
        signed_by: Public keys of which one must have signed a checkpoint; see `penstock.load`.

    Returns:
        A context manager that takes it back, as `disable` does.

    Raises:
        MissingDependencyError: Megatron-Core is older than 0.13, or has changed what is replaced.
            With a version newer than those tested the first save can raise it, too, as it first
            saves and loads a tiny state on trial.
            With keys that seal, a save of Megatron-LM that would leave something clear raises
            `CannotSealError` before it writes.
        KeyFileError: A text or a file is no key.

    Example:
        ```python
        from penstock.integrations.megatron import enable

        enable()
        pretrain(...)
        ```
    """
    global _enabled
    to_native(options)
    keys = keys_of(sealing, identities, sign=sign, signed_by=signed_by)
    disable()
    # Stays: strategies that were made meanwhile are used after `disable`, too.
    install()
    retention.patch()
    clear_files.patch(keys)
    common_state.use_keys(keys)
    _enabled = Enabled(options, datasets, keys)
    _register(options, keys)
    return _enabled


def disable() -> None:
    """Takes back `enable`. Does nothing without it."""
    global _enabled
    if _enabled is not None:
        _enabled.take_back()
        retention.take_back()
        clear_files.take_back()
        common_state.use_keys(None)
        _enabled = None


def _replacements(
    options: Options | None, datasets: bool, keys: SealingKeys
) -> Iterator[tuple[Any, str, Any]]:
    save, load = theirs.TorchDistSaveShardedStrategy, theirs.TorchDistLoadShardedStrategy
    for owner, methods in (
        (save, saving(save, options, keys)),
        (load, loading(load, options, keys)),
    ):
        for name, method in methods.items():
            yield owner, name, method
    yield serialization, "save_config", _keeping(serialization.save_config)
    if datasets:
        # Imported for those alone who read datasets: checkpoints do not depend on them.
        from penstock.integrations.megatron.datasets import indexed_dataset

        yield from indexed_dataset.replacements()


def _keeping(save_config: Callable[..., None]) -> Callable[..., None]:
    @wraps(save_config)
    def save(config: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        # The commit has written it. Megatron-Core would empty the file before it fills it.
        if not is_checkpoint(os.fspath(checkpoint_dir)):
            save_config(config, checkpoint_dir)

    return save


def _register(options: Options | None, keys: SealingKeys) -> None:
    """Registers the strategies by name, where there is a registry: before Megatron-Core 0.17."""
    try:
        from megatron.core.dist_checkpointing.strategies.base import (
            StrategyAction,
            register_default_strategy,
        )
    except ImportError:
        return
    for action, strategy in (
        (StrategyAction.SAVE_SHARDED, SaveStrategy(options=options, **keys.closing)),
        (StrategyAction.LOAD_SHARDED, LoadStrategy(options=options, **keys.opening)),
    ):
        register_default_strategy(action, "penstock", 1, strategy)
