"""The model in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.peers.stream.base import Setting


class Resident:
    """`from_pretrained`, on the CPU."""

    joins_early = True

    def prepare(self, setting: Setting) -> None:
        """Nothing."""

    def open(self, setting: Setting) -> Any:
        """All of it, in memory of its own: what is mapped would be read when it is used."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(setting.model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model.eval()

    def report(self) -> dict[str, Any]:
        """Nothing."""
        return {}
