"""`Options`: how bytes are moved, and the environment variables that say so."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import OptionsError, StorageError, UnsupportedPathError
from penstock.paths import check_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MIB = 1 << 20

_FILE_VARIABLE = "PENSTOCK_OPTIONS"

_ABOUT = "about"
"""What a file of options says of itself, for whoever reads it."""

_T = TypeVar("_T")


def _setting(name: str, parse: Callable[[str], _T], default: _T) -> Any:
    """A dataclass field whose default comes from the environment when an instance is made."""
    variable = f"PENSTOCK_{name.upper()}"

    def read() -> Any:
        text = os.environ.get(variable, "").strip()
        if not text:
            file = os.environ.get(_FILE_VARIABLE, "").strip()
            return _of_environment(file).get(name, default) if file else default
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{variable}={text!r}: {error}") from None

    return field(default_factory=read, metadata={"default": default})


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
    example ``PENSTOCK_ENGINE=threads``), read when the instance is made; else from the file that
    ``PENSTOCK_OPTIONS`` names (see `read`), which a process reads once; and else from the
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
        verify: Whether a load checks every byte that it hands out against its digest. What ends
            in a verdict checks them all the same: `verify`, `scrub`, `explain`, `salvage`, and a
            load with ``fallback``. A load that does not check leaves no mark.
        shard_bytes: Bound on the data in one file, at least 4096.
        rank_timeout_seconds: Where many ranks save together, how long one that has done its part
            waits for the others, 1 to 86400. Not less than a save takes the slowest.

    Raises:
        ValueError: A value, or an environment variable, is out of range.
        TypeError: A value has the wrong type.
        OptionsError: The file that ``PENSTOCK_OPTIONS`` names cannot be used; a `ValueError` too.

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

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Options:
        """Reads options from a file, such as `penstock bench io --tune` writes.

        The file is one JSON object whose keys are names of attributes; ``about`` may hold
        anything. What is in it counts as given: environment variables decide the rest only.

        Args:
            path: The file.

        Raises:
            OptionsError: It cannot be read, or holds an unknown key or a bad value.
        """
        return cls(**_read(os.fspath(path)))

    def write(
        self, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None
    ) -> None:
        """Writes what differs from the defaults to a file, for `read` and ``PENSTOCK_OPTIONS``.

        Args:
            path: The file; one that is there is replaced in one step.
            about: Where the values come from, as plain JSON.

        Raises:
            StorageError: The operating system refused it.

        Example:
            >>> import penstock
            >>> penstock.Options(queue_depth=32).write("options.json", about={"by": "hand"})
            >>> print(open("options.json").read())
            {
              "queue_depth": 32,
              "about": {
                "by": "hand"
              }
            }
            <BLANKLINE>
            >>> penstock.Options.read("options.json").queue_depth
            32
        """
        where = os.fspath(path)
        check_scheme(where)
        values = {name: getattr(self, name) for name in self.__slots__}
        document = {name: v for name, v in values.items() if v != DEFAULTS[name]}
        if about is not None:
            document[_ABOUT] = dict(about)
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        unfinished = f"{where}.{os.getpid()}"
        try:
            try:
                with open(unfinished, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(unfinished, where)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise
        except OSError as error:
            raise StorageError(
                f"{where}: options cannot be written there: {error.strerror}; choose another file",
                path=where,
                errno=error.errno,
            ) from error

    def to_native(self) -> dict[str, Any]:
        """The same as the dictionary that the native module takes."""
        return {name: getattr(self, name) for name in self.__slots__}


DEFAULTS: dict[str, Any] = {
    one.name: one.metadata["default"] for one in dataclasses.fields(Options)
}
"""Every value where neither caller nor environment gives one."""


def _read(path: str) -> dict[str, Any]:
    """What a file of options sets.

    Raises:
        OptionsError: It cannot be read, or holds what it may not.
        UnsupportedPathError: It is a URL.
    """
    check_scheme(path)
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read())
    except OSError as error:
        raise OptionsError(
            f"{path}: options cannot be read: {error.strerror}; name a file that "
            "penstock.Options.write or `penstock bench io --tune` has written",
            path=path,
        ) from error
    except (ValueError, RecursionError) as error:
        raise OptionsError(
            f"{path} holds no options: {error}; they are one JSON object", path=path
        ) from error
    if not isinstance(document, dict):
        raise OptionsError(f"{path} holds no options: they are one JSON object", path=path)
    document.pop(_ABOUT, None)
    # All are given, so that no variable is asked, that of this very file least of all.
    checked = dict(DEFAULTS)
    for key, value in document.items():
        if key not in DEFAULTS:
            known = ", ".join(DEFAULTS)
            raise OptionsError(
                f"{path}: there is no option {key!r}: remove it; known are {known}",
                path=path,
                key=key,
            )
        checked[key] = value
        try:
            Options(**checked)
        except (ValueError, TypeError) as error:
            raise OptionsError(
                f"{path}: {error}; correct or remove it", path=path, key=key
            ) from error
    return document


@functools.lru_cache(maxsize=1)
def _of_environment(path: str) -> dict[str, Any]:
    """What the file of the environment sets, for as long as this process lives.

    Every call without options asks for it, and a run must not change its mind half-way.
    """
    try:
        return _read(path)
    except UnsupportedPathError as error:
        raise OptionsError(f"{_FILE_VARIABLE}: {error}", path=path) from error
    except OptionsError as error:
        raise OptionsError(f"{_FILE_VARIABLE}: {error}", path=path, key=error.key) from error


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
