"""`PackedSample`: a sampled neighbourhood on its way from a worker process, in one piece of memory.

A neighbourhood has some dozen tensors. Sent by themselves, each would take a file descriptor, a
mapping and several messages between the processes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_ALIGNMENT_BYTES = 64


class _Place(NamedTuple):
    """The place of a tensor in the memory of all.

    Attributes:
        offset: Its first byte.
        shape: Its dimensions.
        dtype: Its element type.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class PackedSample:
    """A value whose tensors lie in one piece of memory that processes share.

    Plain tensors of the host are packed; all else stays as it is.

    Args:
        value: Dataclasses, dicts, lists and tuples of tensors and other values.
    """

    def __init__(self, value: Any) -> None:
        tensors: list[tuple[_Place, torch.Tensor]] = []
        nbytes = 0

        def place(tensor: torch.Tensor) -> Any:
            nonlocal nbytes
            if type(tensor) is not torch.Tensor or not _is_plain(tensor):
                return tensor
            found = _Place(nbytes, tuple(tensor.shape), tensor.dtype)
            tensors.append((found, tensor))
            nbytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            return found

        self._value = map_leaves(value, torch.Tensor, place)
        # Shared from the beginning: otherwise sending it would copy all of it once more.
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(  # type: ignore[no-untyped-call]
            max(1, nbytes), device="cpu"
        )
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        for found, tensor in tensors:
            self._at(found).copy_(tensor)

    def unpacked(self) -> Any:
        """The value; its tensors are copies in memory of this process alone."""

        def own(one: Any) -> torch.Tensor:
            # A tensor that was not packed holds a file descriptor, and a window has many of them.
            return (self._at(one) if isinstance(one, _Place) else one).clone()

        return map_leaves(self._value, (_Place, torch.Tensor), own)

    def _at(self, place: _Place) -> torch.Tensor:
        count = 1
        for size in place.shape:
            count *= size
        nbytes = count * place.dtype.itemsize
        part = self._memory[place.offset : place.offset + nbytes]
        return part.view(place.dtype).view(place.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements are all there is to a tensor."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return is_plain and not (tensor.requires_grad or tensor.is_quantized or tensor.is_complex())


def map_leaves(value: Any, kind: type | tuple[type, ...], replaced: Callable[[Any], Any]) -> Any:
    """A copy of nested dataclasses, dicts, lists and tuples, with values of one type replaced."""
    if isinstance(value, kind):
        return replaced(value)
    if isinstance(value, dict):
        return {key: map_leaves(one, kind, replaced) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_leaves(one, kind, replaced) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        known = {name: map_leaves(getattr(value, name), kind, replaced) for name in names}
        return dataclasses.replace(value, **known)
    return value
