"""`Options`: how bytes are moved. The only place that reads ``PENSTOCK_*`` variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1 << 20

_T = TypeVar("_T")


def _setting(name: str, parse: Callable[[str], _T], default: _T) -> Any:
    """A dataclass field whose default comes from ``PENSTOCK_<NAME>`` when an instance is made."""
    variable = f"PENSTOCK_{name.upper()}"

    def read() -> _T:
        text = os.environ.get(variable, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{variable}={text!r}: {error}") from None

    return field(default_factory=read)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise ValueError("not one of 1, true, yes, on, 0, false, no, off") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How bytes move between memory and storage; the defaults suit nearly everybody.

    A value that is not given comes from the environment variable ``PENSTOCK_<NAME>`` (for
    example ``PENSTOCK_ENGINE=threads``), read when the instance is made, and else from the
    defaults below. ``None`` leaves a number to Penstock, which chooses by the bytes to move, the
    device and the processor's cores; the report's ``choices`` say what and why.

    Attributes:
        engine: ``"uring"``, ``"threads"``, or ``"auto"``: io_uring where the kernel allows it,
            else a pool of threads; the report's ``fallbacks`` says why.
        direct: Whether the page cache is bypassed: ``"on"``, ``"off"``, or ``"auto"``: where the
            file system supports it.
        queue_depth: Requests in flight per I/O thread, 1 to 4096. Left open, ranks that save
            together share them out on each machine.
        extent_bytes: Bytes of one request: a multiple of 1 MiB, at most 1 GiB.
        io_threads: Threads that copy, digest and submit, 1 to 1024.
        staging_bytes: Bound on the memory a call stages data in, whatever the checkpoint's size:
            at least two extents and 1 MiB beside each. Not given, it is 256 MiB; for
            `CheckpointStore.save_async` as much as the state has, up to half of the memory that
            is free. Where it has no room for the extents that
            ``io_threads`` and ``queue_depth`` ask for, it lowers those; ``choices`` says so.
        verify: Whether a load checks every byte that it hands out against its digest.
        shard_bytes: Bound on the data in one file, at least 4096.
        rank_timeout_seconds: Where many ranks save together, how long one that has done its part
            waits for the others, 1 to 86400. Not less than a save takes the slowest.

    Raises:
        ValueError: A value, or an environment variable, is out of range.
        TypeError: A value has the wrong type.

    Example:
        >>> import penstock
        >>> penstock.Options(engine="threads", queue_depth=8).queue_depth
        8
    """

    engine: str = _setting("engine", str, "auto")
    direct: str = _setting("direct", str, "auto")
    queue_depth: int | None = _setting("queue_depth", _number, None)
    extent_bytes: int | None = _setting("extent_bytes", _number, None)
    io_threads: int | None = _setting("io_threads", _number, None)
    staging_bytes: int | None = _setting("staging_bytes", _number, None)
    verify: bool = _setting("verify", _flag, True)
    shard_bytes: int | None = _setting("shard_bytes", _number, None)
    rank_timeout_seconds: int = _setting("rank_timeout_seconds", _number, 300)

    def __post_init__(self) -> None:
        _check_word("engine", self.engine, ("auto", "uring", "threads"))
        _check_word("direct", self.direct, ("auto", "on", "off"))
        _check_range("queue_depth", self.queue_depth, 1, 4096)
        _check_range("extent_bytes", self.extent_bytes, _MIB, 1 << 30)
        if self.extent_bytes is not None and self.extent_bytes % _MIB:
            # Digests cover chunks of 1 MiB; an extent holds whole ones.
            raise ValueError(f"extent_bytes={self.extent_bytes}: must be a multiple of {_MIB}")
        _check_range("io_threads", self.io_threads, 1, 1024)
        staging_bytes_min = 2 * ((self.extent_bytes or _MIB) + _MIB)
        _check_range("staging_bytes", self.staging_bytes, staging_bytes_min, 1 << 50)
        _check_range("shard_bytes", self.shard_bytes, 4096, 1 << 50)
        _check_range("rank_timeout_seconds", self.rank_timeout_seconds, 1, 86_400)
        if type(self.verify) is not bool:
            raise TypeError(f"verify={self.verify!r}: must be True or False")

    def to_native(self) -> dict[str, Any]:
        """The same as the dictionary that the native module takes."""
        return {name: getattr(self, name) for name in self.__slots__}


def _check_word(name: str, value: object, words: tuple[str, ...]) -> None:
    if type(value) is not str:
        raise TypeError(f"{name}={value!r}: must be one of {', '.join(map(repr, words))}")
    if value not in words:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, words))}")


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name}={value!r}: must be an int or None")
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: must be between {least} and {most}")
