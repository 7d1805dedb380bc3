"""airllm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.peers.stream.base import Setting


class AirLlm:
    """A file for each layer, mapped, the next one by a thread."""

    joins_early = True

    def prepare(self, setting: Setting) -> None:
        """The files, as it makes them when it first sees a model."""
        self.open(setting)

    def open(self, setting: Setting) -> Any:
        """The model that it has its hooks on."""
        from airllm.airllm_base import AirLLMBaseModel

        class WithoutTokenizer(AirLLMBaseModel):  # type: ignore[misc]
            """Prompts are numbers here."""

            def get_tokenizer(self, hf_token: str | None = None) -> None:
                del hf_token

        self._held = WithoutTokenizer(
            setting.model, device="cpu", layer_shards_saving_path=setting.place
        )
        return self._held.model

    def report(self) -> dict[str, Any]:
        """Nothing."""
        return {}
