"""What the elements of a table are, whatever a caller calls that."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from penstock.tensors import dtypes


def name_of(dtype: Any) -> str:
    """The name of a type, as `docs/format.md` has them.

    Args:
        dtype: A `torch.dtype`, what NumPy takes for a type, or such a name.

    Raises:
        TypeError: It is none, or its elements are no plain bytes.
    """
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
    """Bytes of an element.

    Args:
        name: Of a type.

    Raises:
        MissingDependencyError: It takes a package that is not installed.
    """
    return dtypes.ITEM_BYTES.get(name) or dtypes.numpy_dtype(name).itemsize
