"""`attach`: makes an existing trainer save with Penstock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.integrations.transformers.mixin import PenstockTrainerMixin
from penstock.integrations.transformers.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing

T = TypeVar("T")


def attach(
    trainer: T,
    *,
    background: bool = False,
    lazy: bool = False,
    on_error: Literal["raise", "warn"] = "raise",
    pickled: tuple[str, ...] = (),
    trust: bool = False,
    options: Options | None = None,
    save_every: int | Literal["auto"] | None = None,
    failures_per_hour: float | None = None,
    save_seconds_max: float = 3600.0,
    sealing: Sealing | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
) -> T:
    """Makes a trainer save and load its checkpoints with Penstock.

    The trainer's class is replaced by one that puts `PenstockTrainerMixin` before it.

    Args:
        trainer: A `transformers.Trainer`, or an instance of a derived class.
        background: See `Settings`, also for the arguments below.
        lazy: Whether the state is copied during the next step.
        on_error: ``"raise"`` or ``"warn"``.
        pickled: Parts stored as pickled bytes.
        trust: Whether pickled bytes are loaded.
        options: Settings of the I/O.
        save_every: Steps between two saves, ``"auto"``, or None for the Trainer's own strategy.
        failures_per_hour: Failures of the whole job.
        save_seconds_max: The longest time between two saves.
        sealing: For whom checkpoints are sealed.
        identities: Keys that open sealed checkpoints.

    Returns:
        The trainer.

    Raises:
        TypeError: It is no Trainer.
        UnsupportedStateError: Its backend saves checkpoints by itself.
        ValueError: An argument has an unsupported value.
        CannotSealError: With ``sealing``, something would stay clear.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise TypeError(f"attach() takes a transformers.Trainer, not a {type(trainer).__name__}")
    settings = Settings(
        background=background,
        lazy=lazy,
        on_error=on_error,
        pickled=tuple(pickled),
        trust=trust,
        options=options,
        save_every=save_every,
        failures_per_hour=failures_per_hour,
        save_seconds_max=save_seconds_max,
        sealing=sealing,
        identities=identities,
    )
    changed: Any = trainer
    kind = type(trainer)
    if not issubclass(kind, PenstockTrainerMixin):
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        # Keeps the name, which trainers write into model cards and logs.
        changed.__class__ = type(kind.__name__, (PenstockTrainerMixin, kind), names)
    changed.penstock_settings = settings
    changed.penstock_saves = None
    changed.check_penstock()
    return trainer
