"""`Batches`: starts gathers of rows into host or device memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.features.gathering.pending import PendingRows
from penstock.features.gathering.results import target_of
from penstock.tensors import dtypes
from penstock.tensors.copying import bump_versions, copy_elements
from penstock.tensors.devices import CurrentStreams, current_streams, open_stream
from penstock.tensors.memory import of_tensor
from penstock.tensors.native_rows import NativeArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from penstock import _native
    from penstock.features.gathering.ids import RowIds
    from penstock.features.gathering.results import Results


class Batches:
    """Starts gathers of one table's rows. ``check`` raises if a file of the table has changed."""

    def __init__(
        self, reader: _native.RowReader, results: Results, check: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._results = results
        self._check = check

    def begin(
        self,
        numbers: RowIds,
        shape: Sequence[int],
        out: Any,
        device: torch.device | None,
        hinted: int | None,
    ) -> PendingRows:
        """Starts one gather.

        Args:
            numbers: Ids of the rows.
            shape: Shape of the result.
            out: Memory for the result; None to allocate it.
            device: Device of the result; None for the host.
            hinted: The cache's number for this batch, if it was hinted.
        """
        is_ours = out is None
        if out is not None:
            self._results.check(out, shape, device)
        elif device is not None and device.type != "cpu":
            out = self._results.empty_on(shape, device)
        else:
            is_torch = numbers.is_torch or device is not None
            out = self._results.empty(shape, is_torch=is_torch)
            return self._on_host(numbers, out, hinted, None)
        bump_versions([out])
        if not dtypes.is_tensor(out) or out.device.type == "cpu":
            return self._on_host(numbers, out, hinted, None)
        memory = of_tensor(out, "out")
        place = CurrentStreams().of(memory)
        if place is None:
            host = self._results.empty(shape, is_torch=True)
            return self._on_host(numbers, host, hinted, out)
        owner = out, out.untyped_storage()
        target = NativeArray.of_bytes(memory.address, memory.nbytes, owner)
        native = self._reader.gather_to_device(
            numbers.array, numbers.is_signed, target, place, hinted
        )

        def hold() -> None:
            # Runs for the caller that asks for the rows, on the stream current at that time.
            (current,) = current_streams([place.ordinal])
            native.hold(current[1])
            if is_ours and current != place:
                # The memory belongs to the stream that gathered; PyTorch reuses it after this one,
                # too.
                out.record_stream(dtypes.import_torch().cuda.current_stream(place.ordinal))

        return PendingRows(native, out, self._check, hold)

    def _on_host(self, numbers: RowIds, rows: Any, hinted: int | None, out: Any) -> PendingRows:
        """Gathers into host memory; PyTorch then copies it to ``out``, if that is given."""
        native = self._reader.gather(numbers.array, numbers.is_signed, target_of(rows), hinted)
        if out is None:
            return PendingRows(native, rows, self._check, None)
        waiting = [rows]

        turn = threading.Lock()

        def copy() -> None:
            # Copies once, however many callers ask; others wait meanwhile.
            with turn:
                if waiting:
                    copy_elements(out, waiting[0])
                    waiting.clear()

        return PendingRows(native, out, self._check, copy)


def on_host(value: Any, name: str = "ids") -> tuple[Any, torch.device | None]:
    """Ids or rows in host memory, and the device they came from; None for the host."""
    if not dtypes.is_tensor(value) or value.device.type == "cpu":
        return value, None
    if of_tensor(value, name).address:
        # PyTorch's copy would break a stream capture: this raises first.
        open_stream(value.device)
    return value.detach().to("cpu"), value.device
