"""The ops as DeepSpeed expects them: modules with its names, arguments and defaults."""

from __future__ import annotations

import operator
import os
import threading
import warnings
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.errors import PenstockError, PenstockWarning, StateMismatchError
from penstock.integrations.deepspeed import pinned
from penstock.integrations.deepspeed.variables import is_strict
from penstock.offload import TensorIO, Transfer
from penstock.tensors.copying import bytes_of, copy_elements

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE_BYTES = 4096
_ALIGNMENT = 512
"""The device's alignment in bytes, as DeepSpeed assumes it."""


def module(name: str) -> ModuleType:
    """The op of that name, as a module."""
    return _MODULES[name]


@dataclass(slots=True)
class _Pending:
    """A transfer, and a function to call once it has succeeded."""

    transfer: Transfer
    finish: Callable[[], None]


class AioHandle:
    """``aio_handle``: reads and writes whole tensors, in any order; `wait` waits for all of them.

    Args:
        block_size: Most bytes of a request to the device.
        queue_depth: Requests in flight per thread.
        single_submit: Returned by `get_single_submit`; has no effect.
        overlap_events: Returned by `get_overlap_events`; has no effect.
        intra_op_parallelism: The number of threads.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        # As DeepSpeed's, it takes everything with an index, such as NumPy's integers.
        block_size, queue_depth = operator.index(block_size), operator.index(queue_depth)
        self._settings = (block_size, queue_depth, single_submit, overlap_events)
        self._threads = operator.index(intra_op_parallelism)
        block_bytes = -(-block_size // _PAGE_BYTES) * _PAGE_BYTES
        self._io = TensorIO(
            extent_bytes=block_bytes,
            queue_depth=queue_depth,
            io_threads=self._threads,
            staging_bytes=max(64 << 20, 4 * block_bytes),
        )
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._waiting = threading.Lock()
        """Held by the waiting thread, as another `wait` may concern the same operations."""
        _handles.add(self)

    def get_block_size(self) -> int:
        """The constructor's ``block_size``, in bytes."""
        return self._settings[0]

    def get_queue_depth(self) -> int:
        """The constructor's ``queue_depth``."""
        return self._settings[1]

    def get_single_submit(self) -> bool:
        """The constructor's ``single_submit``."""
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        """The constructor's ``overlap_events``."""
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        """The constructor's ``intra_op_parallelism``."""
        return self._threads

    def get_alignment(self) -> int:
        """The multiple to which programs round sizes, in bytes; Penstock does not need it."""
        return _ALIGNMENT * self._threads

    def read(
        self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        """Reads a whole file, which must have the tensor's size; returns 0."""
        return self._now(lambda: self._whole_read(buffer, filename, validate, file_offset))

    def write(
        self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        """Writes a tensor; returns 0."""
        return self._now(lambda: self._write(buffer, filename, validate, file_offset))

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool,
        # The parameter `async` is a keyword of Python.
        *arguments: Any,
        **keywords: Any,
    ) -> int:
        """Reads ``(buffer, filename, validate, async, file_offset=0)``."""
        is_async, offset = _async_and_offset(arguments, keywords)
        return self._begun(lambda: self._read(buffer, filename, validate, offset), is_async)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool,
        *arguments: Any,
        **keywords: Any,
    ) -> int:
        """Writes ``(buffer, filename, validate, async, file_offset=0)``."""
        is_async, offset = _async_and_offset(arguments, keywords)
        return self._begun(lambda: self._write(buffer, filename, validate, offset), is_async)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Reads a tensor, and waits for all operations; returns the number that have ended."""
        return self._begun(lambda: self._read(buffer, filename, False, file_offset), False)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Writes a tensor, and waits for all operations; returns the number that have ended."""
        return self._begun(lambda: self._write(buffer, filename, False, file_offset), False)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Starts to read a tensor; returns 0."""
        return self._begun(lambda: self._read(buffer, filename, False, file_offset), True)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Starts to write a tensor to a file, by name or by an open descriptor; returns 0."""
        file = filename if fd is None else fd
        if file is None:
            raise TypeError("async_pwrite needs a filename or an fd")
        return self._begun(lambda: self._write(buffer, file, False, file_offset), True)

    def wait(self) -> int:
        """Waits for all started operations.

        Returns:
            The number of operations.
        """
        with self._waiting:
            pending = self._take_pending()
            if not pending and is_strict():
                raise PenstockError(
                    "wait() without an operation under way: each is waited for once, and "
                    "sync_pread, sync_pwrite, read and write wait themselves"
                )
            return self._finish(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A one-dimensional tensor of another tensor's type, page-aligned and locked."""
        return pinned.new(num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Forgets a locked tensor; returns whether it was one."""
        return pinned.free(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether a tensor is in locked memory."""
        return pinned.is_pinned(buffer)

    def _read(self, buffer: torch.Tensor, filename: str, validate: bool, offset: int) -> _Pending:
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        offset = operator.index(offset)
        transfer = self._io.read(host, filename, offset)

        def finish() -> None:
            if host is not buffer:
                copy_elements(buffer, host)
            if validate:
                _compare(host, filename, offset)

        return _Pending(transfer, finish)

    def _whole_read(
        self, buffer: torch.Tensor, filename: str, validate: bool, offset: int
    ) -> _Pending:
        with self._io.open(filename) as file:
            if file.nbytes != buffer.nbytes:
                raise StateMismatchError(
                    f"{filename} has {file.nbytes} bytes and the tensor {buffer.nbytes}: read() "
                    "takes whole files; use pread for a part of one",
                    key=None,
                    path=os.fspath(filename),
                )
        return self._read(buffer, filename, validate, offset)

    def _write(
        self, buffer: torch.Tensor, file: str | int, validate: bool, offset: int
    ) -> _Pending:
        host = buffer if buffer.device.type == "cpu" else buffer.to("cpu")
        offset = operator.index(offset)
        transfer = self._io.write(host, file, offset)

        def finish() -> None:
            if validate:
                _compare(host, file, offset)

        return _Pending(transfer, finish)

    def _now(self, begin: Callable[[], _Pending]) -> int:
        try:
            one = begin()
        except PenstockError:
            if is_strict():
                raise
            return -1
        self._finish([one])
        return 0

    def _begun(self, begin: Callable[[], _Pending], is_async: bool) -> int:
        try:
            one = begin()
        except PenstockError:
            if is_strict():
                raise
            return -1
        if is_async:
            with self._lock:
                self._pending.append(one)
            return 0
        with self._waiting:
            # Its own operation is not in the list that another thread may take to wait for.
            return self._finish([*self._take_pending(), one])

    def _take_pending(self) -> list[_Pending]:
        with self._lock:
            pending, self._pending = self._pending, []
        return pending

    def _finish(self, pending: list[_Pending]) -> int:
        failures: list[Exception] = []
        try:
            for one in pending:
                try:
                    one.transfer.result()
                except PenstockError as error:
                    failures.append(error)
                    continue
                try:
                    one.finish()
                except Exception as error:
                    # PyTorch's errors, too: otherwise every other wait would raise them as well.
                    failures.append(error)
        except BaseException:
            # For instance a signal: put the operations back, to be waited for again.
            with self._lock:
                self._pending = pending + self._pending
            raise
        if failures:
            first, *others = failures
            for other in others:
                first.add_note(f"another one: {other}")
            if is_strict() or not isinstance(first, PenstockError):
                raise first
            warnings.warn(PenstockWarning(str(first)), stacklevel=3)
        return len(pending)


class GdsHandle(AioHandle):
    """``gds_handle``: the same for tensors of devices, through host memory."""

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A one-dimensional tensor of another tensor's type and device."""
        return torch.empty(num_elem, dtype=example_tenosr.dtype, device=example_tenosr.device)

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Returns True: the memory is released with the last reference."""
        return True

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Returns True: nothing has to be prepared."""
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Returns True: nothing was prepared."""
        return True


_handles: weakref.WeakSet[AioHandle] = weakref.WeakSet()


def _renew_locks() -> None:
    for handle in list(_handles):
        # A thread of the parent may have held them at the fork.
        handle._lock, handle._waiting = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _async_and_offset(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[bool, int]:
    names = ("async", "file_offset")
    given = dict(zip(names, arguments, strict=False))
    unknown = set(keywords) - set(names) | (set(keywords) & set(given))
    if len(arguments) > len(names) or unknown or "async" not in given | keywords:
        raise TypeError("the arguments are (buffer, filename, validate, async, file_offset=0)")
    given |= keywords
    return bool(given["async"]), given.get("file_offset", 0)


def _compare(host: torch.Tensor, file: str | int, offset: int) -> None:
    """Raises `PenstockError` unless stored bytes, read through the page cache, are those moved."""
    with TensorIO(direct="off") as io:
        again = torch.empty_like(host, memory_format=torch.contiguous_format)
        io.read(again, file, offset).result()
    plain = host.detach().resolve_conj().resolve_neg().contiguous()
    if not np.array_equal(bytes_of(again), bytes_of(plain)):
        raise PenstockError(f"{file}: what is stored is not what was moved")


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Reads a whole file, which must have the tensor's size; returns 0."""
    handle = AioHandle(block_size, queue_depth, single_submit, overlap_events, 1)
    return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Writes a tensor; returns 0."""
    handle = AioHandle(block_size, queue_depth, single_submit, overlap_events, 1)
    return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies the bytes of one tensor to another; returns 0."""
    dest.view(-1).view(torch.uint8).copy_(src.reshape(-1).view(torch.uint8))
    return 0


def _op(name: str, **members: object) -> ModuleType:
    op = ModuleType(name, f"DeepSpeed's op {name}, by Penstock.")
    vars(op).update(members)
    return op


_MODULES = {
    "async_io": _op(
        "async_io",
        aio_handle=AioHandle,
        aio_read=aio_read,
        aio_write=aio_write,
        deepspeed_memcpy=deepspeed_memcpy,
    ),
    "gds": _op("gds", gds_handle=GdsHandle),
    "pin_memory": _op("pin_memory", pin_handle=pinned.PinHandle),
}
