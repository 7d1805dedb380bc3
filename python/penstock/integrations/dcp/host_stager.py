"""`HostStager`: copies a state to host memory that it keeps for the next copy.

DCP's `DefaultStager` copies storage by storage with a parallel kernel of PyTorch, which costs each
tensor a barrier of all threads, and the pages of its memory are small ones. Here one call copies
the storages of plain tensors on the host side by side into memory in huge pages, past the caches,
so that a save writes them from there. All other values are copied by DCP's stager.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from penstock.plugin import CopyMemory, Piece

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = StagingOptions(False, False, False, False)
"""The options with which `async_save` makes a stager of its own."""

_ALIGN_BYTES = 64
"""The part of a storage begins at a multiple of this, and so does its copy."""
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
        owner: One of the tensors.
        offset: Where the copy begins in the memory.
        staged: The copy, as a tensor.
    """

    __slots__ = ("address", "begin", "end", "offset", "owner", "staged")

    def __init__(self, address: int, begin: int, end: int, owner: torch.Tensor) -> None:
        self.address, self.begin, self.end, self.owner = address, begin, end, owner
        self.offset = 0
        self.staged: torch.Tensor | None = None


class HostStager:
    """Copies one state after the other into the same memory.

    A copy is valid until the next call of `stage`. The memory has the size of the largest state so
    far: of each storage, what lies between the first and the last byte that its tensors use.
    """

    def __init__(self) -> None:
        self._memory = CopyMemory()
        self._theirs = DefaultStager(PLAIN)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state; the state may change when this returns."""
        spans: dict[int, _Span] = {}
        plain: dict[int, _Span] = {}
        _collect(state_dict, spans, plain)
        self._copy(list(spans.values()))
        with torch.no_grad():
            copied: dict[str, Any] = _Copies(self._by_dcp, self._memory, plain).of(state_dict)
        return copied

    def close(self) -> None:
        """Releases the memory."""
        self._memory.release()
        self._theirs.close()

    def _copy(self, spans: list[_Span]) -> None:
        """Copies the spans into the memory."""
        if not spans:
            return
        pieces = [
            Piece(span.address + span.begin, span.end - span.begin, span.owner) for span in spans
        ]
        is_small = sum(piece.nbytes for piece in pieces) <= _ALONE_BYTES_MAX
        offsets = self._memory.copy(pieces, threads=1 if is_small else _threads())
        for span, offset in zip(spans, offsets, strict=True):
            span.offset = offset

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
        self, by_dcp: Callable[[Any], Any], memory: CopyMemory, plain: dict[int, _Span]
    ) -> None:
        self._by_dcp = by_dcp
        self._buffer = memory.buffer
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
            span = self._plain.get(id(value))
            if span is not None:
                copy = self._staged(value, span)
            else:
                copy = _cloned(value) if _needs_clone(value) else self._by_dcp(value)
            self._known[id(value)] = copy
        return copy

    def _staged(self, tensor: torch.Tensor, span: _Span) -> torch.Tensor:
        """A tensor of the same layout over the copy of its storage."""
        nbytes = span.end - span.begin
        if span.staged is None:
            # A storage of its own, so that a pickle of one tensor does not hold all of the memory.
            is_all = tensor.nbytes == nbytes and tensor.is_contiguous()
            dtype = tensor.dtype if is_all else torch.uint8
            count = nbytes // dtype.itemsize
            span.staged = torch.frombuffer(
                self._buffer, dtype=dtype, count=count, offset=span.offset
            )
            if is_all:
                return span.staged if tensor.dim() == 1 else span.staged.view(tensor.shape)
        storage: Any = span.staged.untyped_storage()
        # `_ALIGN_BYTES` is a multiple of every element's size.
        offset = tensor.storage_offset() - span.begin // tensor.element_size()
        return tensor.new_empty(0).set_(storage, offset, tensor.size(), tensor.stride())


def _is_plain(value: Any) -> bool:
    """Whether the bytes of a tensor's storage, copied, are all of it."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.is_cpu
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_nested or value.is_conj() or value.is_neg())
        and value.numel() != 0
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


def _collect(value: Any, spans: dict[int, _Span], plain: dict[int, _Span]) -> None:
    """Finds the spans by the addresses of their storages, and by the ids of all plain tensors."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for child in value.values():
            _collect(child, spans, plain)
    elif kind is list or kind is tuple:
        for child in value:
            _collect(child, spans, plain)
    elif kind not in _ATOMS and id(value) not in plain and _is_plain(value):
        storage, item_bytes = value.untyped_storage(), value.element_size()
        first = value.storage_offset()
        if value.is_contiguous():
            last = first + value.numel()
        else:
            steps = zip(value.size(), value.stride(), strict=True)
            last = first + sum((size - 1) * stride for size, stride in steps) + 1
        begin = first * item_bytes // _ALIGN_BYTES * _ALIGN_BYTES
        if last * item_bytes > storage.nbytes():
            # Memory that was released, which DCP reports.
            return
        address = storage.data_ptr()
        span = spans.get(address)
        if span is None:
            span = spans[address] = _Span(address, begin, last * item_bytes, value)
        else:
            span.begin, span.end = min(span.begin, begin), max(span.end, last * item_bytes)
        plain[id(value)] = span


def _threads() -> int:
    return max(1, min(torch.get_num_threads(), _THREADS_MAX))
