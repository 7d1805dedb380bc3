"""`Settings`: how a trainer saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.options import Options

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

    Raises:
        ValueError: An attribute has an unsupported value.
    """

    background: bool = False
    lazy: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    pickled: tuple[str, ...] = ()
    trust: bool = False
    options: Options | None = None

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
