"""Fills targets from tensors that were loaded separately."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.loading.target import local_of
from penstock.tensors.copying import copy_elements

if TYPE_CHECKING:
    from penstock.checkpoint.layout.boxes import Box
    from penstock.checkpoint.loading.target import Target
    from penstock.checkpoint.state.build import Builder


def copy_built(builder: Builder, target: Target) -> None:
    """Copies the separately loaded value of a target into it."""
    if isinstance(target.value, np.ndarray):
        np.copyto(target.value, builder.leaf(target.node, "ndarray"), casting="no")
        return
    value, source = target.value, builder.leaf(target.node, "tensor")
    if target.boxes is not None:
        _copy_boxes(local_of(value), source, target.boxes)
    else:
        copy_elements(value, source)


def _copy_boxes(local: Any, source: Any, boxes: list[Box]) -> None:
    """Fills a rank's part of a `DTensor` from the whole tensor."""
    for box in boxes:
        wanted = tuple(slice(low, low + size) for low, size in zip(*box[:2], strict=True))
        place = tuple(slice(low, low + size) for low, size in zip(box.at, box.shape, strict=True))
        copy_elements(local[place], source[wanted])


def bytes_of(value: Any) -> np.ndarray[Any, Any]:
    """Returns the bytes of a contiguous host tensor or array as a view."""
    if isinstance(value, np.ndarray):
        return np.asarray(value).reshape(-1).view(np.uint8)
    torch = sys.modules["torch"]
    # A reshape would keep a stride other than one if there is a single element.
    flat = value.detach().as_strided((value.numel(),), (1,))
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array
