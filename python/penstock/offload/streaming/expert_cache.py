"""`ExpertCache`: reads the experts that calls need, and keeps those used often in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DeviceError, PenstockError
from penstock.offload.streaming.experts import slab_sizes_of, slots_of
from penstock.offload.streaming.weights.use_order import UseOrder
from penstock.offload.streaming.weights.weight_files import WeightFiles
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from penstock import _native
    from penstock.io.files.file_marks import FileMark
    from penstock.io.tensor_io import TensorIO
    from penstock.io.transfer import Transfer
    from penstock.offload.streaming.experts import Mixture, Slab
    from penstock.offload.streaming.weights.sealed_read import SealedRead, SealedReader
    from penstock.offload.streaming.weights.verify_on_first_read import FirstReadVerifier
    from penstock.tensors.devices import DeviceStream

_HALF_LIFE_CALLS = 16
"""Calls of an expert's layer after which a use counts half. Longer is better for skewed routers,
shorter for routers that repeat themselves or change with the topic. With room for an eighth of 64
experts, such routers give hit rates of 11 to 44 %, against 8 to 32 % with least recently used; with
room for less than one pass needs 4 to 26 %, against none."""
_WORTH_MAX = 1e100
_FREE = -1


@dataclass(slots=True)
class ExpertsReport:
    """Counters of a streamed model's experts.

    Attributes:
        memory_bytes: Memory for expert matrices.
        uses: Expert matrices that calls needed; an expert mostly has two.
        hits: Matrices of these that were in memory.
        routed_bytes: Bytes of the matrices that calls needed.
        read_bytes: Bytes read from storage.
        stalled_seconds: Seconds that calls waited for experts.
    """

    memory_bytes: int
    uses: int = 0
    hits: int = 0
    routed_bytes: int = 0
    read_bytes: int = 0
    stalled_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _MatrixSlot:
    """Memory for one matrix.

    Attributes:
        index: Its number among the slots.
        memory: Its bytes.
        slab: The matrix that it holds.
        transfer: The read that fills it.
        tensor: The matrix as a tensor, once it is read.
        made: The stream that converts it, and the moment when that is done.
    """

    index: int
    memory: Any
    slab: Slab | None = None
    transfer: Transfer | SealedRead | None = None
    tensor: Any = None
    made: tuple[DeviceStream, _native.Moment] | None = None

    def wait_read(self) -> None:
        """Waits until the read has ended, so that the kernel no longer writes to the memory."""
        if self.transfer is not None:
            with contextlib.suppress(PenstockError):
                self.transfer.result()


class _SlotPool:
    """Slots for the matrices of one parameter, of all layers."""

    def __init__(self, slabs: Sequence[Slab], memory: Any, slot_count: int) -> None:
        size = len(memory) // slot_count
        self.slabs = {slab.number: slab for slab in slabs}
        self.slots = [
            _MatrixSlot(index, memory[index * size : (index + 1) * size])
            for index in range(slot_count)
        ]
        self.slot_of: dict[int, _MatrixSlot] = {}
        self.users = np.zeros(slot_count, dtype=np.int64)
        self._held = np.full(slot_count, _FREE)

    def vacated(self, scores: np.ndarray[Any, Any]) -> _MatrixSlot | None:
        """Empties the unused slot whose expert has the lowest score; None if all are used."""
        free = np.flatnonzero(self.users == 0)
        if not free.size:
            return None
        held = self._held[free]
        slot = self.slots[int(free[np.where(held == _FREE, -1.0, scores[held]).argmin()])]
        slot.wait_read()
        self.forget(slot)
        slot.slab = slot.transfer = slot.tensor = slot.made = None
        return slot

    def fill(self, slot: _MatrixSlot, slab: Slab, transfer: Transfer | SealedRead) -> None:
        """Assigns a slot to a matrix that is being read into it."""
        slot.slab, slot.transfer = slab, transfer
        self.slot_of[slab.number] = slot
        self._held[slot.index] = slab.number

    def cancel_reads(self) -> None:
        """Cancels all reads, and waits until they have ended."""
        for slot in self.slots:
            if slot.transfer is not None:
                slot.transfer.cancel()
        for slot in self.slots:
            slot.wait_read()

    def forget(self, slot: _MatrixSlot) -> None:
        """Removes a slot's matrix from the index, so that no call finds it."""
        if slot.slab is not None and self.slot_of.get(slot.slab.number) is slot:
            del self.slot_of[slot.slab.number]
            self._held[slot.index] = _FREE


class ExpertCache:
    """Reads matrices of experts into slots, and evicts the least frequently used.

    The time of last use would not do: layers are called in a circle, so all experts of one layer
    would be evicted before the next layer's. A use counts less as calls go by.

    Args:
        mixtures: The model's modules with experts.
        io: Reads; it has its own share of the device, as calls wait for these reads, but not for
            reads ahead.
        marks: Identity of each file when the model was made, by its path.
        verifier: Verifies the first read of each range, where there are digests.
        device: Device of the slots; None for the host.
        sealed: Reads sealed files; None for clear ones.

    Attributes:
        counts: Counters.
        device: Device of the slots.
        slots: The number and the size of slots that the experts can use.
        weight_bytes: Bytes of all experts.
        on_stall: Called with the seconds that a call has waited, in the calling thread.
    """

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        io: TensorIO,
        marks: Mapping[str, FileMark],
        verifier: FirstReadVerifier | None = None,
        device: torch.device | None = None,
        sealed: SealedReader | None = None,
    ) -> None:
        self.counts = ExpertsReport(0)
        self.device: Any = device or "cpu"
        self.on_stall: Callable[[float], None] = lambda _: None
        self.slots = slots_of(mixtures)
        self.weight_bytes = sum(slab.weight_bytes for slab in _all_of(mixtures))
        self._mixtures = mixtures
        self._io = io
        self._files = WeightFiles(io, marks, verifier, sealed)
        self._pools: dict[str, _SlotPool] = {}
        self._active_uses: set[ExpertsUse] = set()
        self._kernels = UseOrder(device)
        self._scores = np.zeros(self.slots.expert_count)
        self._worth = 1.0
        self._growth = 2.0 ** (1 / (_HALF_LIFE_CALLS * len(mixtures)))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def let_go(self) -> None:
        """Waits until no call uses experts, then drops the memory."""
        with self._lock:
            while self._active_uses:
                self._changed.wait()
            while self._pools:
                self._pools.popitem()[1].cancel_reads()

    def take(self, slot_count: int, memory: Any) -> None:
        """Takes new memory for the slots."""
        with self._lock:
            self.counts.memory_bytes = len(memory)
            begin = 0
            for attribute, size in slab_sizes_of(self._mixtures).items():
                end = begin + slot_count * size
                slabs = [one for each in self._mixtures for one in each.slabs.get(attribute, ())]
                self._pools[attribute] = _SlotPool(slabs, memory[begin:end], slot_count)
                begin = end
            self._changed.notify_all()

    def check_stream(self) -> None:
        """Raises `DeviceError` if the current stream is being captured into a graph.

        A replayed graph would use the experts chosen at its capture.
        """
        self._kernels.check()

    def use(
        self, attributes: Sequence[str], numbers: Sequence[int], *, is_ordered: bool
    ) -> ExpertsUse:
        """Registers the experts that one call needs, in this order if ``is_ordered``."""
        with self._lock:
            while not self._pools:
                self._changed.wait()
            self._worth *= self._growth
            if self._worth > _WORTH_MAX:
                self._scores /= self._worth
                self._worth = 1.0
            self._scores[list(numbers)] += self._worth
            waiting = {}
            for attribute in attributes:
                there = self._pools[attribute].slot_of
                order = numbers if is_ordered else sorted(numbers, key=lambda one: one not in there)
                waiting[attribute] = deque(order)
            use = ExpertsUse(self, numbers, waiting)
            self._active_uses.add(use)
            return use

    def claim(self, attribute: str, use: ExpertsUse) -> None:
        """Claims slots for as many of a call's matrices as fit, at least one of ``attribute``.

        A call that has to wait for room gives back its other claims, so that calls cannot deadlock.
        """
        with self._lock:
            while True:
                for one in sorted(use.waiting, key=lambda one: one != attribute):
                    self._claim_ahead(one, use)
                if use.coming[attribute] or not use.waiting[attribute]:
                    return
                self._take_back(use)
                self._changed.notify_all()
                self._changed.wait()

    def _claim_ahead(self, attribute: str, use: ExpertsUse) -> None:
        pool, waiting = self._pools[attribute], use.waiting[attribute]
        while waiting:
            slot = pool.slot_of.get(waiting[0])
            is_hit = slot is not None
            slot = slot or self._begin(pool, pool.slabs[waiting[0]])
            if slot is None:
                return
            pool.users[slot.index] += 1
            self.counts.hits += is_hit
            use.coming[attribute][waiting.popleft()] = slot

    def _take_back(self, use: ExpertsUse) -> None:
        for attribute, coming in use.coming.items():
            for number, slot in reversed(coming.items()):
                self._pools[attribute].users[slot.index] -= 1
                use.waiting[attribute].appendleft(number)
            coming.clear()

    def _begin(self, pool: _SlotPool, slab: Slab) -> _MatrixSlot | None:
        """Starts to read a matrix, if there is a free slot."""
        slot = pool.vacated(self._scores)
        if slot is None:
            return None
        self._kernels.follow()
        try:
            pool.fill(slot, slab, self._files.begin(slab.spans, slot.memory, slab.named))
        except Exception:
            raise
        except BaseException:
            # The kernel may still write to its memory: wait for all reads.
            self._files.wait_until_idle()
            raise
        self.counts.read_bytes += sum(span.nbytes for span in slab.spans)
        return slot

    def finish(self, slot: _MatrixSlot) -> Any:
        """Waits until a claimed matrix is read and verified, and returns it."""
        torch = dtypes.import_torch()
        slab, transfer = slot.slab, slot.transfer
        assert slab is not None
        assert transfer is not None
        is_hit, begun = slot.tensor is not None or transfer.done(), time.perf_counter()
        # Surrounding bytes are not read ahead for so many matrices: they would need more memory.
        self._files.finish(slab.spans, slot.memory, transfer, slab.named)
        stalled_seconds = 0.0 if is_hit else time.perf_counter() - begun
        if not is_hit:
            self.on_stall(stalled_seconds)
        with self._lock:
            self.counts.uses += 1
            self.counts.routed_bytes += slab.weight_bytes
            self.counts.stalled_seconds += stalled_seconds
            if slot.tensor is None:
                with torch.inference_mode(False), torch.no_grad():
                    tensor = slab.tensor(slot.memory)
                slot.made = self._kernels.record() if slab.is_converted else None
                slot.tensor = tensor
            elif slot.made is not None and self._kernels.wait_for(*slot.made):
                slot.made = None
            return slot.tensor

    def take_up(self, use: ExpertsUse, attribute: str, number: int) -> _MatrixSlot:
        """Makes a claimed matrix the one that a call holds."""
        with self._lock:
            slot = use.coming[attribute].pop(number)
            use.now = attribute, slot
            return slot

    def give_back(self, use: ExpertsUse, *, is_failed: bool = False) -> None:
        """Gives back the matrix that a call holds; a failed one is read again by the next call."""
        with self._lock:
            if use.now is None:
                return
            try:
                # Kernels that use the matrix are queued: the slot is not refilled before they end.
                self._kernels.record()
            except DeviceError:
                self._put_back(use, is_failed=is_failed)
                raise
            self._put_back(use, is_failed=is_failed)

    def _put_back(self, use: ExpertsUse, *, is_failed: bool) -> None:
        assert use.now is not None
        (attribute, slot), use.now = use.now, None
        pool = self._pools[attribute]
        pool.users[slot.index] -= 1
        if is_failed:
            pool.forget(slot)
        self._changed.notify_all()

    def close(self, use: ExpertsUse, *, is_broken_off: bool) -> None:
        """Gives back all slots of a call.

        ``is_broken_off``: an interrupt may have come between a change and its count, so that all
        counts are made anew.
        """
        with self._lock:
            try:
                if use.now is not None:
                    self._kernels.record()
            finally:
                self._active_uses.discard(use)
                if is_broken_off:
                    self._count_again()
                else:
                    self._take_back(use)
                self._changed.notify_all()

    def _count_again(self) -> None:
        """Counts the users of each slot anew."""
        for pool in self._pools.values():
            pool.users[:] = 0
        for use in self._active_uses:
            for attribute, index in use.held:
                self._pools[attribute].users[index] += 1


class ExpertsUse:
    """The experts that one call needs; the call holds one matrix at a time.

    Attributes:
        waiting: For each parameter, numbers of the experts without a slot.
        coming: For each parameter, slots being read, or read, by the expert's number.
        now: The parameter and the slot of the matrix that the call holds.
    """

    def __init__(
        self, cache: ExpertCache, numbers: Sequence[int], waiting: dict[str, deque[int]]
    ) -> None:
        self.waiting = waiting
        self.coming: dict[str, dict[int, _MatrixSlot]] = {attribute: {} for attribute in waiting}
        self._cache = cache
        self._numbers = numbers
        self.now: tuple[str, _MatrixSlot] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_broken_off = True
        try:
            if kind is None or issubclass(kind, Exception):
                self._cache.give_back(self)
                is_broken_off = False
        finally:
            self._cache.close(self, is_broken_off=is_broken_off)

    @property
    def held(self) -> set[tuple[str, int]]:
        """The parameters and slot indices that the call has claimed."""
        found = {(one, slot.index) for one, each in self.coming.items() for slot in each.values()}
        return found if self.now is None else {*found, (self.now[0], self.now[1].index)}

    def each(self, attribute: str) -> Iterator[tuple[int, Any]]:
        """Yields all matrices of a parameter with their numbers, those already read first."""
        waiting, coming = self.waiting[attribute], self.coming[attribute]
        if not waiting and not coming:
            waiting.extend(self._numbers)
        while True:
            self._cache.give_back(self)
            self._cache.claim(attribute, self)
            if not coming:
                return
            there = (one for one, slot in coming.items() if slot.transfer and slot.transfer.done())
            number = next(there, next(iter(coming)))
            yield number, self._take_up(attribute, number)

    def the(self, attribute: str, number: int) -> Any:
        """The matrix of one expert; call it in the order given to `ExpertCache.use`."""
        self._cache.give_back(self)
        waiting, coming = self.waiting[attribute], self.coming[attribute]
        if number not in coming and number not in waiting:
            waiting.appendleft(number)
        self._cache.claim(attribute, self)
        return self._take_up(attribute, number)

    def _take_up(self, attribute: str, number: int) -> Any:
        slot = self._cache.take_up(self, attribute, number)
        try:
            return self._cache.finish(slot)
        except BaseException:
            self._cache.give_back(self, is_failed=True)
            raise


def _all_of(mixtures: Sequence[Mixture]) -> Iterator[Slab]:
    for mixture in mixtures:
        for slabs in mixture.slabs.values():
            yield from slabs
