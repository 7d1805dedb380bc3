"""Checks and normalizes arguments of the public API."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from penstock.common.paths import local, tidy
from penstock.errors import DeviceError, UnsupportedStateError
from penstock.options import Options
from penstock.tensors import dtypes
from penstock.tensors.devices import check_fork

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STEP_MAX = (1 << 63) - 1
_METADATA_INT_MAX = (1 << 63) - 1


def decode_path(path: str | os.PathLike[str] | bytes) -> str:
    """Returns a local path or a bucket's URL as text.

    Bytes are decoded with the file system's encoding, and ``~`` is expanded to the home directory.
    """
    return tidy(_decoded(path))


def decode_local_path(path: str | os.PathLike[str] | bytes) -> str:
    """Returns a local path as text; bytes and ``~`` are handled as by `decode_path`."""
    return local(_decoded(path))


def _decoded(path: str | os.PathLike[str] | bytes) -> str:
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path is empty")
    if "\0" in text:
        raise ValueError(f"the path {text!r} holds a NUL character")
    return text


def check_step(step: Any) -> int:
    """Checks a training step: an integer from 0 to `STEP_MAX`."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step={step!r}: must be an int")
    number = step.__index__()
    if not 0 <= number <= STEP_MAX:
        raise ValueError(f"step={number}: must be between 0 and {STEP_MAX}")
    return int(number)


def to_native(options: Options | None) -> dict[str, Any]:
    """Returns the options of a call in the form that the native module takes."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r}: must be penstock.Options or None")
    return options.to_native()


def check_patterns(keys: str | Iterable[str] | None) -> list[str] | None:
    """Checks ``keys`` and returns its patterns; None selects every leaf."""
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else list(keys)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"keys={keys!r}: must be text or a list of text")
    if not patterns:
        raise ValueError("keys is empty: leave it out to load everything")
    return patterns


def check_rank(rank: Any) -> int:
    """Checks the number of a rank: a non-negative int."""
    if type(rank) is not int:
        raise TypeError(f"rank={rank!r}: must be an int or None")
    if rank < 0:
        raise ValueError(f"rank={rank}: must not be negative")
    return rank


def check_device(device: Any) -> Any:
    """Checks a device for new tensors and returns it with its index; None for the host."""
    if device is None or device == "cpu":
        return None
    torch = dtypes.import_torch()
    try:
        place = torch.device(device)
        if place.type == "cuda":
            check_fork()
        # An allocation resolves the current device of a kind to one with an index.
        place = torch.empty(0, device=place).device
    except DeviceError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r} cannot be used: {reason}") from error
    return None if place.type == "cpu" else place


def encode_metadata(metadata: Mapping[str, Any] | None) -> str:
    """Encodes a note as JSON text; refuses one that JSON would change."""
    if metadata is None:
        return "{}"
    try:
        text = json.dumps(
            dict(metadata), allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        text.encode("utf-8")
        is_same = json.loads(text, parse_int=_small_int) == dict(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedStateError(
            f"metadata is no plain JSON ({error}): use dicts with str keys, lists, str, int, "
            "float, bool and None; put other values into the state",
            key="metadata",
        ) from error
    if not is_same:
        raise UnsupportedStateError(
            "metadata would come back changed: use dicts with str keys, lists, str, int, float, "
            "bool and None; put tuples and other values into the state",
            key="metadata",
        )
    return text


def _small_int(text: str) -> int:
    value = int(text)
    if abs(value) > _METADATA_INT_MAX:
        raise ValueError(f"the integer {text} does not fit 64 bits")
    return value
