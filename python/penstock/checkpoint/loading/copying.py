"""Fills targets from tensors that were loaded beside them."""

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
    """Fills a target from what was loaded beside it."""
    if isinstance(target.value, np.ndarray):
        np.copyto(target.value, builder.leaf(target.node, "ndarray"), casting="no")
        return
    value, source = target.value, builder.leaf(target.node, "tensor")
    if target.boxes is not None:
        _copy_boxes(local_of(value), source, target.boxes)
    else:
        copy_elements(value, source)


def _copy_boxes(local: Any, source: Any, boxes: list[Box]) -> None:
    """Fills what a rank holds of a `DTensor` from the whole of it."""
    for box in boxes:
        wanted = tuple(slice(low, low + size) for low, size in zip(*box[:2], strict=True))
        place = tuple(slice(low, low + size) for low, size in zip(box.at, box.shape, strict=True))
        copy_elements(local[place], source[wanted])


def bytes_of(value: Any) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous tensor or array of the host, sharing its memory."""
    if isinstance(value, np.ndarray):
        return np.asarray(value).reshape(-1).view(np.uint8)
    torch = sys.modules["torch"]
    # Not a reshape: it would keep a stride other than one where there is a single element.
    flat = value.detach().as_strided((value.numel(),), (1,))
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array
