"""`Checkpoints`: pytrees by training step."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import jax

from penstock import CheckpointStore
from penstock.checkpoint.saver import Closing
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockError,
    PenstockWarning,
    RankError,
    TamperedError,
)
from penstock.integrations.jax import fitting
from penstock.integrations.jax.background import Background
from penstock.integrations.jax.loading import load
from penstock.integrations.jax.processes import MultiProcessSave, from_all, from_first
from penstock.integrations.jax.trees import to_state
from penstock.plugin import Frozen, SealingKeys

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from penstock import Options, PendingSave
    from penstock.integrations.jax.background import PendingMultiProcessSave
    from penstock.reports import SaveReport
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys


class Checkpoints(Closing):
    """A directory with one pytree per training step, like Orbax's ``CheckpointManager``.

    Args:
        root: The directory; the first save creates it.
        keep_last: After each save, delete all complete steps but this many of the newest; never
            before the new one is on stable storage. None keeps all.
        keep_every: Also keep every step that is a multiple of this.
        options: Settings of the I/O; None for ``Options()``.
        sealing: For whom each step is sealed; see `penstock.save`.
        identities: Keys that open sealed steps; see `penstock.load`. With either, clear steps are
            refused.
        sign: Private keys that sign each step while it is saved; see `penstock.save`.
        signed_by: Public keys of which one must have signed a step; see `penstock.load`.

    Attributes:
        store: The underlying `CheckpointStore`, with `verify`, `protect`, `delete`, …

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from penstock.integrations.jax import Checkpoints
        >>> with Checkpoints(tempfile.mkdtemp(), keep_last=2) as checkpoints:
        ...     state = {"w": jnp.zeros(3)}
        ...     step, state = checkpoints.resume(state) or (0, state)
        ...     for step in range(step + 1, 4):
        ...         state = {"w": state["w"] + 1}
        ...         pending = checkpoints.save_async(step, state)
        >>> checkpoints.steps()
        [2, 3]
        >>> checkpoints.load(like=state)
        {'w': Array([3., 3., 3.], dtype=float32)}
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        options: Options | None = None,
        sealing: Sealing | None = None,
        identities: Identities | Key | Iterable[Key] | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> None:
        self._keys = SealingKeys.of(sealing, identities, sign=sign, signed_by=signed_by)
        # JAX's processes are not ranks of `torch.distributed`.
        self.store = CheckpointStore(
            root,
            keep_last=keep_last,
            keep_every=keep_every,
            options=options,
            no_dist=jax.process_count() > 1,
            **self._keys.opening,
            **self._keys.closing,
        )
        self._options = options
        self._background = Background()

    def save(
        self,
        step: int,
        pytree: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> SaveReport:
        """Saves a pytree as a step, and waits; see `penstock.integrations.jax.save`."""
        fitting.try_out()
        if jax.process_count() == 1:
            state = to_state(pytree, copies=False)
            return self.store.save(step, state, metadata=metadata, overwrite=overwrite)
        self.wait()
        return self._multi_process_save(step, pytree, metadata, overwrite, copies=False).run()

    def save_async(
        self,
        step: int,
        pytree: Any,
        *,
        copy: bool = False,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave | PendingMultiProcessSave:
        """Saves a pytree as a step in the background; see `penstock.integrations.jax.save_async`.

        The error of a failed save is raised by `PendingSave.result`, or else by the next `save`,
        `save_async`, `wait` or `close`.
        """
        fitting.try_out()
        if jax.process_count() > 1:
            self.wait()
            save = self._multi_process_save(step, pytree, metadata, overwrite, copies=True)
            return self._background.begin(save)
        if copy:
            state = to_state(pytree, copies=False)
            return self.store.save_async(step, state, metadata=metadata, overwrite=overwrite)
        state = Frozen(to_state(pytree, copies=True))
        return self.store.save_async(step, state, lazy=True, metadata=metadata, overwrite=overwrite)

    def _multi_process_save(
        self,
        step: int,
        pytree: Any,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        *,
        copies: bool,
    ) -> MultiProcessSave:
        """A save of several processes."""
        return MultiProcessSave(
            self.store.path(step),
            pytree,
            overwrite=overwrite,
            step=step,
            metadata=metadata,
            options=self._options,
            copies=copies,
            after=self.store.retain,
            keys=self._keys,
        )

    def load(
        self, step: int | None = None, like: Any = None, *, keys: str | Iterable[str] | None = None
    ) -> Any:
        """Loads a step; None for the newest complete one.

        Raises:
            CheckpointNotFoundError: There is no complete step, or not the requested one.
            CorruptCheckpointError: It is damaged; `resume` goes back to the newest good one.
            StateMismatchError: ``like`` does not fit.
            PenstockError: As for `penstock.integrations.jax.load`.
        """
        self.wait()
        if step is None:
            step = self.store.latest()
            if step is None:
                raise CheckpointNotFoundError(
                    f"{self.store.root}: no complete checkpoint is there", path=self.store.root
                )
        path = self.store.path(step)
        return load(path, like, keys=keys, options=self._options, **self._keys.opening)

    def resume(self, like: Any) -> tuple[int, Any] | None:
        """Loads the newest good step; returns its number and pytree, or None if there are no steps.

        A step that proves to be damaged while it is read is skipped with a `PenstockWarning`, and
        quarantined once a good one is found, so that it can be saved again. With several processes
        all call this, and load the newest step that is good for all of them.

        Args:
            like: A pytree of the same structure, such as the state of a new run; see
                `penstock.integrations.jax.load`.

        Raises:
            CorruptCheckpointError: There are steps, and none is good.
            TamperedError: Somebody without the key has changed a sealed step.
            StateMismatchError: ``like`` does not fit.
            RankError: Another process could not load it.
        """
        self.wait()
        steps = from_first(self.store.root, self.store.steps())
        passed_over: list[int] = []
        for step in reversed(steps):
            loaded, damage = self._try(step, like)
            if damage is None:
                if passed_over:
                    self._quarantine(passed_over)
                return step, loaded
            warnings.warn(f"step {step} is passed over: {damage}", PenstockWarning, stacklevel=2)
            passed_over.insert(0, step)
        if steps or self.store.quarantined():
            raise CorruptCheckpointError(
                f"{self.store.root}: none of its checkpoints is good: `penstock salvage` takes out "
                "what is intact; to begin anew in spite of them, use an empty directory",
                path=self.store.root,
            )
        return None

    def _try(self, step: int, like: Any) -> tuple[Any, str | None]:
        """A step's pytree; and the damage in it, if any process has found some."""
        path = self.store.path(step)
        loaded, own = None, None
        try:
            loaded = load(path, like, options=self._options, **self._keys.opening)
        except Exception as error:
            own = error
        # Tampering must not choose the step of the run.
        is_damage = isinstance(
            own, CorruptCheckpointError | IncompleteCheckpointError
        ) and not isinstance(own, TamperedError)
        told = from_all(path, None if own is None else (is_damage, str(own)))
        for process, one in enumerate(told):
            if one is not None and not one[0]:
                raise own or RankError(f"process {process} cannot resume: {one[1]}", rank=process)
        return loaded, next((one[1] for one in told if one is not None), None)

    def _quarantine(self, steps: list[int]) -> None:
        """Quarantines damaged steps, so that they can be saved again; the newest last."""
        for step in steps if jax.process_index() == 0 else ():
            # A step that one process could not read may still be good; the store may be read-only.
            with contextlib.suppress(PenstockError):
                if not self.store.verify(step).ok:
                    self.store.quarantine(step)
        # Afterwards all processes see the same steps.
        from_all(self.store.root, None)

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return self.store.steps()

    def latest(self) -> int | None:
        """The newest complete step that is not known to be damaged; None if there is none."""
        return self.store.latest()

    def wait(self) -> None:
        """Waits for the last `save_async`; raises its error if that was not raised before."""
        self.store.wait()
        self._background.wait()

    def close(self) -> None:
        """Waits as `wait` does, and releases the memory."""
        try:
            self._background.wait()
        finally:
            self.store.close()
