"""Names and sizes of the element types of tables."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from penstock.tensors import dtypes


def name_of(dtype: Any) -> str:
    """The name in `docs/format.md` of a `torch.dtype`, of a dtype of NumPy's, or of such a name."""
    if isinstance(dtype, str) and dtype in dtypes.ITEM_BYTES:
        return dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        name = dtypes.torch_names().get(dtype, ("", 0))[0]
    else:
        try:
            # NumPy takes None for float64.
            name = "" if dtype is None else dtypes.numpy_name(np.dtype(dtype)) or ""
        except (TypeError, ValueError):
            name = ""
    if not name:
        raise TypeError(f"dtype={dtype!r}: must be a type whose elements are plain bytes")
    return name


def item_bytes_of(name: str) -> int:
    """Bytes of an element."""
    return dtypes.ITEM_BYTES.get(name) or dtypes.numpy_dtype(name).itemsize
