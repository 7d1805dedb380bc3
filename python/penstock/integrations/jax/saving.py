"""`save`, `save_async`: save a pytree as a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from penstock import Saver
from penstock.integrations.jax import fitting
from penstock.integrations.jax.background import Background
from penstock.integrations.jax.processes import MultiProcessSave
from penstock.integrations.jax.trees import to_state
from penstock.plugin import Frozen, SealingKeys

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from penstock import PendingSave
    from penstock.integrations.jax.background import PendingMultiProcessSave
    from penstock.reports import SaveReport
    from penstock.sealing import Sealing
    from penstock.signing import SignatureKey, SigningKeys

_saver = Saver()
_background = Background()


def save(
    path: str | os.PathLike[str],
    pytree: Any,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    sealing: Sealing | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
) -> SaveReport:
    """Saves a pytree durably: when this returns, it survives a crash or power cut.

    Waits for the last `save_async` first. With several processes (`jax.distributed`) all call this
    with the same pytree, and save one checkpoint on a file system that they share.

    Args:
        path: The checkpoint's directory; created if missing, with its parents.
        pytree: Any pytree; see `penstock.integrations.jax.trees` for the stored form.
        overwrite: Replace a complete checkpoint at the path. The old one can be loaded until the
            new one is committed.
        step: The training step, recorded beside the state.
        metadata: Plain JSON to store with it, readable with `penstock.inspect`.
        sealing: For whom the checkpoint is sealed; see `penstock.save`. All processes pass it, or
            none does.
        sign: Private keys that sign the checkpoint while it is saved; see `penstock.save`. All
            processes pass them, or none does.

    Returns:
        A report of the save; with several processes, of this one's part.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
        UnsupportedStateError: A leaf cannot be stored, such as an array deleted because its buffer
            was donated; the message names it.
        RankError: Another process failed, is missing or has another pytree.
        StorageError: The operating system failed an operation: disk full, read-only, …
        PenstockError: The error of the last `save_async`, if it was not raised before.

    Example:
        >>> import jax.numpy as jnp, penstock, tempfile
        >>> from penstock.integrations import jax as pj
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = pj.save(path, {"w": jnp.arange(3)}, step=7)
        >>> penstock.load(path)
        {'w': array([0, 1, 2], dtype=int32)}
    """
    fitting.try_out()
    keys = SealingKeys.of(sealing, sign=sign)
    if jax.process_count() > 1:
        wait()
        return MultiProcessSave(
            path, pytree, overwrite=overwrite, step=step, metadata=metadata, keys=keys
        ).run()
    _saver.sealing, _saver.signing = keys.sealing, keys.signing
    state = to_state(pytree, copies=False)
    return _saver.save(path, state, overwrite=overwrite, step=step, metadata=metadata)


def save_async(
    path: str | os.PathLike[str],
    pytree: Any,
    *,
    copy: bool = False,
    overwrite: bool = False,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    sealing: Sealing | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
) -> PendingSave | PendingMultiProcessSave:
    """Saves a pytree in the background, without copying JAX arrays on the host.

    A JAX array never changes, and its memory stays while it is written: a jitted step to which it
    is donated gets other memory for its result. So training goes on at once. Arrays on an
    accelerator are copied to the host at the call, and so are leaves that are not JAX's.

    Waits for the last save first. The error of a failed save is raised by `PendingSave.result`, or
    else by the next `save`, `save_async` or `wait`.

    Args:
        path: The checkpoint's directory; created if missing, with its parents.
        pytree: Any pytree.
        copy: Whether to copy all arrays at the call, into memory that is kept for the next save. A
            step to which they are donated then needs no other memory for its result. Has no effect
            with several processes.
        overwrite: Replace a complete checkpoint at the path.
        step: The training step, recorded beside the state.
        metadata: Plain JSON to store with it.
        sealing: For whom the checkpoint is sealed; see `penstock.save`.
        sign: Private keys that sign the checkpoint; see `save`.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
        UnsupportedStateError: A leaf cannot be stored; the message names it.
        PenstockError: The error of the last save, if it was not raised before.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from penstock.integrations import jax as pj
        >>> pending = pj.save_async(tempfile.mkdtemp() + "/ckpt", {"w": jnp.ones(3)})
        >>> pending.result().tensor_bytes
        12
    """
    fitting.try_out()
    keys = SealingKeys.of(sealing, sign=sign)
    if jax.process_count() > 1:
        wait()
        return _background.begin(
            MultiProcessSave(
                path,
                pytree,
                overwrite=overwrite,
                step=step,
                metadata=metadata,
                copies=True,
                keys=keys,
            )
        )
    _saver.sealing, _saver.signing = keys.sealing, keys.signing
    if copy:
        state = to_state(pytree, copies=False)
        return _saver.save_async(path, state, overwrite=overwrite, step=step, metadata=metadata)
    state = Frozen(to_state(pytree, copies=True))
    return _saver.save_async(
        path, state, lazy=True, overwrite=overwrite, step=step, metadata=metadata
    )


def wait() -> None:
    """Waits for the last `save_async`, if one is running.

    Raises:
        PenstockError: It failed, and its error was not raised before.
    """
    _saver.wait()
    _background.wait()
