"""`save`, `save_async`: a pytree into a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from penstock import Saver
from penstock.integrations.jax import fitting
from penstock.integrations.jax.background import Background
from penstock.integrations.jax.processes import SaveTogether
from penstock.integrations.jax.trees import to_state
from penstock.tensors.marks import Frozen

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from penstock import PendingSave, SaveReport
    from penstock.integrations.jax.background import TogetherPending

_saver = Saver()
_background = Background()


def save(
    path: str | os.PathLike[str],
    pytree: Any,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Saves a pytree durably: when this returns, a crash or power cut cannot take it away.

    Waits for the last `save_async` first. Of several processes (`jax.distributed`) all call this
    with the same pytree, and make one checkpoint on a file system that they share.

    Args:
        path: The checkpoint's directory; made if missing, its parents too.
        pytree: Any pytree: see `penstock.integrations.jax.trees` for what becomes of it.
        overwrite: Replace a complete checkpoint at the path. It stays loadable until the new one
            is committed.
        step: The training step, recorded beside the state.
        metadata: A note of plain JSON, readable with `penstock.inspect`.

    Returns:
        What was written and how; of several processes, by this one.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
        UnsupportedStateError: A leaf cannot be stored, such as an array that is deleted since its
            buffer was donated; the message names it.
        RankError: Another process failed, is not there or has another pytree.
        StorageError: The operating system failed an operation: disk full, read-only, …
        PenstockError: The error of the last `save_async`, if nobody has seen it.

    Example:
        >>> import jax.numpy as jnp, penstock, tempfile
        >>> from penstock.integrations import jax as pj
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = pj.save(path, {"w": jnp.arange(3)}, step=7)
        >>> penstock.load(path)
        {'w': array([0, 1, 2], dtype=int32)}
    """
    fitting.try_out()
    if jax.process_count() > 1:
        wait()
        return SaveTogether(path, pytree, overwrite=overwrite, step=step, metadata=metadata).run()
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
) -> PendingSave | TogetherPending:
    """Saves a pytree in the background, of which nothing on the host is copied at the call.

    An array of JAX never changes, and its memory stays while it is being written: a step that it is
    donated to gets other memory for its result. So training goes on at once. Arrays on an
    accelerator are copied to the host at the call, and so are leaves that are not of JAX.

    Waits for the last save first. Its error, and that of any save in the background, comes from
    `PendingSave.result`, or else from the next `save`, `save_async` or `wait`.

    Args:
        path: The checkpoint's directory; made if missing, its parents too.
        pytree: Any pytree.
        copy: Whether to copy arrays at the call all the same, into memory that is kept for the next
            save. A step that they are donated to then needs no other memory for its result. Of
            several processes each saves without.
        overwrite: Replace a complete checkpoint at the path.
        step: The training step, recorded beside the state.
        metadata: A note of plain JSON.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
        UnsupportedStateError: A leaf cannot be stored; the message names it.
        PenstockError: The error of the last save, if nobody has seen it.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from penstock.integrations import jax as pj
        >>> pending = pj.save_async(tempfile.mkdtemp() + "/ckpt", {"w": jnp.ones(3)})
        >>> pending.result().tensor_bytes
        12
    """
    fitting.try_out()
    if jax.process_count() > 1:
        wait()
        return _background.begin(
            SaveTogether(
                path, pytree, overwrite=overwrite, step=step, metadata=metadata, copies=True
            )
        )
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
        PenstockError: Its error, if nobody has seen it.
    """
    _saver.wait()
    _background.wait()
