"""Copies tensor memory without autograd, views it as bytes, and bumps version counters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def copy_elements(value: Any, source: Any) -> None:
    """Copies the elements of a tensor of the same dtype and shape, without autograd."""
    if not value.numel():
        return
    torch = sys.modules["torch"]
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        if value.itemsize == 1:
            # PyTorch cannot copy int4 and similar types, but it can copy their bytes.
            value, source = value.view(torch.uint8), source.view(torch.uint8)
        value.copy_(source)


def byte_view(value: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor as bytes."""
    uint8 = sys.modules["torch"].uint8
    # A reshape would keep a stride other than one if there is a single element.
    return value.detach().as_strided((value.numel(),), (1,)).view(uint8)


def bytes_of(value: Any) -> np.ndarray[Any, Any]:
    """Returns the bytes of a contiguous host tensor or array as a view."""
    if isinstance(value, np.ndarray):
        return np.asarray(value).reshape(-1).view(np.uint8)
    array: np.ndarray[Any, Any] = byte_view(value).numpy()
    return array


def bump_versions(values: list[Any]) -> None:
    """Notifies autograd of writes behind its back, so that a stale graph raises an error."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_inference():
            torch.autograd.graph.increment_version(value)
