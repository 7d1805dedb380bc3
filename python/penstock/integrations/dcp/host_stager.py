"""`HostStager`: copies a state to host memory that it keeps for the next copy.

DCP's `DefaultStager` copies storage by storage with a parallel kernel of PyTorch, which costs each
tensor a barrier of all threads, and the pages of its memory are small ones. Here the storages of
plain tensors on the host lie side by side in one mapping of huge pages, and few threads copy them
with `memmove`. All other values are copied by DCP's stager.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLAIN = StagingOptions(False, False, False, False)
"""The options with which `async_save` makes a stager of its own."""

_ALIGN_BYTES = 64
"""Staged storages begin at multiples of this, as those of PyTorch's allocator do."""
_PIECE_BYTES = 4 << 20
_THREADS_MAX = 4
"""More threads copy no faster than the memory is."""
_ALONE_BYTES_MAX = 8 << 20
"""A copy of this size ends before a second thread has begun."""
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class _Span:
    """The part of a storage that tensors of the state use.

    Attributes:
        address: Address of the storage's first byte.
        begin: First byte in use, rounded down to `_ALIGN_BYTES`.
        end: Behind the last byte in use.
        staged: The copy.
    """

    __slots__ = ("address", "begin", "end", "staged")

    def __init__(self, address: int, begin: int, end: int) -> None:
        self.address, self.begin, self.end = address, begin, end
        self.staged: torch.UntypedStorage | None = None


class HostStager:
    """Copies one state after the other into the same memory.

    A copy is valid until the next call of `stage`. The memory has the size of the largest state so
    far: of each storage, what lies between the first and the last byte that its tensors use.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._theirs = DefaultStager(PLAIN)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state; the state may change when this returns."""
        spans: dict[int, _Span] = {}
        plain: set[int] = set()
        _collect(state_dict, spans, plain)
        self._copy(list(spans.values()))
        with torch.no_grad():
            copied: dict[str, Any] = _Copies(self._by_dcp, spans, plain).of(state_dict)
        return copied

    def close(self) -> None:
        """Releases the memory."""
        self._memory = None
        self._theirs.close()

    def _copy(self, spans: list[_Span]) -> None:
        """Copies the spans into the memory, side by side."""
        if not spans:
            return
        memory = self._reserved(sum(_aligned(span.end - span.begin) for span in spans))
        offset = 0
        pieces: list[tuple[int, int, int]] = []
        for span in spans:
            nbytes = span.end - span.begin
            place = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
            # A storage of its own, so that a pickle of one tensor does not hold all of the memory.
            span.staged = place.untyped_storage()
            to, source = place.data_ptr(), span.address + span.begin
            pieces += [
                (to + at, source + at, min(_PIECE_BYTES, nbytes - at))
                for at in range(0, nbytes, _PIECE_BYTES)
            ]
            offset += _aligned(nbytes)
        _copy_pieces(pieces, threads=1 if offset <= _ALONE_BYTES_MAX else _threads())

    def _reserved(self, nbytes: int) -> mmap.mmap:
        """Memory of at least this size, kept from the copy before if it suffices."""
        if self._memory is None or len(self._memory) < nbytes:
            # Released first, so that the old memory and the new are not held together.
            self._memory = None
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Kernels without huge pages refuse the advice.
            with contextlib.suppress(OSError, AttributeError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return self._memory

    def _by_dcp(self, value: Any) -> Any:
        try:
            return self._theirs.stage(value)
        except AssertionError:
            # A storage has another size than at the last copy.
            self._theirs.close()
            self._theirs = DefaultStager(PLAIN)
            return self._theirs.stage(value)


class _Copies:
    """The copies of values: of plain tensors, whose storages are copied already, and of others."""

    def __init__(
        self, by_dcp: Callable[[Any], Any], spans: dict[int, _Span], plain: set[int]
    ) -> None:
        self._by_dcp = by_dcp
        self._spans = spans
        self._plain = plain
        self._known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is dict:
            return {key: self.of(child) for key, child in value.items()}
        if kind is OrderedDict:
            ordered = OrderedDict((key, self.of(child)) for key, child in value.items())
            # The versions of modules, in what `state_dict` of a module returns.
            vars(ordered).update(self._by_dcp(vars(value)))
            return ordered
        if kind is list or kind is tuple:
            return kind(self.of(child) for child in value)
        copy = self._known.get(id(value))
        if copy is None:
            if id(value) in self._plain:
                copy = _staged(value, self._spans)
            else:
                copy = _cloned(value) if _needs_clone(value) else self._by_dcp(value)
            self._known[id(value)] = copy
        return copy


def _is_plain(value: Any) -> bool:
    """Whether the bytes of a tensor's storage, copied, are all of it."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.is_cpu
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_nested or value.is_conj() or value.is_neg())
        and value.data_ptr() != 0
        and not vars(value)
    )


def _needs_clone(value: Any) -> bool:
    """Whether DCP's stager fails for a tensor, or forgets that its elements are conjugated."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and (
        value.is_sparse or value.is_conj() or value.is_neg()
    )


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone().cpu()


def _collect(value: Any, spans: dict[int, _Span], plain: set[int]) -> None:
    """Finds the ids of all plain tensors, and the spans by the addresses of their storages."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for child in value.values():
            _collect(child, spans, plain)
    elif kind is list or kind is tuple:
        for child in value:
            _collect(child, spans, plain)
    elif kind not in _ATOMS and id(value) not in plain and _is_plain(value):
        plain.add(id(value))
        address, item_bytes = value.untyped_storage().data_ptr(), value.element_size()
        first = value.storage_offset()
        if value.is_contiguous():
            last = first + value.numel()
        else:
            steps = zip(value.size(), value.stride(), strict=True)
            last = first + sum((size - 1) * stride for size, stride in steps) + 1
        begin = first * item_bytes // _ALIGN_BYTES * _ALIGN_BYTES
        span = spans.get(address)
        if span is None:
            spans[address] = _Span(address, begin, last * item_bytes)
        else:
            span.begin, span.end = min(span.begin, begin), max(span.end, last * item_bytes)


def _staged(tensor: torch.Tensor, spans: dict[int, _Span]) -> torch.Tensor:
    """A tensor of the same layout over the copy of its storage."""
    span = spans[tensor.untyped_storage().data_ptr()]
    storage: Any = span.staged
    # `_ALIGN_BYTES` is a multiple of every element's size.
    offset = tensor.storage_offset() - span.begin // tensor.element_size()
    return tensor.new_empty(0).set_(storage, offset, tensor.size(), tensor.stride())


def _copy_pieces(pieces: list[tuple[int, int, int]], threads: int) -> None:
    """Copies bytes: pairs of addresses, to and from, with a size."""
    rest: Iterator[tuple[int, int, int]] = iter(pieces)

    def run() -> None:
        # `memmove` of ctypes releases the GIL.
        for to, source, nbytes in rest:
            ctypes.memmove(to, source, nbytes)

    others = [threading.Thread(target=run, name="penstock-dcp-copy") for _ in range(threads - 1)]
    begun = []
    try:
        for one in others:
            one.start()
            begun.append(one)
        run()
    finally:
        for one in begun:
            one.join()


def _threads() -> int:
    return max(1, min(torch.get_num_threads(), _THREADS_MAX))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
