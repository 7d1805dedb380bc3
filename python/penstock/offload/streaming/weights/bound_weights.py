"""Binds the parameters of a unit to its modules: views of memory, or placeholders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError
from penstock.offload.streaming.weights.placeholder import placeholder
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from penstock.offload.streaming.weights.units import Unit

_OURS = "_is_streamed"


def views_of(unit: Unit, memory: Any) -> list[Any]:
    """The parameters of a unit as views of its memory, one for each seat; converts where needed."""
    torch = dtypes.import_torch()
    found: dict[Any, Any] = {}
    for seat, place in zip(unit.seats, unit.places, strict=True):
        stored = seat.stored
        if stored in found:
            continue
        values = memory[place : place + stored.nbytes].view(stored.dtype).view(stored.shape)
        if seat.is_converted:
            place = unit.converted[stored]
            room = memory[place : place + values.numel() * seat.dtype.itemsize]
            made = room.view(seat.dtype).view(stored.shape_in_model)
            stored.fill(made, values)
            values = made
        found[stored] = torch.nn.Parameter(values, requires_grad=False)
        setattr(found[stored], _OURS, True)
    return [found[seat.stored] for seat in unit.seats]


def bind(unit: Unit, parameters: list[Any]) -> None:
    """Sets the parameters of a unit's modules, in the order of its seats."""
    for seat, parameter in zip(unit.seats, parameters, strict=True):
        seat.module._parameters[seat.attribute] = parameter


def placeholders_of(unit: Unit, device: Any) -> list[Any]:
    """Placeholders for the parameters of a unit while they are in storage."""
    found: dict[Any, Any] = {}
    for seat in unit.seats:
        if seat.stored not in found:
            shape = seat.stored.shape_in_model
            found[seat.stored] = placeholder(seat.name, shape, seat.dtype, device)
            setattr(found[seat.stored], _OURS, True)
    return [found[seat.stored] for seat in unit.seats]


def check_untouched(unit: Unit) -> None:
    """Raises `UnsupportedStateError` if somebody has replaced a parameter of a unit."""
    for seat in unit.seats:
        if not getattr(seat.module._parameters.get(seat.attribute), _OURS, False):
            raise UnsupportedStateError(
                f"{seat.name!r} was replaced, and a streamed model has what is in the files:"
                " change the files, or load it whole",
                key=seat.name,
            )
