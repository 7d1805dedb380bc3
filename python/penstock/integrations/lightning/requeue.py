"""Handles Slurm's signal that a job is about to end: a last save, after which it is queued again.

Lightning saves in the signal handler, which runs wherever a rank happens to be. One rank would wait
at the barrier of the save while another waits for it to reduce gradients: a deadlock. So the
handler only notes the signal, and all ranks save after the batch.

While a trainer validates, tests or predicts, ranks do not synchronize after each batch. There the
first rank saves alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn

from penstock.integrations.lightning.connector import io_of

if TYPE_CHECKING:
    from collections.abc import Callable


class SignalConnector(_SignalConnector):
    """Lightning's connector; for a trainer that saves through `PenstockIO` it never deadlocks.

    Attributes:
        is_alone: Whether this rank saves without the others, which may be anywhere.
    """

    is_alone = False
    _requeue: _Requeue | None = None

    def register_signal_handlers(self) -> None:
        """Starts to listen for signals."""
        super().register_signal_handlers()
        trainer: Any = self.trainer
        environment = trainer._accelerator_connector.cluster_environment
        is_requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if is_requeued and trainer.state.fn == TrainerFn.FITTING and io_of(trainer) is not None:
            self._requeue = _Requeue(super()._slurm_sigusr_handler_fn)
            # Behind the callbacks that save: a checkpoint records the ones before it.
            trainer.callbacks.append(self._requeue)

    def teardown(self) -> None:
        """Restores the previous signal handlers."""
        super().teardown()
        if self._requeue is not None:
            trainer: Any = self.trainer
            trainer.callbacks.remove(self._requeue)
            self._requeue = None

    def _slurm_sigusr_handler_fn(self, signum: Any, frame: Any) -> None:
        if self._requeue is not None and not self._requeue.is_over:
            self._requeue.signal = signum
        elif io_of(self.trainer) is None:
            super()._slurm_sigusr_handler_fn(signum, frame)
        else:
            self._save_alone(signum, frame)

    def _save_alone(self, signum: Any, frame: Any) -> None:
        own = vars(self.trainer.strategy)
        self.is_alone = True
        # The save would wait for the other ranks there.
        own["barrier"] = _no_barrier
        try:
            super()._slurm_sigusr_handler_fn(signum, frame)
        finally:
            del own["barrier"]
            self.is_alone = False


class _Requeue(Callback):
    """Makes all ranks of a run save once the signal has reached one of them.

    ``save`` is Lightning's handler, which saves and queues the job again.

    Attributes:
        signal: The number of the signal; None before it arrives and after it was handled.
        is_over: Whether training has ended, so that the signal is handled otherwise.
    """

    def __init__(self, save: Callable[[Any, Any], None]) -> None:
        self._save = save
        self.signal: int | None = None
        self.is_over = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        # Accumulated gradients would not be saved.
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self._save_if_asked(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.is_over = True
        self._save_if_asked(trainer)

    def _save_if_asked(self, trainer: Any) -> None:
        # Lightning waits for the first rank before each batch anyway, so this reduction is cheap.
        if trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False):
            self._save(self.signal, None)
            # By now the signal has reached all ranks.
            self.signal = None


def _no_barrier(*_: Any, **__: Any) -> None:
    pass
