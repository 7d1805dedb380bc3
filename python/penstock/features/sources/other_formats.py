"""Tables in files of other programs: safetensors, NumPy's ``.npy``, and files without a header.

A header is compared with the size of its file before it is believed; no rows are read.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from numpy.lib import format as npy

from penstock.common.found import check_fetched
from penstock.errors import CorruptCheckpointError, StateMismatchError, UnsupportedStateError
from penstock.features.sources.elements import item_bytes_of
from penstock.features.sources.row_tensor import RowTensor
from penstock.io.files.extents import FileRange, TensorExtent
from penstock.io.files.safetensors_files import SNIFFED_BYTES, begins_header
from penstock.io.files.safetensors_header import header_of, weights_of
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from penstock.io.files.extents import Composed

_INDEX = ".safetensors.index.json"
_INDEX_BYTES_MAX = 100_000_000


_NO_NPY = (ValueError, TypeError, SyntaxError, TokenError, MemoryError, RecursionError)
"""Errors raised by a malformed header, which NumPy parses as a Python literal."""


def is_npy(path: str) -> bool:
    """Whether a file begins as `numpy.save` writes it."""
    with open(path, "rb") as file:
        return file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX


def is_safetensors(path: str) -> bool:
    """Whether a file is named ``.safetensors``, or begins with a length and a JSON object."""
    if path.endswith(".safetensors"):
        return True
    with open(path, "rb") as file:
        return begins_header(file.read(SNIFFED_BYTES))


def of_safetensors(path: str) -> dict[str, RowTensor]:
    """All tensors of a safetensors file, by name."""
    return _tables(header_of(Path(path)).tensors)


def of_directory(path: str, key: str | None) -> dict[str, RowTensor]:
    """The tensors of a directory of safetensors files, by name.

    If it has one index, only files that the index lists are read; with a key, only the file that
    holds that tensor.
    """
    indices = sorted(Path(path).glob(f"*{_INDEX}"))
    if len(indices) != 1:
        return _tables(weights_of(path).tensors)
    places = _index(indices[0])
    wanted = {key: places[key]} if key in places else places
    found: dict[str, RowTensor] = {}
    for name in sorted(set(wanted.values())):
        tables = of_safetensors(os.path.join(path, name))
        if missing := sorted(one for one in wanted if wanted[one] == name and one not in tables):
            raise CorruptCheckpointError(
                f"{indices[0]} says that {missing[0]!r} is in {name}, which does not have it: get"
                " the files again",
                path=path,
                file=name,
                tensor=missing[0],
            )
        found.update((one, tables[one]) for one in wanted if wanted[one] == name)
    return found


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor, from an index of a directory of safetensors files."""
    try:
        with path.open("rb") as file:
            places = json.loads(file.read(_INDEX_BYTES_MAX))["weight_map"]
        # Plain file names only: an index must not point outside its directory.
        is_plain = all(name and os.path.basename(name) == name for name in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_plain = False
    if not is_plain:
        check_fetched(os.fspath(path))
        raise CorruptCheckpointError(
            f"{path} does not say in which file of its directory each tensor is: get it again",
            path=str(path.parent),
            file=path.name,
        )
    return dict(places)


def _tables(stored: Mapping[str, TensorExtent | Composed]) -> dict[str, RowTensor]:
    names = dtypes.torch_names()
    return {
        name: RowTensor(
            names[one.dtype][0],
            int(one.dtype.itemsize),
            one.shape,
            (FileRange(one.path, one.offset, one.nbytes),) if one.nbytes else (),
        )
        for name, one in stored.items()
        if isinstance(one, TensorExtent)
    }


def of_npy(path: str, dtype: str | None) -> RowTensor:
    """The array of a ``.npy`` file.

    ``dtype`` is for types that NumPy stores as void for want of a name.
    """
    with open(path, "rb") as file:
        try:
            version = npy.read_magic(file)
            # Version 3 allows UTF-8 in field names, which a table's array does not have.
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"its version is {version[0]}.{version[1]}")
            shape, is_fortran, kind = read(file)
            if any(size < 0 for size in shape):
                raise ValueError(f"its shape is {shape}")
        except _NO_NPY as error:
            raise _broken(path, f"its header is none of numpy.save: {error}") from error
        begin = file.tell()
        nbytes = os.fstat(file.fileno()).st_size
    if is_fortran:
        raise UnsupportedStateError(
            f"{path}: its array lies column by column, so no row lies together: write it again as"
            " numpy.save(path, numpy.ascontiguousarray(array))",
            key=path,
        )
    table = RowTensor(_npy_dtype(path, kind, dtype), kind.itemsize, shape, None)
    if table.nbytes > nbytes - begin:
        raise _broken(path, f"it ends after {nbytes} bytes, its array takes {begin + table.nbytes}")
    return table._replace(runs=_one_run(path, begin, table.nbytes))


def _npy_dtype(path: str, kind: np.dtype[Any], given: str | None) -> str:
    is_void = kind.kind == "V" and kind.names is None and not kind.hasobject
    if is_void and given is not None and item_bytes_of(given) == kind.itemsize:
        return given
    name = None if is_void else dtypes.numpy_name(kind)
    if name is None:
        remedy = "pass dtype=" if is_void else "save each field as an array of its own"
        raise UnsupportedStateError(
            f"{path}: its array is of the type {kind}, whose elements are no numbers: {remedy}",
            key=path,
        )
    return name


def of_bytes(path: str, shape: tuple[int | None, ...], dtype: str) -> RowTensor:
    """A file of rows without a header.

    ``shape`` has None in the first place for as many rows as the file has.
    """
    nbytes = os.stat(path).st_size
    item_bytes = item_bytes_of(dtype)
    count, row_shape = shape[0], tuple(size or 0 for size in shape[1:])
    row_bytes = math.prod(row_shape) * item_bytes
    if count is None:
        count, left = divmod(nbytes, row_bytes) if row_bytes else (0, nbytes)
        if left:
            raise StateMismatchError(
                f"{path} has {nbytes} bytes, which are no rows of {row_bytes}, {left} are left:"
                f" correct shape={shape} or dtype={dtype!r}, or get the file again",
                path=path,
            )
    table = RowTensor(dtype, item_bytes, (count, *row_shape), None)
    if table.nbytes != nbytes:
        how = "short" if nbytes < table.nbytes else "long"
        raise StateMismatchError(
            f"{path} is too {how}: it has {nbytes} bytes, shape={shape} of {dtype} takes"
            f" {table.nbytes}: correct shape or dtype, or get the file again",
            path=path,
        )
    return table._replace(runs=_one_run(path, 0, nbytes))


def _one_run(path: str, begin: int, nbytes: int) -> tuple[FileRange, ...]:
    return (FileRange(path, begin, nbytes),) if nbytes else ()


def _broken(path: str, why: str) -> CorruptCheckpointError:
    above, name = os.path.split(path)
    return CorruptCheckpointError(f"{path}: {why}: get the file again", path=above, file=name)
