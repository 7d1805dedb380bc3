"""Who generates text with a model that does not fit, by name."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from penstock_bench import peers

RESIDENT, OURS = "resident", "penstock"

_ZERO_BUFFERS = 5
"""The default of ZeRO-Inference."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The model and the memory to use.

    Attributes:
        model: A directory as `save_pretrained` of transformers makes it.
        place: A directory of its own, for files that it wants to have otherwise.
        memory_bytes: What of its memory may be weights.
    """

    model: str
    place: str
    memory_bytes: int


class Generator(ABC):
    """One way to have the weights.

    Attributes:
        joins_early: Whether it opens the model within the limit; else its memory is limited, in its
            favour, from the first token on.
    """

    joins_early = True

    def prepare(self, setting: Setting) -> None:  # noqa: B027 (most need nothing)
        """Makes what it reads from, once, in a process without a limit; not timed."""

    @abstractmethod
    def open(self, setting: Setting) -> Any:
        """A model with the `generate` of transformers."""

    def report(self) -> dict[str, Any]:
        """Its final report: ``pass_bytes``, ``notes``."""
        return {}


class Resident(Generator):
    """`from_pretrained`, on the CPU."""

    def open(self, setting: Setting) -> Any:
        """All of it, in memory of its own: what is mapped would be read when it is used."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(setting.model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model.eval()


class Ours(Generator):
    """`penstock.offload.stream`: the files as they are."""

    def __init__(self, *, blocks: tuple[str, ...] | None = None) -> None:
        self._blocks = blocks

    def open(self, setting: Setting) -> Any:
        """Reading begins."""
        from penstock import offload

        self._model = offload.stream(
            setting.model, memory_bytes=setting.memory_bytes, blocks=self._blocks
        )
        return self._model

    def report(self) -> dict[str, Any]:
        """The bytes that a pass reads, and the path of the reads."""
        from penstock import offload

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


class Accelerate(Generator):
    """A file for each weight, mapped and copied by a hook before each module."""

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
        host = torch.device("cpu")
        # Transformers sends guessed tokens to the device of the first parameter: meta here.
        model.__class__ = type(type(model).__name__, (type(model),), {"device": host})
        return accelerate.disk_offload(model.eval(), setting.place, execution_device=host)


class AirLlm(Generator):
    """A file for each layer, mapped, the next one by a thread."""

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


class Zero(Generator):
    """DeepSpeed's ZeRO-Inference: stage 3 without an optimizer, parameters on storage.

    It writes the model anew when it starts; parameters of less than a block stay in memory.
    """

    joins_early = False

    def __init__(self, *, is_ours: bool = False) -> None:
        self._is_ours = is_ours

    def open(self, setting: Setting) -> Any:
        """The module of its engine."""
        if self._is_ours:
            from penstock.integrations import deepspeed as ours

            ours.enable()
        # Without GPUs: weights are computed with where they are read to.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        import torch
        import transformers
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        from penstock_bench.harness.process import launch_alone

        launch_alone()
        deepspeed.init_distributed("gloo")
        settings = _zero(setting, transformers.AutoConfig.from_pretrained(setting.model))
        # It has to be there as long as the model.
        self._config = HfDeepSpeedConfig(settings)  # type: ignore[no-untyped-call]
        torch.set_grad_enabled(False)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(setting.model)
        self._engine, *_ = deepspeed.initialize(model=model.eval(), config=settings)
        return self._engine.module.eval()


def _zero(setting: Setting, config: Any) -> dict[str, Any]:
    """The settings of DeepSpeed, as its documentation of ZeRO-Inference has them."""
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    # All of the memory goes to the buffers: ZeRO-Inference has no other cache.
    count = max(2, min(_ZERO_BUFFERS, setting.memory_bytes // (largest * 2)))
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": setting.place,
                "pin_memory": True,
                "buffer_count": count,
                "buffer_size": largest,
            },
        },
        "aio": peers.AIO,
    }


@dataclass(frozen=True)
class Entry(peers.Entry):
    """A library that generates text.

    Memory is limited for all but one, and some read from files that they make before.
    """

    is_limited: bool = True
    has_files: bool = False


def _entry(attribute: str, package: str, note: str, **rest: Any) -> Entry:
    return Entry(__name__, attribute, package, note, **rest)


GENERATORS = {
    RESIDENT: _entry(
        "Resident",
        "transformers",
        "the whole model in memory, without a limit: what computing takes",
        is_limited=False,
    ),
    OURS: _entry("Ours", "transformers", "penstock.offload.stream"),
    "penstock-fine": _entry(
        "Ours",
        "transformers",
        "the same with each matrix as a block, blocks=['*_proj']",
        options={"blocks": ("*_proj",)},
    ),
    "accelerate": _entry(
        "Accelerate", "accelerate", "disk_offload, from its own files", has_files=True
    ),
    "airllm": _entry("AirLlm", "airllm", "its own files, a layer ahead", has_files=True),
    "zero": _entry("Zero", "deepspeed", "ZeRO-Inference, by DeepSpeed's async_io"),
    "zero-penstock": _entry(
        "Zero",
        "deepspeed",
        "ZeRO-Inference, by penstock deepspeed",
        options={"is_ours": True},
    ),
}
"""In the order of the first round."""
