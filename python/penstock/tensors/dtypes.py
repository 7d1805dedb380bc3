"""Element types: translates between dtypes of PyTorch or NumPy and names of the format.

Names come from files, so they are only looked up in tables or matched against a strict pattern;
nothing is evaluated. PyTorch and ``ml_dtypes`` (bfloat16 and float8 for NumPy) are imported only
when one of their types is needed.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _native
from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

ITEM_BYTES: dict[str, int] = dict(_native.dtypes())
"""Bytes per element of every name of the format, except the open family ``numpy:…``."""

HEADER_TYPES: dict[str, tuple[str, int]] = {
    name: (kind, count) for name, kind, count in _native.header_types()
}
"""The safetensors name of each type of the format that has one, and how many elements of that
safetensors type form one element of the format's along the last dimension.
"""


class UnknownTypeError(ValueError):
    """This version of Penstock does not know the named type, which a newer one wrote."""


def _own_of_numpy(name: str) -> np.dtype[Any] | None:
    """Returns NumPy's own type of a name; None if it has none, or only of another package."""
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.isbuiltin == 1 else None


_NUMPY_BY_NAME = {name: dtype for name in ITEM_BYTES if (dtype := _own_of_numpy(name)) is not None}
_NUMPY_NAMES = {dtype: name for name, dtype in _NUMPY_BY_NAME.items()}

# `dtype.str` of types whose elements are plain bytes: no objects, no fields.
_NUMPY_TEXT = re.compile(r"[<>|](?:[biufcSUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")
_NUMBERS = frozenset("bBhHiIlLqQefdgFDG")
_TORCH_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ML_DTYPES = re.compile(r"bfloat16|u?int[124]|float[468]_e[0-9]m[0-9](?:b11)?(?:fn|fnu|fnuz)?")


def header_entry(name: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """Returns the type and the sizes of a tensor in a safetensors header.

    Returns:
        None if safetensors has no name for the type, or no shape for such a tensor.
    """
    if name not in HEADER_TYPES:
        return None
    kind, count = HEADER_TYPES[name]
    if count == 1:
        return kind, tuple(shape)
    return (kind, (*shape[:-1], shape[-1] * count)) if shape else None


@functools.cache
def torch_names() -> dict[torch.dtype, tuple[str, int]]:
    """Returns the dtypes that a tensor may have, with name and bytes per element.

    Quantized types are excluded: their scale is not part of the bytes.
    """
    known = torch_dtypes().items()
    return {dtype: (name, ITEM_BYTES[name]) for name, dtype in known if name in ITEM_BYTES}


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Returns every `torch.dtype` of this PyTorch by name, quantized ones included."""
    torch = import_torch()
    values = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {str(dtype).removeprefix("torch."): dtype for dtype in values}


def is_tensor(value: object) -> bool:
    """Whether a value is a PyTorch tensor; does not import PyTorch.

    While another thread is importing PyTorch, no tensor exists yet.
    """
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def import_torch() -> Any:
    """Imports PyTorch; if it is not installed, raises an error that says how to install it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(
            "this checkpoint holds values that need PyTorch, which is not installed: "
            "pip install 'penstock[torch]'",
            name="torch",
        ) from error


def torch_dtype(name: str) -> torch.dtype:
    """Returns the tensor dtype of a name."""
    if name not in ITEM_BYTES:
        raise ValueError(f"no tensor has dtype {name!r}")
    return any_torch_dtype(name)


def any_torch_dtype(name: str) -> torch.dtype:
    """Returns the `torch.dtype` of a name, even if no tensor here can have it."""
    if not _TORCH_WORD.fullmatch(name):
        raise ValueError(f"no torch.dtype is called {name!r:.80}")
    try:
        return torch_dtypes()[name]
    except KeyError:
        raise MissingDependencyError(
            f"this PyTorch, {import_torch().__version__}, has no dtype {name}: install a version "
            "that has it",
            name="torch",
        ) from None


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Returns the name of an array's type; None if its elements are not plain bytes."""
    name = _NUMPY_NAMES.get(dtype)
    if name is not None:
        return name
    text = numpy_text(dtype)
    if text is None or dtype.itemsize == 0:
        return None
    return text if text in ITEM_BYTES else f"numpy:{text}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the array type of a name."""
    dtype = _NUMPY_BY_NAME.get(name)
    if dtype is not None:
        return dtype
    if name.startswith("numpy:"):
        return parse_numpy(name.removeprefix("numpy:"))
    if _ML_DTYPES.fullmatch(name):
        return parse_numpy(name)
    if name in ITEM_BYTES:
        raise MissingDependencyError(
            f"NumPy has no {name}, PyTorch has: pip install 'penstock[torch]'", name="torch"
        )
    raise UnknownTypeError(f"no array has dtype {name!r:.80}")


def numpy_text(dtype: np.dtype[Any]) -> str | None:
    """Returns a text that `parse_numpy` understands; None for objects and structures."""
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        return None
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return dtype.name if _ML_DTYPES.fullmatch(dtype.name) else None
    return dtype.str if _NUMPY_TEXT.fullmatch(dtype.str) else None


def twin(dtype: np.dtype[Any]) -> str | None:
    """Returns NumPy's type character of a type that `dtype.str` does not identify; else None.

    NumPy has one type for each C type, even if two of those are the same: on Linux `longlong` is a
    type beside `int64`. The two compare equal, but their scalars have different classes.
    """
    if dtype.char not in _NUMBERS or np.dtype(dtype.str).char == dtype.char:
        return None
    return dtype.char


def parse_numpy(text: str, char: Any = None) -> np.dtype[Any]:
    """Returns the type that `numpy_text` and `twin` described."""
    if _NUMPY_TEXT.fullmatch(text):
        try:
            dtype: np.dtype[Any] = np.dtype(text)
        except (TypeError, ValueError):
            raise MissingDependencyError(
                f"this NumPy, {np.__version__}, has no dtype {text!r}: install a version, on a "
                "platform, that has it",
                name="numpy",
            ) from None
        if dtype.str == text:
            return dtype if char is None else as_twin(dtype, char)
        raise ValueError(f"{text!r} is no dtype of NumPy")
    if _ML_DTYPES.fullmatch(text):
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
        version = getattr(module, "__version__", "of an unknown version")
        raise MissingDependencyError(
            f"this ml_dtypes, {version}, has no {text}: install a version that has it",
            name="ml_dtypes",
        )
    raise UnknownTypeError(f"no dtype of NumPy is called {text!r:.80}")


def as_twin(dtype: np.dtype[Any], char: Any) -> np.dtype[Any]:
    """Returns the type with this character if it is equivalent to the given type."""
    if type(char) is not str or char not in _NUMBERS:
        raise ValueError(f"{char!r:.80} is no type character of NumPy")
    # On platforms where C's types differ, the character means another type.
    found = np.dtype(char).newbyteorder(dtype.byteorder)
    return found if found == dtype else dtype
