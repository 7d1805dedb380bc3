"""Reads facts about a model's tensors from its configuration, if transformers is installed."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

NAMES_MAX = 5
"""Largest number of names listed in an error."""


class MetaModel:
    """A model without its tensors (on the device ``meta``), created from a configuration."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known = set(model.state_dict())
        tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
        self._tied = set(tied)

    @classmethod
    def of(cls, config: bytes | None) -> MetaModel | None:
        """Returns the model of a ``config.json``; None if it is unknown here."""
        if config is None:
            return None
        try:
            import torch

            transformers = importlib.import_module("transformers")
            facts = json.loads(config)
            named = facts.get("architectures")
            settings = transformers.AutoConfig.for_model(facts.pop("model_type"), **facts)
            with torch.device("meta"):
                if named:
                    return cls(getattr(transformers, named[0])(settings))
                # Configurations of models that were not loaded from a checkpoint lack it.
                return cls(transformers.AutoModelForCausalLM.from_config(settings))
        except (ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError):
            # The model is of another framework, comes with code, or is newer.
            return None

    def check(self, names: Collection[str], path: str) -> None:
        """Compares exported names with those of the model."""
        unknown = sorted(set(names) - self._known)
        if unknown:
            raise StateMismatchError(
                f"{path}: the model of config.json has no {_listed(unknown)}: name what is the "
                "model's with --key, or leave config.json out",
                key=unknown[0],
                path=path,
            )
        missing = sorted(self._known - set(names) - self._tied)
        if missing:
            raise StateMismatchError(
                f"{path}: the model of config.json has {_listed(missing)}, and the checkpoint does "
                "not: is it the configuration of this model?",
                key=missing[0],
                path=path,
            )

    def as_published(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tensors in published form: fused ones split again."""
        loading: Any = importlib.import_module("transformers.core_model_loading")
        return dict(loading.revert_weight_conversion(self._model, dict(tensors)))

    @property
    def is_fused(self) -> bool:
        """Whether the model fuses tensors that are published in pieces, such as experts."""
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
        found = mapping.get_model_conversion_mapping(self._model, add_legacy=False)
        return any(isinstance(one, loading.WeightConverter) for one in found)


def _listed(names: list[str]) -> str:
    told = ", ".join(names[:NAMES_MAX])
    rest = len(names) - NAMES_MAX
    return f"{told} and {rest:,} more" if rest > 0 else told
