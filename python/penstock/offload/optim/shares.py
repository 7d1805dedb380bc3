"""`ParameterShares`: elements of many parameters updated at a time by the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.offload.optim.layout import Window


@dataclass(slots=True)
class ParameterShares:
    """Elements of a group's parameters updated at a time: lists of flat tensors.

    Attributes:
        is_first: Whether this is their first step, so that the moments are zeros.
        moments: Elements of each moment, by name, in the order of the other lists.
        values: Elements of each parameter, or of its master.
        gradients: Elements of each gradient.
        counts: The number of steps that each has made before.
    """

    is_first: bool
    moments: dict[str, list[Any]]
    values: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


class SteppedParameter(NamedTuple):
    """A parameter during a step.

    Attributes:
        group: Index of its group.
        values: Its elements on this rank, flat.
        gradient: Elements of its gradient, flat; None where only assigned moments are stored.
        state: Its entry of ``optimizer.state``.
        made: The number of steps it has made; None while it has no state.
        assigned: Moments that the caller has put into its state, flat, by name.
    """

    group: int
    values: Any
    gradient: Any
    state: dict[str, Any]
    made: float | None
    assigned: Mapping[str, Any]


def flat_gradient(number: int, gradient: Any, values: Any) -> Any:
    """The elements of a parameter's gradient, flat; None for none."""
    if gradient is None:
        return None
    if gradient.shape != values.shape or gradient.dtype != values.dtype:
        raise StateMismatchError(
            f"the gradient of parameter {number} is {tuple(gradient.shape)}, {gradient.dtype},"
            f" the parameter {tuple(values.shape)}, {values.dtype}",
            key=str(number),
        )
    return gradient.contiguous().view(-1)


def shares_of(
    window: Window, parts: Sequence[Any], names: Sequence[str], live: Mapping[int, SteppedParameter]
) -> dict[tuple[int, bool], ParameterShares]:
    """The elements of a window to update.

    Returns:
        The elements by index of the group, and by whether it is their first step.
    """
    shares: dict[tuple[int, bool], ParameterShares] = {}
    for piece, *moments in zip(window.pieces, *_views(window, parts), strict=True):
        one = live.get(piece.entry.number)
        if one is None or one.gradient is None:
            continue
        is_first = one.made is None
        if (share := shares.get((one.group, is_first))) is None:
            share = ParameterShares(is_first, {name: [] for name in names})
            shares[one.group, is_first] = share
        is_whole = piece.end - piece.begin == one.values.numel()
        cut = slice(piece.begin, piece.end)
        share.values.append(one.values if is_whole else one.values[cut])
        share.gradients.append(one.gradient if is_whole else one.gradient[cut])
        share.counts.append(one.made or 0.0)
        for name, moment in zip(names, moments, strict=True):
            share.moments[name].append(moment)
    return shares


def assigned_of(
    window: Window, parts: Sequence[Any], names: Sequence[str], live: Mapping[int, SteppedParameter]
) -> list[tuple[Any, Any]]:
    """Moments of a window that take the values which the caller has assigned.

    Returns:
        Pairs of a moment's elements in the window and the values to copy there.
    """
    if not any(one.assigned for one in live.values()):
        return []
    pairs = []
    for piece, *moments in zip(window.pieces, *_views(window, parts), strict=True):
        if (one := live.get(piece.entry.number)) is not None:
            pairs += [
                (moment, one.assigned[name][piece.begin : piece.end])
                for name, moment in zip(names, moments, strict=True)
                if name in one.assigned
            ]
    return pairs


def _views(window: Window, parts: Sequence[Any]) -> list[list[Any]]:
    """For each moment, the elements of each piece of a window."""
    found: list[list[Any]] = [[] for _ in parts]
    for dtype, some in groupby(window.pieces, key=lambda piece: piece.entry.dtype):
        pieces = list(some)
        # Pieces of one type are adjacent, as in the file.
        counts = [piece.end - piece.begin for piece in pieces]
        begin = pieces[0].place
        end = begin + sum(counts) * dtype.itemsize
        for views, part in zip(found, parts, strict=True):
            views += part[begin:end].view(dtype).split(counts)
    return found
