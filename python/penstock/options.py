"""`Options`: engine, buffer sizes and checks of a call, and their environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.common.option_kinds import Flag, Number, Word
from penstock.common.paths import local
from penstock.errors import OptionsError, StorageError, UnsupportedPathError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIB = 1 << 20

_FILE_VARIABLE = "PENSTOCK_OPTIONS"

_ABOUT = "about"
"""Key of a free-form remark in a file of options."""


def _option(variable: str, default: object, kind: Word | Number | Flag) -> Any:
    """Returns a dataclass field whose default is read from the environment at each construction.

    The field's ``metadata`` holds its variable, default and range.
    """
    name = variable.removeprefix("PENSTOCK_").lower()

    def read() -> Any:
        text = os.environ.get(variable, "").strip()
        if not text:
            file = os.environ.get(_FILE_VARIABLE, "").strip()
            return _of_environment(file).get(name, default) if file else default
        try:
            return kind.parse(text)
        except ValueError as error:
            raise ValueError(f"{variable}={text!r}: {error}") from None

    metadata = {"variable": variable, "default": default, "kind": kind}
    return field(default_factory=read, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How bytes move between memory and storage. The defaults suit almost every use.

    A value that is not given is read from the environment variable ``PENSTOCK_<NAME>`` (for example
    ``PENSTOCK_ENGINE=threads``) when the instance is made, else from the file that
    ``PENSTOCK_OPTIONS`` names (see `read`), which a process reads once, and else from the defaults
    below. For a number, ``None`` lets Penstock choose by the bytes to move, the device and the
    processor's cores; the report's ``choices`` lists each value with its reason.

    Attributes:
        engine: ``"uring"``, ``"threads"``, or ``"auto"``: io_uring where the kernel allows it, else
            a pool of threads; the report's ``fallbacks`` gives the reason. Loads of files in memory
            (tmpfs) read by plain calls on the I/O threads, ``"sync"`` in the report.
        direct: Whether the page cache is bypassed: ``"on"``, ``"off"``, or ``"auto"``: where the
            file system supports it.
        queue_depth: Requests in flight per I/O thread, 1 to 4096. If not given, ranks that save
            together on one machine divide the requests among them.
        extent_bytes: Bytes of one request: a multiple of 1 MiB, 1 MiB to 1 GiB.
        io_threads: Threads that copy, digest and submit, 1 to 1024. If neither this nor
            ``queue_depth`` is given, a save of host memory past the page cache begins with one
            thread, which has the requests of all, and others join it while it cannot keep the
            device busy.
        staging_bytes: Upper bound of the memory in which a call stages data, for checkpoints of any
            size: 4 MiB to 1 PiB, and at least two extents with 1 MiB beside each. If not given, it
            is 256 MiB; for `CheckpointStore.save_async` it is the size of the state, up to half of
            the free memory. If it is too small for the extents that ``io_threads`` and
            ``queue_depth`` ask for, Penstock lowers those and reports it in ``choices``.
        verify: Whether a load checks every byte that it returns against its digest. Calls whose
            result is a verdict always check: `verify`, `scrub`, `explain`, `salvage`, and a load
            with ``fallback``. A load that does not check does not record the step as verified.
            Sealed chunks and those of a file with a demanded signature are checked in any case,
            by their tags and hashes instead.
        zero_copy: Whether a save writes tensors from their own memory, without a copy, where that
            pays: contiguous ones in host memory and huge pages, 16 MiB of them or more, at
            multiples of the alignment that the device needs (512 bytes for many disks, 4 for most
            NVMe drives), if the kernel can watch them (Linux 6.7). All else is copied, and a sealed
            save copies everything. The report's ``zero_copy_bytes`` counts them, and ``choices``
            says why there are none.
        shard_bytes: Upper bound of the data in one file, 4 KiB to 1 PiB. If not given, it is 16
            GiB; in a bucket it is an eighth of the bytes that a rank saves, 64 MiB to 16 GiB.
        rank_timeout_seconds: How long a rank that has finished its part of a save waits for the
            others, 1 to 86400 seconds. It must exceed the save time of the slowest rank.

    Raises:
        ValueError: A value, or an environment variable, is out of range.
        TypeError: A value has the wrong type.
        OptionsError: The file that ``PENSTOCK_OPTIONS`` names cannot be used; a `ValueError` too.

    Example:
        >>> import penstock
        >>> penstock.Options(engine="threads", queue_depth=8).queue_depth
        8
    """

    engine: str = _option("PENSTOCK_ENGINE", "auto", Word(("auto", "uring", "threads")))
    direct: str = _option("PENSTOCK_DIRECT", "auto", Word(("auto", "on", "off")))
    queue_depth: int | None = _option("PENSTOCK_QUEUE_DEPTH", None, Number(1, 4096, "requests"))
    # Digests cover chunks of 1 MiB; an extent holds whole chunks.
    extent_bytes: int | None = _option(
        "PENSTOCK_EXTENT_BYTES", None, Number(_MIB, 1 << 30, "bytes", multiple_of=_MIB)
    )
    io_threads: int | None = _option("PENSTOCK_IO_THREADS", None, Number(1, 1024, "threads"))
    staging_bytes: int | None = _option(
        "PENSTOCK_STAGING_BYTES", None, Number(4 * _MIB, 1 << 50, "bytes")
    )
    verify: bool = _option("PENSTOCK_VERIFY", True, Flag())
    zero_copy: bool = _option("PENSTOCK_ZERO_COPY", True, Flag())
    shard_bytes: int | None = _option("PENSTOCK_SHARD_BYTES", None, Number(4096, 1 << 50, "bytes"))
    rank_timeout_seconds: int = _option(
        "PENSTOCK_RANK_TIMEOUT_SECONDS", 300, Number(1, 86_400, "seconds", is_open=False)
    )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            one.metadata["kind"].check(one.name, getattr(self, one.name))
        if self.extent_bytes is not None:
            staging_bytes_min = 2 * (self.extent_bytes + _MIB)
            Number(staging_bytes_min, 1 << 50, "bytes").check("staging_bytes", self.staging_bytes)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Options:
        """Reads options from a file, such as `penstock bench io --tune` writes.

        The file is one JSON object whose keys are names of attributes; ``about`` may hold anything.
        Its values take precedence over environment variables, which set only the others.

        Args:
            path: The file.

        Raises:
            OptionsError: The file cannot be read, or holds an unknown key or a bad value.
        """
        return cls(**_read(os.fspath(path)))

    def write(
        self, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None
    ) -> None:
        """Writes the values that differ from the defaults to a file that `read` understands.

        Args:
            path: The file; an existing file is replaced atomically.
            about: The origin of the values, as plain JSON.

        Raises:
            StorageError: The operating system failed to write the file.

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
        where = local(os.fspath(path))
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
        """Returns the options as the dictionary that the native module takes."""
        return {name: getattr(self, name) for name in self.__slots__}


DEFAULTS: dict[str, Any] = {
    one.name: one.metadata["default"] for one in dataclasses.fields(Options)
}
"""Value of each option that neither caller nor environment sets."""


def _read(path: str) -> dict[str, Any]:
    """Reads the values that a file of options sets."""
    path = local(path)
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
    # All values are given, so that none is read from the environment, which may name this file.
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
    """Reads the file that the environment names, once in the life of the process.

    Every call without options needs the values, and a run must not change them half-way.
    """
    try:
        return _read(path)
    except UnsupportedPathError as error:
        raise OptionsError(f"{_FILE_VARIABLE}: {error}", path=path) from error
    except OptionsError as error:
        raise OptionsError(f"{_FILE_VARIABLE}: {error}", path=path, key=error.key) from error
