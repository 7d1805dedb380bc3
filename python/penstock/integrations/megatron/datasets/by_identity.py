"""`ByIdentity`: values of objects that may be neither hashable nor comparable."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class ByIdentity(Generic[_V]):
    """Values of objects, which it neither compares nor keeps alive.

    A dataset may be a ``@dataclass``, which has no hash or equals others: no key of a
    `WeakKeyDictionary`.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def get(self, owner: Any) -> _V | None:
        """The value of an object; None if it has none."""
        found = self._of.get(id(owner))
        # A number may be that of an object that is gone.
        return found[1] if found is not None and found[0]() is owner else None

    def set(self, owner: Any, value: _V) -> None:
        """Sets the value of an object, for as long as that lives."""
        number, held = id(owner), self._of

        def drop(gone: weakref.ref[Any]) -> None:
            found = held.get(number)
            if found is not None and found[0] is gone:
                del held[number]

        held[number] = weakref.ref(owner, drop), value

    def values(self) -> list[_V]:
        """The values of the objects that live."""
        return [value for _, value in list(self._of.values())]
