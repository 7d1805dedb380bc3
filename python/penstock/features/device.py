"""`DeviceFeatures`: rows of a table, asked for by kernels of a GPU."""

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
from penstock.tensors.devices import DirectPlaces, check_known, current_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from penstock.features.source import Source

STAGING = Number(0, 1 << 40, "bytes")
STAGING_BYTES = 64 << 20

_ID_BYTES = {"int32": 4, "int64": 8}


def cuda_header() -> str:
    """What kernels of your own ask for rows with: CUDA C++, for NVRTC and nvcc, from sm_70 on.

    Its first lines say how; docs/gpu.md has a kernel. What it calls ``fifo`` is
    `DeviceFeatures.address`.

    Example:
        >>> import penstock.features
        >>> "penstock_post(" in penstock.features.cuda_header()
        True
    """
    return _native.fifo_header()


class DeviceFeatures:
    """Rows of a table for ids that are on a GPU; `Features.on_device` makes it.

    A kernel posts the ids to memory that the host reaches, a thread there has the rows read, and
    the kernel copies them to the result. So the host neither waits for the ids nor for the rows: a
    gather is queued on the stream like any other kernel.

    Any thread may use it. Closed, or dropped, it waits until all is done that it was asked for;
    kernels of your own that wait for rows then end without them.

    Attributes:
        ordinal: Which device.
        address: Where kernels of your own find it: what `cuda_header` calls ``fifo``.
        post_rows: Ids of one post, at most.
        slots: Posts that can be under way.
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
        # What was queued is waited for without the GIL, also where nobody closes it.
        weakref.finalize(self, _dropped, native).atexit = False

    def gather(self, ids: Any, out: Any = None) -> Any:
        """Queues a gather on the current stream of the device.

        Args:
            ids: A contiguous tensor of ``int32`` or ``int64`` on the device, of any shape. What it
                has when its turn has come counts, as with any kernel.
            out: A contiguous tensor on the device for the rows, of the shape of ``ids`` and of a
                row, and of the table's type.

        Returns:
            ``out``, or a new tensor. It has its rows when the stream is done with it; whether there
            were any for these ids, `check` says.

        Raises:
            TypeError: The ids are no such tensor.
            ValueError: ``out`` does not fit, or this is closed.
            DeviceError: The stream is captured into a graph, or the driver refuses.
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
        """Raises the first thing that went wrong since this was called last.

        What kernels have asked for until now is known of once they are done, as after
        ``torch.cuda.synchronize()``.

        Raises:
            IndexError: There is no such row.
            TransferError: Bytes could not be read.
            CorruptCheckpointError: A file has changed, or bytes are not those that were written.
            StorageError: A kernel has posted more ids than `post_rows`.
            DeviceError: The device has failed.
            ValueError: This is closed.
        """
        native = self._open()
        with self._naming():
            native.check()
        self._check_files()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Has kernels of your own be served: those that the current stream gets while this is open.

        At its end it waits for that stream. Others are yours to wait for before. A thread looks out
        for posts meanwhile, also where none come.

        Raises:
            ValueError: This is closed.
            DeviceError: The device has failed.
        """
        serving = self._open().serve()
        try:
            yield
        finally:
            serving.end(*current_streams([self.ordinal]))

    def close(self) -> None:
        """Waits until all is done that was queued, and ends it. Once more it does nothing.

        Raises:
            IndexError: As `check`, of what it has not told yet; it is closed all the same.
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
            # What has happened before says more.
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

    def _place(self, tensor: Any, name: str) -> _native._Device:
        """Its device and stream.

        Raises:
            ValueError: It is on another device.
            DeviceError: The current stream is one that the native module does not reach.
        """
        device = tensor.device
        if device.type != "cuda" or device.index not in (None, self.ordinal):
            raise ValueError(f"{name}: on {device}: needed is one on cuda:{self.ordinal}")
        place = DirectPlaces().on(f"cuda:{self.ordinal}")
        check_known(device, place)
        return cast("_native._Device", place)


def _dropped(native: _native.RowProxy) -> None:
    """Ends one that nobody has any more, and has nobody to tell what went wrong."""
    with contextlib.suppress(Exception):
        native.close()


def ordinal_of(device: Any) -> int:
    """The number of a CUDA device.

    Raises:
        DeviceError: There is no driver for it.
        ValueError: It is no CUDA device.
    """
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
