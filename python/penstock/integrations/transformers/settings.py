"""`Settings`: how a trainer saves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from penstock.integrations.first_rank import from_first
from penstock.plugin import PacedRun, SealingKeys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing

PARTS = ("model", "optimizer", "scheduler", "scaler")
"""Parts of a trainer that have a state, by their names in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a trainer saves its checkpoints, and what it loads.

    Attributes:
        background: Whether training goes on while a checkpoint is written. The state is copied at
            the save. Callbacks are notified of a save (``on_save``) before it is durable, unless
            one of transformers or Ray uploads checkpoints: then each save is waited for.
        lazy: Whether a background save copies the state while the next step computes its
            gradients; the optimizer waits for it. If anything else, such as a callback, changes
            weights meanwhile, the save fails with an error that says so.
        on_error: What a save does if the storage fails, as on a full disk: ``"raise"`` ends the
            training; ``"warn"`` goes on and tries again at the next save.
        pickled: Parts whose state is pickled, if it cannot be stored otherwise: ``"optimizer"``,
            ``"scheduler"`` or ``"scaler"``.
        trust: Whether pickled bytes of a checkpoint are loaded, which can run any code.
        options: Settings of the I/O; None for ``penstock.Options()``.
        save_every: Steps between two saves, or ``"auto"``: as many as lose least time to saves and
            failures, measured as by `penstock.CheckpointStore.due`; the last step is saved as well.
            It takes ``save_strategy="no"``, so that the Trainer saves at no other steps. None for
            the Trainer's own strategy.
        failures_per_hour: Failures of the whole job, for ``save_every="auto"``. None for those that
            ``history.jsonl`` in the output directory counts, beginning with published rates.
        save_seconds_max: With ``save_every="auto"``, the longest time between two saves.
        sealing: For whom checkpoints are sealed; see `penstock.save`. The Trainer's small files
            are sealed with them, so ``from_pretrained`` does not load the directories.
        identities: Keys that open sealed checkpoints; see `penstock.load`. With either, a run
            resumes from no clear checkpoint.
        keys: Both, for the plug-in.

    Raises:
        ValueError: An attribute has an unsupported value.
        KeyFileError: An identity is no secret key.
    """

    background: bool = False
    lazy: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    pickled: tuple[str, ...] = ()
    trust: bool = False
    options: Options | None = None
    save_every: int | Literal["auto"] | None = None
    failures_per_hour: float | None = None
    save_seconds_max: float = 3600.0
    sealing: Sealing | None = None
    identities: Identities | Key | Iterable[Key] | None = field(default=None, repr=False)
    keys: SealingKeys = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={self.on_error!r}: must be 'raise' or 'warn'")
        if self.lazy and not self.background:
            raise ValueError("lazy=True needs background=True: else nothing goes on meanwhile")
        odd = [name for name in self.pickled if name not in PARTS[1:]]
        if odd:
            raise ValueError(
                f"pickled={odd[0]!r}: must be some of {', '.join(map(repr, PARTS[1:]))}"
            )
        self.run_in("")
        object.__setattr__(self, "keys", SealingKeys.of(self.sealing, self.identities))

    def clear(self) -> Settings:
        """Returns the same settings without keys."""
        return replace(self, sealing=None, identities=None)

    def run_in(self, directory: str) -> PacedRun:
        """A run that saves into a directory.

        Raises:
            ValueError: An attribute has an unsupported value.
        """
        return PacedRun(
            directory,
            self.save_every,
            failures_per_hour=self.failures_per_hour,
            save_seconds_max=self.save_seconds_max,
            agree=from_first,
        )
