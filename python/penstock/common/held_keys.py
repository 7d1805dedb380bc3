"""`HeldKeys`: keys that the native module holds, for a caller's argument."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn, Self


class HeldKeys(ABC):
    """Keys that the native module holds; a subclass makes its ``native`` from the argument.

    Copies are the same object, as a copy of a secret is one more to lose.
    """

    __slots__ = ("native",)

    native: Any
    """The keys as the native module takes them."""

    @abstractmethod
    def __init__(self, keys: Any) -> None: ...

    @classmethod
    def resolve(cls, keys: Any) -> Self | None:
        """Returns the keys of an argument; None for None.

        Raises:
            KeyFileError: A text or a file is no key of this kind.
            StorageError: A file cannot be read.
            TypeError: A key has the wrong type.
        """
        return keys if keys is None or isinstance(keys, cls) else cls(keys)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} may hold secrets, so it is not pickled: make one in each "
            "process"
        )

    def __repr__(self) -> str:
        # An object without keys is shown in the traceback of a key that is none.
        shown = self.shown() if hasattr(self, "native") else ""
        return f"{type(self).__name__}({shown})"

    def shown(self) -> str:
        """Returns the keys in public, for `__repr__`."""
        count = 0 if self.native is None else self.native.count()
        return f"{count} {'key' if count == 1 else 'keys'}"
