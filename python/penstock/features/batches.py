"""`Batches`: begins to gather rows, wherever they go: to memory of the host, or of a device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.features.pending import PendingRows
from penstock.features.results import target_of
from penstock.tensors import dtypes
from penstock.tensors.copying import bump_versions, copy_elements
from penstock.tensors.devices import DirectPlaces, current_streams, open_place
from penstock.tensors.memory import of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from penstock import _native
    from penstock.features.ids import Ids
    from penstock.features.results import Results


class Batches:
    """Begins batches of one table.

    Args:
        reader: Reads them.
        results: Makes memory for them.
        check: Raises where a file has changed.
    """

    def __init__(
        self, reader: _native.RowReader, results: Results, check: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._results = results
        self._check = check

    def begin(
        self,
        numbers: Ids,
        shape: Sequence[int],
        out: Any,
        device: torch.device | None,
        foreseen: int | None,
    ) -> PendingRows:
        """Begins one.

        Args:
            numbers: Of its rows.
            shape: Of the result.
            out: Memory for it; None for memory of its own.
            device: Where that is to be; None for the host.
            foreseen: What the cache knows the batch by, if it does.

        Raises:
            IndexError: There is no such row.
            ValueError: ``out`` does not fit.
            TypeError: ``out`` is neither a tensor nor an array.
            DeviceError: The stream of the device is being captured, or its driver fails.
        """
        is_ours = out is None
        if out is not None:
            self._results.check(out, shape, device)
        elif device is not None and device.type != "cpu":
            out = self._results.empty_on(shape, device)
        else:
            is_torch = numbers.is_torch or device is not None
            out = self._results.empty(shape, is_torch=is_torch)
            return self._on_host(numbers, out, foreseen, None)
        bump_versions([out])
        if not dtypes.is_tensor(out) or out.device.type == "cpu":
            return self._on_host(numbers, out, foreseen, None)
        memory = of_tensor(out, "out")
        place = DirectPlaces().of(memory)
        if place is None:
            host = self._results.empty(shape, is_torch=True)
            return self._on_host(numbers, host, foreseen, out)
        target = memory.address, (memory.nbytes,), None, 1, (out, out.untyped_storage())
        native = self._reader.gather_to_device(
            numbers.array, numbers.is_signed, target, place, foreseen
        )

        def hold() -> None:
            # Of whoever asks for the rows, on the stream that it works on by then.
            (current,) = current_streams([place[0]])
            native.hold(current[1])
            if is_ours and current != place:
                # It is the other one's, which gets it back when this one is done with it.
                out.record_stream(dtypes.import_torch().cuda.current_stream(place[0]))

        return PendingRows(native, out, self._check, hold)

    def _on_host(self, numbers: Ids, rows: Any, foreseen: int | None, out: Any) -> PendingRows:
        """One that comes to memory of the host; PyTorch copies it to ``out``, if there is one."""
        native = self._reader.gather(numbers.array, numbers.is_signed, target_of(rows), foreseen)
        if out is None:
            return PendingRows(native, rows, self._check, None)
        waiting = [rows]

        turn = threading.Lock()

        def copy() -> None:
            # Once, whoever asks for it how often; who asks meanwhile waits for it.
            with turn:
                if waiting:
                    copy_elements(out, waiting[0])
                    waiting.clear()

        return PendingRows(native, out, self._check, copy)


def on_host(value: Any, name: str = "ids") -> tuple[Any, torch.device | None]:
    """What memory of the host has of ids or rows, and the device that they are on, if any other.

    Raises:
        DeviceError: The stream of the device is being captured: nothing can be copied from it.
    """
    if not dtypes.is_tensor(value) or value.device.type == "cpu":
        return value, None
    if of_tensor(value, name).address:
        # PyTorch's copy would break a capture.
        open_place(value.device)
    return value.detach().to("cpu"), value.device
