"""Hugging Face accelerate: `disk_offload`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.peers.stream.base import Setting


class Accelerate:
    """A file for each weight, mapped and copied by a hook before each module."""

    joins_early = True

    def prepare(self, setting: Setting) -> None:
        """The files, from a model in memory, as it makes them."""
        import transformers
        from accelerate.utils import offload_state_dict

        whole = transformers.AutoModelForCausalLM.from_pretrained(setting.model)
        offload_state_dict(setting.place, whole.state_dict())

    def open(self, setting: Setting) -> Any:
        """A model without weights, with its hooks."""
        import accelerate
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(setting.model)
        with accelerate.init_empty_weights(include_buffers=False):
            model: Any = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=config.dtype
            )
        return accelerate.disk_offload(
            model.eval(), setting.place, execution_device=torch.device("cpu")
        )

    def report(self) -> dict[str, Any]:
        """Nothing."""
        return {}
