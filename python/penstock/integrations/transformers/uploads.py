"""Callbacks that copy or upload a checkpoint's directory when they are notified of the save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_UPLOADING: dict[str, Callable[[Any], object]] = {
    "ClearMLCallback": lambda callback: callback._log_model,
    "DVCLiveCallback": lambda callback: callback._log_model == "all",
    "FlyteCallback": lambda callback: callback.sync_checkpoints,
    "MLflowCallback": lambda callback: callback._log_artifacts,
    "NeptuneCallback": lambda callback: callback._should_upload_checkpoint,
    "RayTrainReportCallback": lambda callback: True,
    "WandbCallback": lambda callback: callback._log_model == "checkpoint",
}
"""Tells whether a callback of transformers or Ray does so, by its class."""


def are_uploaded(callbacks: Iterable[Any]) -> bool:
    """Whether a callback copies or uploads checkpoints, which must be complete by then."""
    return any(
        _UPLOADING[kind.__name__](callback)
        for callback in callbacks
        for kind in type(callback).__mro__
        if kind.__name__ in _UPLOADING and kind.__module__.startswith(("transformers.", "ray."))
    )
