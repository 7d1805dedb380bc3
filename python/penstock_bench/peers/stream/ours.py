"""`penstock.offload.stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import offload

if TYPE_CHECKING:
    from penstock_bench.peers.stream.base import Setting


class Ours:
    """The files as they are."""

    joins_early = True

    def prepare(self, setting: Setting) -> None:
        """Nothing."""

    def open(self, setting: Setting) -> Any:
        """Reading begins."""
        self._model = offload.stream(setting.model, memory_bytes=setting.memory_bytes)
        return self._model

    def report(self) -> dict[str, Any]:
        """The bytes that a pass reads, and the path of the reads."""
        told = offload.report(self._model)
        notes = list(map(str, told.fallbacks))
        found = {
            "is_direct": told.direct,
            "setup": f"{told.engine}, {told.in_flight_max} in flight",
            "notes": notes,
        }
        if (experts := told.experts) is None:
            return {**found, "pass_bytes": told.pass_bytes}
        hits = experts.hits / max(1, experts.uses)
        read = f"{experts.read_bytes / 1e9:.3f} GB read of experts, {hits:.0%} of uses hits"
        missed = experts.routed_bytes * (1 - hits)
        notes.append(f"{read}, {experts.read_bytes / max(1.0, missed):.4f} of the missed")
        return {**found, "routed_bytes": experts.routed_bytes}
