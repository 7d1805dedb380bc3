"""`penstock.offload.stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import offload

if TYPE_CHECKING:
    from penstock.bench.generators.base import Setting


class Ours:
    """The files as they are."""

    joins_early = True

    def prepare(self, setting: Setting) -> None:
        """Nothing."""

    def open(self, setting: Setting) -> Any:
        """Reading begins."""
        self._model = offload.stream(setting.model, memory_bytes=setting.memory_bytes)
        return self._model

    def told(self) -> dict[str, Any]:
        """What a pass reads, and how."""
        told = offload.report(self._model)
        return {
            "pass_bytes": told.pass_bytes,
            "is_direct": told.direct,
            "setup": f"{told.engine}, {told.in_flight_max} in flight",
            "notes": list(told.fallbacks),
        }
