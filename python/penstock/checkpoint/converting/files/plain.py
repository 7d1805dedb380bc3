"""`Unpickler`: unpickles tensors, containers and plain values, and calls nothing else.

A pickle is a program that can only call names. Here each name maps to its entry in `_CALLS`,
whatever version of NumPy or Python wrote it, or to `_Refused`, which does nothing. One pass
therefore also finds every name that is missing from the table, in any protocol.
"""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "QInt32Storage": torch.qint32,
    "QInt8Storage": torch.qint8,
    "QUInt2x4Storage": torch.quint2x4,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt8Storage": torch.quint8,
    "ShortStorage": torch.int16,
    "UntypedStorage": None,
}
"""Names of storages in ``torch.save`` files, with their element types."""

_MODULES = {"torch.tensor": "torch._tensor"}
"""Modules that had other names in PyTorch before 1.8."""

_RECONSTRUCT: Any = np.ndarray((0,)).__reduce__()[0]
_SCALAR: Any = np.float64().__reduce__()[0]
_NUMPY = _RECONSTRUCT.__module__.partition(".multiarray")[0]
"""``numpy._core``, which was ``numpy.core`` before NumPy 2."""


class NotPlainError(Exception):
    """A pickle uses a plain name in a way that is not allowed."""


class StorageKind(NamedTuple):
    """The type of a storage, as named by a pickle.

    Attributes:
        dtype: The element type; None if the tensors in the storage determine it.
    """

    dtype: torch.dtype | None


class Unpickler(pickle.Unpickler):
    """Reads one pickle of a ``torch.save`` file.

    Args:
        file: The file, at the beginning of the pickle.
        load_storage: Returns the storage of a persistent id.
        others: Collects the names that are missing from the table.
        is_trusted: Whether these names are called.
        records: Substitutes for classes of the file, by their names.
    """

    def __init__(
        self,
        file: IO[bytes],
        load_storage: Callable[[Any], Any],
        *,
        others: set[str],
        is_trusted: bool = False,
        records: Mapping[str, type] = MappingProxyType({}),
    ) -> None:
        # PyTorch also decodes strings of Python 2 as UTF-8.
        super().__init__(file, encoding="utf-8")
        self._load_storage = load_storage
        self._others = others
        self._is_trusted = is_trusted
        self._records = records

    def persistent_load(self, pid: Any) -> Any:
        """Returns the storage of an id."""
        return self._load_storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Returns the substitute for a name."""
        module = _MODULES.get(module, module)
        if name in _STORAGES and module.partition(".")[0] == "torch":
            return StorageKind(_STORAGES[name])
        if module == "torch" and isinstance(getattr(torch, name, None), _CONSTANTS):
            return getattr(torch, name)
        if module.startswith(("numpy.core.", "numpy._core.")):
            module = f"{_NUMPY}.{module.partition('core.')[2]}"
        # Protocols before 3 use the names of Python 2.
        full = ".".join(
            NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        )
        if full in self._records:
            return self._records[full]
        if full not in _CALLS:
            self._others.add(full)
        if self._is_trusted:
            return _REPLACED.get(full) or super().find_class(module, name)
        if full in _TYPES:
            return PlainType(_CALLS[full])
        return PlainName(_CALLS[full]) if full in _CALLS else _Refused


class PlainName:
    """A name of the table. It can be called, but not modified, as BUILD modifies a class."""

    __slots__ = ("_meant",)

    def __init__(self, meant: Any) -> None:
        self._meant = meant

    def __call__(self, *arguments: Any) -> Any:
        """Calls the named object; arguments may be other names, such as a subclass of arrays."""
        return self._meant(*(_meant(one) for one in arguments))

    def __setstate__(self, state: Any) -> None:
        """Refuses modification."""
        raise NotPlainError("it changes what a name stands for")


class PlainType(PlainName):
    """A name of the table that other names take as an argument, and that is not called.

    A call could leave memory uninitialized, which would be stored as values.
    """

    __slots__ = ()

    def __call__(self, *_arguments: Any) -> Any:
        """Refuses to create an object without its values."""
        raise NotPlainError(f"it calls {self._meant.__name__}")


class _Refused:
    """Represents a name that is not called, and each object that it would create."""

    def __new__(cls, *_arguments: Any, **_named: Any) -> _Refused:
        return object.__new__(cls)

    def __setstate__(self, *_state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


def _meant(value: Any) -> Any:
    return value._meant if isinstance(value, PlainName) else value


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Decodes bytes as protocols before 3 store them."""
    if encoding != "latin1":
        raise NotPlainError(f"it encodes text as {encoding}")
    return text.encode("latin1")


def _array(kind: type, shape: Any, code: Any) -> Any:
    """Creates an empty array; its state follows, with shape, type and values."""
    if kind is not np.ndarray or shape != (0,):
        raise NotPlainError(f"it makes an array of {kind} and {shape!r:.40}")
    return _RECONSTRUCT(kind, shape, code)


def _bytes(data: Any = b"", encoding: str = "latin-1") -> bytearray:
    """Creates a bytearray, but not one of a given number of zeros; old protocols store text."""
    if encoding != "latin-1" or not isinstance(data, bytes | str):
        raise NotPlainError(f"it makes bytes of {data!r:.40}")
    return bytearray(data.encode(encoding) if isinstance(data, str) else data)


def _array_of(
    data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None
) -> np.ndarray[Any, Any]:
    """Creates an array of protocol 5; axes exist since NumPy 2.3."""
    flat: np.ndarray[Any, Any] = np.frombuffer(data, dtype)
    if order == "K" and axes is not None:
        return flat.reshape(shape).transpose(axes)
    return flat.reshape(shape, order=order)


def _dtype(text: Any, *_flags: Any) -> np.dtype[Any]:
    """Returns a new dtype object, as BUILD would modify the one that all arrays share."""
    made: np.dtype[Any] = np.dtype(text, False, True)
    return made


def _layout(text: str) -> torch.layout:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise NotPlainError(f"{text} is no layout")
    return found


def _sparse(layout: torch.layout, data: Any) -> torch.Tensor:
    """Creates a sparse tensor and checks its indices, which PyTorch's own function defers."""
    try:
        if layout is torch.sparse_coo:
            indices, values, size, *rest = data
            return torch.sparse_coo_tensor(
                indices, values, size, check_invariants=True, is_coalesced=rest[0] if rest else None
            )
        compressed, plain, values, size = data
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size, layout=layout, check_invariants=True
        )
    except RuntimeError as error:
        raise ValueError(
            "the indices of a sparse tensor are not sorted and distinct, or not within it, as "
            f"those of one that was coalesced are: {error}"
        ) from error


def _of_numpy(data: Any, dtype: torch.dtype, _device: Any, requires_grad: bool) -> torch.Tensor:
    """Creates a tensor of a device without storages on the host instead."""
    return torch.from_numpy(data).to(dtype).requires_grad_(requires_grad)


def _of_host(
    data: torch.Tensor, dtype: torch.dtype, _device: Any, requires_grad: bool
) -> torch.Tensor:
    return data.to(dtype).requires_grad_(requires_grad)


def _wrapper(*arguments: Any) -> Any:
    """Creates a tensor of a subclass without a storage of its own, on the host."""
    *rest, _device, requires_grad = arguments
    rebuild: Any = torch._utils._rebuild_wrapper_subclass
    return rebuild(*rest, torch.device("cpu"), requires_grad)


def _functions(names: Iterable[str]) -> dict[str, Any]:
    """Returns the functions of `torch._utils` that this version has."""
    found = {name: getattr(torch._utils, name, None) for name in names}
    return {f"torch._utils.{name}": one for name, one in found.items() if one is not None}


_CONSTANTS = (torch.dtype, torch.qscheme, torch.layout, torch.memory_format)

_REPLACED: Mapping[str, Any] = {
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_host,
    "torch._utils._rebuild_device_tensor_from_numpy": _of_numpy,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_xla_tensor": _of_numpy,
}
"""Substitutes for functions that put tensors on a device, or defer checks."""

_CALLS: Mapping[str, Any] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytes,
    "builtins.complex": complex,
    "builtins.frozenset": frozenset,
    "builtins.set": set,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "numpy.dtype": _dtype,
    "numpy.ndarray": np.ndarray,
    f"{_NUMPY}.multiarray._reconstruct": _array,
    f"{_NUMPY}.multiarray.scalar": _SCALAR,
    f"{_NUMPY}.numeric._frombuffer": _array_of,
    "torch.Size": torch.Size,
    "torch.Tensor": torch.Tensor,
    "torch.device": torch.device,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.serialization._get_layout": _layout,
    "torch._tensor._rebuild_from_type_v2": torch._tensor._rebuild_from_type_v2,
    **{name: one for name, one in _REPLACED.items() if one is not _wrapper},
    **_functions(
        (
            "_rebuild_meta_tensor_no_storage",
            "_rebuild_nested_tensor",
            "_rebuild_parameter",
            "_rebuild_parameter_with_state",
            "_rebuild_qtensor",
            "_rebuild_tensor",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
        )
    ),
}
"""The names that plain pickles call. None runs code of the pickle, or modifies shared objects."""

_TYPES = frozenset(("numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter"))
"""Those of them that are only arguments of others."""
