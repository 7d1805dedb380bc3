"""Element types: PyTorch's and NumPy's own objects on one side, the format's names on the other.

Names come out of files, so they are only ever looked up in tables or matched against a strict
pattern; nothing is evaluated. PyTorch is imported only when one of its types is asked for, and
``ml_dtypes`` (bfloat16 and float8 for NumPy) likewise.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    import torch

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Every name of the format except the open family ``numpy:…``, with the bytes of an element."""

_NUMPY_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(name): name
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_NUMPY_BY_NAME = {name: dtype for dtype, name in _NUMPY_NAMES.items()}

# What `dtype.str` gives for a type that is one flat run of bytes: no objects, no fields.
_NUMPY_TEXT = re.compile(r"[<>|](?:[biufcSUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")
_ML_DTYPES = re.compile(r"bfloat16|u?int[124]|float[468]_e[0-9]m[0-9](?:b11)?(?:fn|fnu|fnuz)?")


@functools.cache
def torch_names() -> dict[torch.dtype, tuple[str, int]]:
    """The types a tensor may have, with name and bytes of an element.

    Quantized types are missing: their scale lies outside the bytes.
    """
    known = torch_dtypes().items()
    return {dtype: (name, ITEM_BYTES[name]) for name, dtype in known if name in ITEM_BYTES}


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Every `torch.dtype` of this PyTorch by its name, quantized ones included."""
    torch = import_torch()
    values = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {str(dtype).removeprefix("torch."): dtype for dtype in values}


def import_torch() -> Any:
    """PyTorch, or the error that says how to get it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(
            "this checkpoint holds values that need PyTorch, which is not installed: "
            "pip install penstock[torch]",
            name="torch",
        ) from error


def torch_dtype(name: str) -> torch.dtype:
    """The tensor type of a name.

    Raises:
        ValueError: No tensor has a type of that name.
        MissingDependencyError: PyTorch is not installed, or too old to have the type.
    """
    if name not in ITEM_BYTES:
        raise ValueError(f"no tensor has dtype {name!r}")
    try:
        return torch_dtypes()[name]
    except KeyError:
        raise MissingDependencyError(
            f"this version of PyTorch has no {name}: pip install --upgrade torch", name="torch"
        ) from None


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """The name of an array's type; None if its elements are not plain bytes."""
    name = _NUMPY_NAMES.get(dtype)
    if name is not None:
        return name
    text = numpy_text(dtype)
    if text is None or dtype.itemsize == 0:
        return None
    return text if text in ITEM_BYTES else f"numpy:{text}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The array type of a name.

    Raises:
        ValueError: There is no such type.
        MissingDependencyError: NumPy alone does not have it.
    """
    dtype = _NUMPY_BY_NAME.get(name)
    if dtype is not None:
        return dtype
    if name.startswith("numpy:"):
        return parse_numpy(name.removeprefix("numpy:"))
    if _ML_DTYPES.fullmatch(name):
        return parse_numpy(name)
    if name in ITEM_BYTES:
        raise MissingDependencyError(
            f"NumPy has no {name}, PyTorch has: pip install penstock[torch]", name="torch"
        )
    raise ValueError(f"no array has dtype {name!r}")


def numpy_text(dtype: np.dtype[Any]) -> str | None:
    """A text that `parse_numpy` turns back into the type; None for objects and structures."""
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        return None
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return dtype.name if _ML_DTYPES.fullmatch(dtype.name) else None
    return dtype.str if _NUMPY_TEXT.fullmatch(dtype.str) else None


def parse_numpy(text: str) -> np.dtype[Any]:
    """The type that `numpy_text` described.

    Raises:
        ValueError: The text describes none.
        MissingDependencyError: The type belongs to ``ml_dtypes``, which is not installed.
    """
    if _NUMPY_TEXT.fullmatch(text):
        try:
            dtype: np.dtype[Any] = np.dtype(text)
        except (TypeError, ValueError):
            raise ValueError(f"NumPy has no dtype {text!r}") from None
        if dtype.str == text:
            return dtype
    elif _ML_DTYPES.fullmatch(text):
        try:
            module = importlib.import_module("ml_dtypes")
        except ImportError as error:
            raise MissingDependencyError(
                f"NumPy gets {text} from ml_dtypes, which is not installed: pip install ml_dtypes",
                name="ml_dtypes",
            ) from error
        scalar = getattr(module, text, None)
        if isinstance(scalar, type):
            return np.dtype(scalar)
    raise ValueError(f"NumPy has no dtype {text!r}")
