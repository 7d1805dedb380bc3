"""Slurm's signal that a job is about to end: a last save, after which the job is queued again.

Lightning saves in the handler of the signal, which runs wherever a rank happens to be. One would
wait at the barrier of the save while another waits for it to reduce gradients, and neither would
go on. So the handler notes the signal, and all ranks save when a batch has ended.

Where a trainer validates, tests or predicts, ranks have nothing in common after each batch. There
the first one saves for itself.
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
    """Lightning's connector; that of a trainer that saves through `PenstockIO` never hangs.

    Attributes:
        is_alone: Whether this rank saves without the others, which may be anywhere.
    """

    is_alone = False
    _requeue: _Requeue | None = None

    def register_signal_handlers(self) -> None:
        """Begins to listen for signals."""
        super().register_signal_handlers()
        trainer: Any = self.trainer
        environment = trainer._accelerator_connector.cluster_environment
        is_requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if is_requeued and trainer.state.fn == TrainerFn.FITTING and io_of(trainer) is not None:
            self._requeue = _Requeue(super()._slurm_sigusr_handler_fn)
            # Behind those that save: a checkpoint knows of the ones before it.
            trainer.callbacks.append(self._requeue)

    def teardown(self) -> None:
        """Gives the signals back to whoever had them before."""
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
        # Whoever saves waits for the others there.
        own["barrier"] = _go_on
        try:
            super()._slurm_sigusr_handler_fn(signum, frame)
        finally:
            del own["barrier"]
            self.is_alone = False


class _Requeue(Callback):
    """Has all ranks of a run save once the signal has come to one of them.

    Args:
        save: Lightning's handler, which saves and queues the job again.

    Attributes:
        signal: The number of the signal; None where none has come, or all is done.
        is_over: Whether nobody asks any more, as training has ended.
    """

    def __init__(self, save: Callable[[Any, Any], None]) -> None:
        self._save = save
        self.signal: int | None = None
        self.is_over = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        # Gradients that are being accumulated would not be saved.
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self._save_if_asked(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.is_over = True
        self._save_if_asked(trainer)

    def _save_if_asked(self, trainer: Any) -> None:
        # Lightning waits for the first rank before each batch, so one more question is cheap.
        if trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False):
            self._save(self.signal, None)
            # It has come to all of them meanwhile.
            self.signal = None


def _go_on(*_: Any, **__: Any) -> None:
    pass
