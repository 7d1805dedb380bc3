"""`Settings`: how a trainer saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.options import Options

PARTS = ("model", "optimizer", "scheduler", "scaler")
"""What a trainer has that keeps a state, by the names that it is stored under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a trainer saves its checkpoints, and what it loads.

    Attributes:
        asynchronous: Whether training goes on while a checkpoint is written. The state is copied
            at the save. Callbacks hear of a save (``on_save``) before it is durable, unless one of
            transformers or Ray uploads checkpoints: then each save is waited for.
        lazy: Whether an asynchronous save has the state copied while the next step computes its
            gradients; the optimizer waits for it. What else changes weights in between, such as a
            callback, fails the save, which says so.
        on_error: What a save does that the storage fails, as a full disk: ``"raise"`` ends the
            training, with ``"warn"`` it goes on and tries again at the next save.
        raw: Parts whose state is stored as pickled bytes, for what cannot be stored without:
            ``"optimizer"``, ``"scheduler"`` or ``"scaler"``.
        trust: Whether pickled bytes of a checkpoint are loaded, which runs whatever code they hold.
        options: How bytes move; None for ``penstock.Options()``.

    Raises:
        ValueError: A value is none of those that are possible.
    """

    asynchronous: bool = False
    lazy: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    raw: tuple[str, ...] = ()
    trust: bool = False
    options: Options | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={self.on_error!r}: must be 'raise' or 'warn'")
        if self.lazy and not self.asynchronous:
            raise ValueError("lazy=True needs asynchronous=True: else nothing goes on meanwhile")
        odd = [name for name in self.raw if name not in PARTS[1:]]
        if odd:
            raise ValueError(f"raw={odd[0]!r}: must be some of {', '.join(map(repr, PARTS[1:]))}")
