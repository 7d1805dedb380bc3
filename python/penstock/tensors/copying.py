"""Memory of tensors: copies that autograd does not see, and version counters that tell it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def copy_elements(value: Any, source: Any) -> None:
    """Fills a tensor from one of the same type and shape."""
    if not value.numel():
        return
    torch = sys.modules["torch"]
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        if value.itemsize == 1:
            # PyTorch copies no int4 and its like, but bytes.
            value, source = value.view(torch.uint8), source.view(torch.uint8)
        value.copy_(source)


def byte_view(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, one behind the other, in its own memory."""
    uint8 = sys.modules["torch"].uint8
    # Not a reshape: it would keep a stride other than one where there is a single element.
    return value.detach().as_strided((value.numel(),), (1,)).view(uint8)


def bump_versions(values: list[Any]) -> None:
    """Tells autograd of writes behind its back, so that a stale graph fails instead of lying."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_inference():
            torch.autograd.graph.increment_version(value)
