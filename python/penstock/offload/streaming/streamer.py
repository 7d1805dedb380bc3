"""`Streamer`: reads units ahead of their use, binds them to their modules, and drops them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common import tracing
from penstock.errors import PenstockError, TransferError, UnsupportedStateError
from penstock.offload.streaming.forward_passes import Counts, ForwardPasses, ReadSpeed
from penstock.offload.streaming.module_hooks import UnitCall, UnitCalls
from penstock.offload.streaming.weights.bound_weights import (
    bind,
    check_untouched,
    placeholders_of,
    views_of,
)
from penstock.offload.streaming.weights.memory import Ring, RingRange, WeightMemory, on_device
from penstock.offload.streaming.weights.shares import NO_SLOTS, MemoryShares, needs_of, shared_out
from penstock.offload.streaming.weights.use_order import UseOrder
from penstock.offload.streaming.weights.weight_files import WeightFiles
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock import _native
    from penstock.io.files.file_marks import FileMark
    from penstock.io.tensor_io import TensorIO
    from penstock.io.transfer import Transfer
    from penstock.offload.streaming.expert_cache import ExpertCache
    from penstock.offload.streaming.weights.sealed_read import SealedRead, SealedReader
    from penstock.offload.streaming.weights.units import Unit
    from penstock.offload.streaming.weights.verify_on_first_read import (
        FirstReadVerifier,
        SurroundingBytes,
    )
    from penstock.tensors.devices import DeviceStream

_SURROUNDINGS_MAX = 4
"""Units whose surrounding bytes (the rest of their chunks) are in memory at a time, at most."""


@dataclass(eq=False)
class _Loaded:
    """A unit whose weights are read, or being read.

    Attributes:
        places: Streams whose kernels have used it, if it is resident.
        made: The stream that converts it, and the moment when that is done; None afterwards.
    """

    memory: Any
    claim: RingRange | None
    transfer: Transfer | SealedRead
    begun: float
    surroundings: SurroundingBytes | None = None
    users: set[UnitCall] = field(default_factory=set)
    is_used: bool = False
    places: set[DeviceStream] = field(default_factory=set)
    made: tuple[DeviceStream, _native.Moment] | None = None
    is_failed: bool = False


class Streamer:
    """Loads each unit's weights before its module runs.

    Args:
        units: The units in the order of their use.
        memory_bytes: Bytes for their weights.
        held_bytes: Bytes of it already taken by weights of no unit.
        io: Reads.
        marks: Identity of each file when the model was made, by its path.
        verifier: Verifies the first read of each range, where there are digests.
        memory: Memory for the weights, if it was allocated already.
        experts: Reads experts one by one, if the model has some.
        device: Device of the weights; None for the host.
        sealed: Reads sealed files; None for clear ones.

    Attributes:
        counts: Counters.
        units: The units in the order of their use.
        experts: Reads experts one by one, if the model has some.
        needs: The least and most memory that the model can use.
        shares: How its memory is divided.
        memory_bytes: Its memory at present.
    """

    def __init__(
        self,
        units: list[Unit],
        memory_bytes: int,
        held_bytes: int,
        io: TensorIO,
        marks: Mapping[str, FileMark],
        verifier: FirstReadVerifier | None = None,
        memory: WeightMemory | None = None,
        experts: ExpertCache | None = None,
        device: torch.device | None = None,
        sealed: SealedReader | None = None,
    ) -> None:
        self._device = device
        self._use_order = UseOrder(device)
        self.counts = Counts()
        self.passes = ForwardPasses()
        self.reads = ReadSpeed()
        self.units = units
        self.experts = experts
        self._slots = NO_SLOTS if experts is None else experts.slots
        self.needs = needs_of(units, held_bytes, self._slots)
        self._take(memory_bytes, shared_out(units, memory_bytes, held_bytes, self._slots), memory)
        self._io = io
        self._verifier = verifier
        self._sealed = sealed
        self._files = WeightFiles(io, marks, verifier, sealed)
        self._loaded: dict[int, _Loaded] = {}
        self._cursor = 0
        self._calls = UnitCalls()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_resized = False
        where = "cpu" if device is None else self._arena.device
        self._placeholders = [placeholders_of(unit, where) for unit in units]
        if experts is not None:
            experts.on_stall = self._stalled

    def begin(self) -> None:
        """Starts to read, and replaces the modules' parameters with placeholders."""
        with self._lock:
            self._read_on()
        for unit, placeholders in zip(self.units, self._placeholders, strict=True):
            bind(unit, placeholders)

    def _take(
        self, memory_bytes: int, shares: MemoryShares, memory: WeightMemory | None = None
    ) -> None:
        torch = dtypes.import_torch()
        self.memory_bytes = memory_bytes
        self.shares = shares
        self._resident = shares.resident
        self._ring = Ring(shares.ring_bytes)
        expert_bytes = self._slots.bytes_of(shares.slot_count)
        nbytes = shares.resident_bytes + shares.ring_bytes + expert_bytes
        with torch.inference_mode(False):
            if self._device is not None:
                weights = on_device(nbytes, self._device)
            else:
                weights = (memory or WeightMemory(nbytes)).tensor(nbytes)
        self._arena = weights[: shares.ring_bytes]
        self._places: dict[int, Any] = {}
        begin = shares.ring_bytes
        for index in sorted(shares.resident):
            self._places[index] = weights[begin : begin + self.units[index].nbytes]
            begin += self.units[index].nbytes
        if self.experts is not None:
            self.experts.take(shares.slot_count, weights[begin : begin + expert_bytes])

    @property
    def read_bytes(self) -> int:
        """Bytes read from storage, with experts and with surrounding bytes read to verify."""
        around, experts = self._sealed or self._verifier, self.experts
        read_bytes = self.counts.read_bytes + (0 if around is None else around.read_bytes)
        return read_bytes + (0 if experts is None else experts.counts.read_bytes)

    def resize(self, memory_bytes: int) -> None:
        """Changes the memory, once no unit is in use, and starts to read again."""
        shares = shared_out(self.units, memory_bytes, self.shares.held_bytes, self._slots)
        if self._calls.indices:
            raise UnsupportedStateError(
                "memory that is shared with a model is divided anew while that is called: stream"
                " the other one before, or with memory of its own",
                key="memory_bytes",
            )
        with self._lock:
            # Calls that have not begun wait meanwhile.
            self._is_resized = True
            try:
                while any(loaded.users for loaded in self._loaded.values()):
                    self._changed.wait()
                self._let_go_of_all(list(self._loaded))
                # Frees the old memory before allocating the new one.
                self._arena, self._places = None, {}
                if self.experts is not None:
                    self.experts.let_go()
                self.reads.count_ended()
                self.passes = ForwardPasses()
                self._take(memory_bytes, shares)
            finally:
                self._is_resized = False
                self._changed.notify_all()

    def read_speed(self) -> ReadSpeed:
        """The speed of reads, including all that have ended."""
        with self._lock:
            self.reads.count_ended()
            return self.reads

    @property
    def in_flight_max(self) -> int:
        """Most requests in flight at a time."""
        return self._io.in_flight_max

    # ---- Called by the hooks

    def enter(self, index: int, place: int) -> None:
        """Loads a unit's weights, and keeps them until it is left as often as it was entered.

        ``place`` is that of the called module among those of the unit.

        The caller leaves it, even if this raises, with `leave` or with `go_back` to its earlier
        `depth`.
        """
        torch = dtypes.import_torch()
        begun = time.perf_counter()
        unit = self.units[index]
        self._refuse_capture(index)
        called = self._calls.indices
        loaded, is_hit = self._load(self._calls.begin(index, unit.name), called)
        with self._lock:
            if not loaded.is_used:
                # The caller may compute under other modes than the next one: make plain tensors.
                with torch.inference_mode(False), torch.no_grad():
                    check_untouched(unit)
                    bind(unit, views_of(unit, loaded.memory))
                loaded.is_used = True
                if unit.converted:
                    loaded.made = self._use_order.record()
            elif loaded.made is not None and self._use_order.wait_for(*loaded.made):
                loaded.made = None
            stalled_seconds = 0.0 if is_hit else time.perf_counter() - begun
            self.counts.uses += 1
            self.counts.hits += is_hit
            self.counts.stalled_seconds += stalled_seconds
            self.counts.passes += self.passes.called(index, place)
            self.passes.took(stalled_seconds=stalled_seconds)
            self._read_ahead()
        self._calls.stalled(stalled_seconds)

    def _load(self, call: UnitCall, called: set[int]) -> tuple[_Loaded, bool]:
        """The weights of a call, and whether they were in memory; ``called``: units around it."""
        while True:
            loaded, was_ahead = self._register_call(call, called)
            try:
                return loaded, self._read(self.units[call.index], loaded)
            except TransferError:
                # Storage may have recovered since the read ahead failed: read once more.
                with self._lock:
                    if not was_ahead or len(loaded.users) > 1:
                        raise
                    loaded.users.discard(call)

    def _register_call(self, call: UnitCall, called: set[int]) -> tuple[_Loaded, bool]:
        """Registers a call with its unit's weights; also returns whether they were read ahead."""
        index = call.index
        with self._lock:
            while self._is_resized and not called:
                self._changed.wait()
            while (found := self._usable(index)) is None and not self._demand(index):
                if passing := called - self._resident:
                    raise UnsupportedStateError(
                        f"{self.units[index].name!r} is called while"
                        f" {self.units[passing.pop()].name!r} is: make one block"
                        " of them (blocks=)",
                        key=self.units[index].name,
                    )
                self._changed.wait()
            loaded = self._loaded[index]
            loaded.users.add(call)
        return loaded, found is not None

    def _read(self, unit: Unit, loaded: _Loaded) -> bool:
        """Waits for the weights of a unit in use; returns whether they had been read already."""
        try:
            with self._lock:
                self._read_ahead()
            is_hit = loaded.transfer.done()
            if is_hit:
                self._finish(unit, loaded)
            else:
                self._wait(unit, loaded)
        except BaseException:
            loaded.is_failed = True
            raise
        return is_hit

    def lasting(self, index: int, output: Any) -> Any:
        """The output of a call, with copies of tensors in memory that is about to be reused.

        The unit is still in use, and the output may be a view of its weights, such as an embedding
        of positions.
        """
        torch = dtypes.import_torch()
        if index in self._resident:
            return output
        address = self._arena.untyped_storage().data_ptr()

        def is_passing(one: Any) -> bool:
            try:
                return bool(one.untyped_storage().data_ptr() == address)
            except (RuntimeError, PenstockError):
                # Tensors of functorch, sparse ones and placeholders have no storage of their own.
                return False

        leaves, structure = torch.utils._pytree.tree_flatten(output)
        passing = [isinstance(one, torch.Tensor) and is_passing(one) for one in leaves]
        if not any(passing):
            return output
        lasting = [
            one.clone() if is_ours else one for one, is_ours in zip(leaves, passing, strict=True)
        ]
        return torch.utils._pytree.tree_unflatten(lasting, structure)

    def _stalled(self, seconds: float) -> None:
        """Notes that a call has waited for experts, which is no computing."""
        self._calls.stalled(seconds)
        with self._lock:
            self.passes.took(stalled_seconds=seconds)

    @property
    def depth(self) -> int:
        """The number of units' calls that this thread is in."""
        return self._calls.depth

    def leave(self, index: int) -> None:
        """Ends the innermost call of a unit; its weights are dropped unless they are resident."""
        self.go_back(self._calls.depth_of(index))

    def go_back(self, depth: int) -> None:
        """Ends all calls beyond a depth, however far they have come.

        It can be called again if an interrupt has broken it off.
        """
        while self._calls.depth > depth:
            ended = time.perf_counter()
            self._abort_call(self._calls.innermost)
            computing_seconds = self._calls.end(ended)
            with self._lock:
                self.passes.took(computing_seconds=computing_seconds)

    def _abort_call(self, call: UnitCall) -> None:
        with self._lock:
            loaded = self._loaded.get(call.index)
            if loaded is None or call not in loaded.users:
                return
            loaded.users.discard(call)
            is_failed = loaded.is_failed
            try:
                if loaded.is_used:
                    self._record_use(call.index, loaded)
                if not loaded.users and (is_failed or call.index not in self._resident):
                    self._let_go(call.index)
            finally:
                self._changed.notify_all()
            if not is_failed:
                self._read_ahead()

    def _record_use(self, index: int, loaded: _Loaded) -> None:
        """Notes a use of a unit on the current stream, for every call, as streams may differ."""
        if index not in self._resident:
            self._use_order.record()
        elif (place := self._use_order.place) is not None:
            # Only the stream: one being captured has no moments, and resident memory is rarely
            # refilled.
            loaded.places.add(place)

    def _refuse_capture(self, index: int) -> None:
        """Refuses a graph capture that would keep addresses that move, or repeat a conversion."""
        if self._device is None:
            return
        with self._lock:
            loaded = self._loaded.get(index)
            stays = index in self._resident and loaded is not None and loaded.is_used
        if not stays:
            self._use_order.check()

    # ---- With the lock held

    def _usable(self, index: int) -> _Loaded | None:
        """The weights of a unit that are read or being read; drops failed ones without users."""
        loaded = self._loaded.get(index)
        if loaded is not None and loaded.is_failed and not loaded.users:
            self._let_go(index)
            return None
        return loaded

    def _demand(self, index: int) -> bool:
        """Starts to read a unit that was not read ahead; returns whether there was room."""
        self._cursor = index
        if self._begin(index):
            self._cursor = self._following(index)
            return True
        unused = [
            one
            for one, loaded in self._loaded.items()
            if not loaded.users and one not in self._resident
        ]
        self._let_go_of_all(unused)
        if all(loaded.claim is None for loaded in self._loaded.values()):
            # An interrupt may have lost a claim before it was recorded.
            self._ring = Ring(self._ring.nbytes)
        if self._begin(index):
            self._cursor = self._following(index)
            return True
        return False

    def _read_ahead(self) -> None:
        """Starts to read the next units, while there is room.

        An error is not raised here, in the call of another unit, but when the unit itself is
        called.
        """
        with contextlib.suppress(PenstockError):
            self._read_on()

    def _read_on(self) -> None:
        for _ in self.units:
            index = self._cursor
            if index not in self._loaded:
                if not self._begin(index):
                    break
            elif index not in self._resident:
                break
            self._cursor = self._following(index)
        if self._verifier is not None:
            self._read_surroundings(self._verifier)

    def _read_surroundings(self, verifier: FirstReadVerifier) -> None:
        """Starts to read the surrounding bytes of units, with which their first use is verified."""
        count = sum(one.surroundings is not None for one in self._loaded.values())
        for index, one in self._loaded.items():
            if count >= _SURROUNDINGS_MAX:
                return
            if one.surroundings is None and not one.is_used:
                one.surroundings = verifier.begin(self.units[index].spans)
                count += one.surroundings is not None

    def _following(self, index: int) -> int:
        return (index + 1) % len(self.units)

    def _begin(self, index: int) -> bool:
        """Starts to read a unit, if there is room."""
        unit = self.units[index]
        claim = None
        if index not in self._resident and (claim := self._ring.take(unit.nbytes)) is None:
            return False
        try:
            if claim is None:
                memory = self._places[index]
            else:
                memory = self._arena[claim.begin : claim.begin + unit.nbytes]
            self._use_order.follow()
            transfer = self._files.begin(unit.spans, memory, functools.partial(_named, unit))
            self._loaded[index] = _Loaded(memory, claim, transfer, time.perf_counter())
        except Exception:
            if claim is not None:
                self._ring.give_back(claim)
            raise
        except BaseException:
            # The kernel may still write to its memory: wait for all reads.
            self._files.wait_until_idle()
            raise
        self.counts.read_bytes += sum(span.nbytes for span in unit.spans)
        self.reads.begun(transfer, unit.name)
        return True

    def _let_go_of_all(self, indices: list[int]) -> None:
        for index in indices:
            self._loaded[index].is_failed = True
            self._loaded[index].transfer.cancel()
        for index in indices:
            self._let_go(index)

    def _let_go(self, index: int) -> None:
        loaded = self._loaded[index]
        # The kernel may write to its memory until the read ends, however it ends.
        with contextlib.suppress(PenstockError):
            loaded.transfer.result()
        if loaded.is_used:
            loaded.is_failed = True
            bind(self.units[index], self._placeholders[index])
        for place in loaded.places:
            self._use_order.record_on(place)
        del self._loaded[index]
        if loaded.claim is not None:
            self._ring.give_back(loaded.claim)

    # ---- One unit

    def _wait(self, unit: Unit, loaded: _Loaded) -> None:
        """Waits for the weights of a unit; a trace shows the stall with the files read."""
        with tracing.call("stall", "weights", unit.name):
            begun = time.perf_counter()
            try:
                self._finish(unit, loaded)
            finally:
                ended = time.perf_counter()
                for path in dict.fromkeys(span.path for span in unit.spans):
                    nbytes = sum(span.nbytes for span in unit.spans if span.path == path)
                    told = f"{Path(path).name}, {nbytes} bytes"
                    tracing.past("read", max(begun, loaded.begun), ended, told)

    def _finish(self, unit: Unit, loaded: _Loaded) -> None:
        """Waits for the weights of a unit."""
        self._files.finish(
            unit.spans,
            loaded.memory,
            loaded.transfer,
            functools.partial(_named, unit),
            loaded.surroundings,
        )
        loaded.surroundings = None


def _named(unit: Unit, path: str, offset: int) -> str:
    """Name of the tensor that holds a byte of a file, or of the first behind it."""
    found = [
        (run.offset, seat.name)
        for seat in unit.seats
        for run in seat.stored.runs
        if run.path == path and run.offset + run.nbytes > offset
    ]
    return min(found)[1] if found else unit.name
