"""`Registered`: classes whose instances are stored and restored.

A checkpoint names such a class and holds the state that `flatten` returned. The name is looked up
among the classes registered in this process; a name in a file never imports a module. In addition,
torchao's classes that only hold settings (enums, dataclasses, named tuples) are known if torchao is
already imported: its tensors have them in their contexts. They are restored without running their
code.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingDependencyError, StateMismatchError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Flatten = Callable[[Any], Any]
    Unflatten = Callable[[Any], Any]

_SETTINGS_OF = "torchao"
"""The package whose enums, dataclasses and named tuples need no registration."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A class whose instances can be stored.

    Attributes:
        cls: The class.
        name: Its name in checkpoints.
        flatten: Converts an instance to a state; None if the class is a tensor that PyTorch
            decomposes by ``__tensor_flatten__``.
        unflatten: Converts a state to an instance; None likewise.
    """

    cls: type
    name: str
    flatten: Flatten | None
    unflatten: Unflatten | None

    def state_of(self, value: Any, key: str) -> Any:
        """Returns the state that is stored for an instance."""
        try:
            return self._called(self.flatten, value)
        except Exception as error:
            raise UnsupportedStateError(
                f"{key}: flatten of the registered type {self.name!r} failed: "
                f"{type(error).__name__}: {error}",
                key=key,
            ) from error

    def made_of(self, state: Any) -> Any:
        """Creates an instance from a state."""
        try:
            return self._called(self.unflatten, state)
        except Exception as error:
            raise StateMismatchError(
                f"unflatten of the registered type {self.name!r} failed: {type(error).__name__}: "
                f"{error}; make it take what was saved, or penstock.load with plain=True loads "
                "that as it was stored",
                key=None,
                path=None,
            ) from error

    @staticmethod
    def _called(function: Callable[[Any], Any] | None, value: Any) -> Any:
        if function is None:
            raise AssertionError("tensors are taken apart by PyTorch")
        return function(value)


_by_name: dict[str, Registered] = {}
_by_class: dict[type, Registered] = {}


def add(entry: Registered) -> None:
    """Registers a class; saves use its newest name."""
    known = _by_name.get(entry.name)
    # A re-run notebook cell, or a reloaded module, creates the same class again.
    if known is not None and name_of(known.cls) != name_of(entry.cls):
        raise ValueError(
            f"{entry.name!r} is the name of {name_of(known.cls)} already: give another name="
        )
    _by_name[entry.name] = _by_class[entry.cls] = entry


def of_class(cls: type) -> Registered | None:
    """Returns the registration of a class; None if it is not registered."""
    found = _by_class.get(cls)
    if found is None and cls.__module__.partition(".")[0] == _SETTINGS_OF:
        name = name_of(cls)
        return of_fields(cls, name) if imported(name) is cls else None
    return found


def of_name(name: str) -> Registered:
    """Returns the class that a checkpoint names."""
    found = _by_name.get(name)
    if found is None and name.partition(".")[0] == _SETTINGS_OF:
        cls = imported(name)
        found = None if cls is None else of_fields(cls, name)
    if found is None or found.flatten is None:
        raise unknown(name)
    return found


def unknown(name: str) -> MissingDependencyError:
    """Returns the error for a class that a checkpoint names and this process does not know."""
    package = name.partition(".")[0]
    remedy = f"penstock.register_type(…, name={name!r:.220}) before loading"
    if package in ("torch", _SETTINGS_OF):
        remedy = f"import {package}, with the module that has it, before loading, or {remedy}"
    return MissingDependencyError(
        f"it holds a value of the class {name!r:.220}, which this process has not registered: "
        f"{remedy}; penstock.load with plain=True loads what is stored of it",
        name=package[:80],
    )


def wrapper_of(name: str) -> type | None:
    """Returns a registered tensor class that PyTorch decomposes; None for other names."""
    found = _by_name.get(name)
    return found.cls if found is not None and found.flatten is None else None


def is_wrapper(cls: type) -> bool:
    """Whether PyTorch can decompose and rebuild a class of tensors."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and issubclass(cls, torch.Tensor)
        and hasattr(cls, "__tensor_flatten__")
        and hasattr(cls, "__tensor_unflatten__")
    )


def name_of(cls: type) -> str:
    """Returns the default name of a class in checkpoints."""
    return f"{cls.__module__}.{cls.__qualname__}"


def imported(name: str) -> type | None:
    """Returns the class of a name if its module is already imported; else None."""
    module_name, _, qualname = name.rpartition(".")
    while module_name:
        module = sys.modules.get(module_name)
        if module is not None:
            found: Any = module
            for word in qualname.split("."):
                found = vars(found).get(word) if hasattr(found, "__dict__") else None
            return found if isinstance(found, type) and name_of(found) == name else None
        module_name, _, word = module_name.rpartition(".")
        qualname = f"{word}.{qualname}"
    return None


# Classes that are fully described by their fields.


def of_fields(cls: type, name: str) -> Registered | None:
    """Returns the registration of a class that its fields or members describe fully; else None."""
    if issubclass(cls, enum.Enum):
        return _of_enum(cls, name)
    if dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__:
        return _of_dataclass(cls, name)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _of_named_tuple(cls, name)
    return None


def _of_enum(cls: Any, name: str) -> Registered:
    if issubclass(cls, enum.Flag):
        # Combinations of flags have no names.
        return Registered(cls, name, lambda one: int(one.value), cls)
    return Registered(cls, name, lambda one: one.name, lambda text: cls[text])


def _of_dataclass(cls: Any, name: str) -> Registered:
    names = [one.name for one in dataclasses.fields(cls)]
    # Bases that are not dataclasses may have slots that are not fields.
    slots = [(key, one) for base in cls.__mro__ for key, one in _slots(base) if key not in names]

    def flatten(value: Any) -> dict[str, Any]:
        further = getattr(value, "__dict__", {}).keys() - set(names)
        further |= {key for key, slot in slots if _is_set(slot, value)}
        if further:
            raise TypeError(f"it has attributes that are no fields: {', '.join(sorted(further))}")
        return {one: getattr(value, one) for one in names}

    def unflatten(state: dict[str, Any]) -> Any:
        _check_fields(state, names)
        value = object.__new__(cls)
        for one in names:
            # The class's own method may refuse: it is frozen.
            object.__setattr__(value, one, state[one])
        return value

    return Registered(cls, name, flatten, unflatten)


def _slots(cls: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    return ((key, one) for key, one in vars(cls).items() if isinstance(one, MemberDescriptorType))


def _is_set(slot: MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _of_named_tuple(cls: Any, name: str) -> Registered:
    names = list(cls._fields)

    def flatten(value: Any) -> dict[str, Any]:
        further = getattr(value, "__dict__", {})
        if further:
            raise TypeError(f"it has attributes that are no fields: {', '.join(sorted(further))}")
        return dict(zip(names, value, strict=True))

    def unflatten(state: dict[str, Any]) -> Any:
        _check_fields(state, names)
        return tuple.__new__(cls, [state[one] for one in names])

    return Registered(cls, name, flatten, unflatten)


def _check_fields(state: Any, names: list[str]) -> None:
    if type(state) is not dict or state.keys() != set(names):
        stored = ", ".join(map(str, state)) if type(state) is dict else type(state).__name__
        raise ValueError(f"{stored:.200} is stored, where its fields are {', '.join(names)}")
