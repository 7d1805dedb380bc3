"""`DeviceFeatures`: rows of a table, gathered by kernels of a GPU."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, cast

from penstock import _native
from penstock.common.option_kinds import Number
from penstock.errors import DeviceError
from penstock.tensors import dtypes
from penstock.tensors.copying import bump_versions
from penstock.tensors.devices import CurrentStreams, check_known, current_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from penstock.features.sources.source import Source
    from penstock.tensors.devices import DeviceStream

STAGING = Number(0, 1 << 40, "bytes")
STAGING_BYTES = 64 << 20

_ID_BYTES = {"int32": 4, "int64": 8}


def cuda_header() -> str:
    """CUDA C++ source for your own kernels that ask for rows; for NVRTC and nvcc, sm_70 or later.

    The header's first lines explain its use, and docs/gpu.md shows a kernel. Its parameter ``fifo``
    is `DeviceFeatures.address`.

    Example:
        >>> import penstock.features
        >>> "penstock_post(" in penstock.features.cuda_header()
        True
    """
    return _native.fifo_header()


class DeviceFeatures:
    """Gathers rows for ids that are on a GPU; made by `Features.on_device`.

    A kernel posts the ids to memory that the host can read, a host thread has the rows read, and
    the kernel copies them to the result. So a gather is queued on the stream like any other kernel:
    the calling thread waits neither for the ids nor for the rows.

    Any thread may use it. `close`, or dropping the object, waits until every queued gather is done;
    kernels of your own that still wait for rows then end without them.

    Attributes:
        ordinal: The CUDA device number.
        address: Address of the queue for your own kernels, the ``fifo`` of `cuda_header`.
        post_rows: Most ids in one post.
        slots: Posts that can be in flight at a time.
    """

    def __init__(
        self,
        native: _native.RowProxy,
        source: Source,
        ordinal: int,
        check_files: Callable[[], None],
        check_open: Callable[[], None],
    ) -> None:
        self._native: _native.RowProxy | None = native
        self._source = source
        self._check_files = check_files
        self._check_open = check_open
        self.ordinal = ordinal
        self.address, self.post_rows, self.slots = native.fifo()
        # Waits for queued work without the GIL, also when the object is dropped without `close`.
        weakref.finalize(self, _dropped, native).atexit = False

    def gather(self, ids: Any, out: Any = None) -> Any:
        """Queues a gather on the current stream of the device.

        Args:
            ids: A contiguous ``int32`` or ``int64`` tensor on the device, of any shape. The kernel
                reads its values when the stream reaches it, as with any kernel.
            out: A contiguous tensor on the device for the rows: the shape of ``ids`` followed by
                that of a row, of the table's type.

        Returns:
            ``out``, or a new tensor. It holds the rows once the stream has passed the gather;
            `check` raises if some could not be read.

        Raises:
            TypeError: The ids are no such tensor.
            ValueError: ``out`` does not fit, or this object is closed.
            DeviceError: The stream is being captured into a graph, or the driver refuses.
        """
        native = self._open()
        if not dtypes.is_tensor(ids):
            raise TypeError(f"ids: {type(ids).__name__}: use a tensor of the device")
        dtype = dtypes.torch_names().get(ids.dtype, (str(ids.dtype),))[0]
        if dtype not in _ID_BYTES or not ids.is_contiguous():
            raise TypeError(f"ids: {dtype}: use a contiguous tensor of int32 or int64")
        place = self._place(ids, "ids")
        if out is None:
            torch = dtypes.import_torch()
            kind = dtypes.torch_dtype(self._source.dtype)
            out = torch.empty(self._shape(ids), dtype=kind, device=ids.device)
        else:
            self._check(out, ids)
            self._place(out, "out")
            bump_versions([out])
        count = math.prod(ids.shape)
        if count:
            native.gather(place, ids.data_ptr(), _ID_BYTES[dtype], count, out.data_ptr())
        return out

    def check(self) -> None:
        """Raises the first error since the last call of `check`.

        Errors of a gather are known once its kernel is done, for instance after
        ``torch.cuda.synchronize()``.

        Raises:
            IndexError: An id has no row.
            TransferError: Bytes could not be read.
            CorruptCheckpointError: A file has changed, or bytes are not those that were written.
            StorageError: A kernel has posted more ids than `post_rows`.
            DeviceError: The device has failed.
            ValueError: This object is closed.
        """
        native = self._open()
        with self._naming():
            native.check()
        self._check_files()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Serves your own kernels: those queued on the current stream while the context is open.

        Leaving the context waits for that stream; wait for other streams yourself before. A thread
        polls for posts meanwhile, even if none come.

        Raises:
            ValueError: This object is closed.
            DeviceError: The device has failed.
        """
        serving = self._open().serve()
        try:
            yield
        finally:
            serving.end(*current_streams([self.ordinal]))

    def close(self) -> None:
        """Waits until all queued gathers are done, and releases the device memory.

        A second call does nothing.

        Raises:
            IndexError: As `check`, for an error not raised yet; the object is closed all the same.
            TransferError: Likewise.
            CorruptCheckpointError: Likewise.
            DeviceError: Likewise.
        """
        native, self._native = self._native, None
        if native is not None:
            with self._naming():
                native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except Exception:
            # The exception that left the block matters more.
            if kind is None:
                raise

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except IndexError as error:
            raise IndexError(f"{error} ({self._source.path})") from None

    def __repr__(self) -> str:
        state = " closed" if self._native is None else ""
        return f"<DeviceFeatures {self._source.path!r} cuda:{self.ordinal}{state}>"

    def _open(self) -> _native.RowProxy:
        if self._native is None:
            raise ValueError(f"{self!r} is closed: make another one with on_device")
        self._check_open()
        return self._native

    def _shape(self, ids: Any) -> tuple[int, ...]:
        return (*ids.shape, *self._source.row_shape)

    def _check(self, out: Any, ids: Any) -> None:
        if not dtypes.is_tensor(out):
            raise TypeError(f"out: {type(out).__name__}: use a tensor of the device")
        kind = dtypes.torch_names().get(out.dtype, (str(out.dtype),))[0]
        is_good = out.is_contiguous() and not (out.requires_grad or out.is_conj() or out.is_neg())
        shape = self._shape(ids)
        if kind != self._source.dtype or tuple(out.shape) != shape or not is_good:
            raise ValueError(
                f"out: {kind} of shape {tuple(out.shape)}: needed is a contiguous"
                f" {self._source.dtype} of shape {shape} on the device"
            )

    def _place(self, tensor: Any, name: str) -> DeviceStream:
        """The tensor's device and its current stream."""
        device = tensor.device
        if device.type != "cuda" or device.index not in (None, self.ordinal):
            raise ValueError(f"{name}: on {device}: needed is one on cuda:{self.ordinal}")
        place = CurrentStreams().on(f"cuda:{self.ordinal}")
        check_known(device, place)
        return cast("DeviceStream", place)


def _dropped(native: _native.RowProxy) -> None:
    """Closes a dropped object; nobody is left to receive its errors."""
    with contextlib.suppress(Exception):
        native.close()


def ordinal_of(device: Any) -> int:
    """The number of a CUDA device."""
    problem = _native.cuda_problem()
    if problem is not None:
        raise DeviceError(f"{device}: {problem}", code=None)
    torch = dtypes.import_torch()
    found = torch.device(device)
    if found.type != "cuda" or torch.version.hip is not None:
        raise ValueError(f"device={device!r}: kernels of CUDA devices alone ask for rows")
    if found.index is None:
        return int(sys.modules["torch"].cuda.current_device())
    return int(found.index)
