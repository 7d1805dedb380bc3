"""`register_type`: registers a class whose instances can then be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpoint.state.flatten import has_place
from penstock.checkpoint.state.registered import Registered, add, is_wrapper, name_of, of_fields

if TYPE_CHECKING:
    from collections.abc import Callable

_Class = TypeVar("_Class", bound=type)

_NAME_CHARS_MAX = 200


def register_type(
    cls: _Class,
    flatten: Callable[[Any], Any] | None = None,
    unflatten: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> _Class:
    """Registers a class: saves store its values, and loads restore them.

    A checkpoint holds the class's name and the state that ``flatten`` returns: plain values,
    containers, tensors, values of other registered classes. It never names code: a load looks up
    the name among the classes registered in its process, and an unknown name is an error.
    ``penstock.load(path, plain=True)`` loads the stored state without the class.

    Enums, dataclasses and named tuples need no functions: members are stored by name (flags by
    value), dataclasses and named tuples as a dictionary of their fields. They are restored without
    ``__init__`` and ``__post_init__``, as by `pickle`. A subclass of `torch.Tensor` with
    ``__tensor_flatten__`` and ``__tensor_unflatten__`` needs no functions either: its inner tensors
    are stored. The tensors of PyTorch and torchao need no registration.

    Only the exact class is registered: register subclasses as well. A value that occurs twice in a
    state is restored as two equal ones, as lists are.

    Args:
        cls: The class. If it is registered again under another name, the first name can still be
            loaded, and saves use the newest.
        flatten: Converts a value to a state. Called by every save; it must not change the value.
        unflatten: Converts such a state to a value.
        name: The class's name in checkpoints, 1 to 200 characters; None for ``module.qualname``.
            Give a name to a class of a script (``__main__``), and the old name to a class that was
            moved.

    Returns:
        The class, so that this can be used as a decorator if no functions are needed.

    Raises:
        TypeError: ``cls`` is not a class, or is stored without registration; or it needs both
            functions and they are not given; or it is local to a function and ``name`` is None.
        ValueError: Another class has the name, or the name is too long or empty.

    Example:
        >>> import dataclasses, penstock, tempfile
        >>> @penstock.register_type
        ... @dataclasses.dataclass
        ... class Settings:
        ...     lr: float
        ...     layers: tuple[int, ...]
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"settings": Settings(0.1, (4, 4))})
        >>> penstock.load(path)["settings"]
        Settings(lr=0.1, layers=(4, 4))
        >>> penstock.load(path, plain=True)["settings"]["lr"]
        0.1
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type takes a class, not {cls!r:.80}")
    if has_place(cls):
        raise TypeError(f"{name_of(cls)} is stored as it is: register subclasses of it only")
    if name is None:
        name = name_of(cls)
        if "<locals>" in name:
            raise TypeError(
                f"{name} is local to a function, where another class may have its name: give name="
            )
    if type(name) is not str or not 0 < len(name) <= _NAME_CHARS_MAX:
        raise ValueError(f"name={name!r:.80}: give 1 to {_NAME_CHARS_MAX} characters")
    if (flatten is None) != (unflatten is None):
        raise TypeError(f"{name}: give both of flatten and unflatten, or neither")
    entry: Registered | None = None
    if flatten is not None:
        entry = Registered(cls, name, flatten, unflatten)
    elif is_wrapper(cls):
        entry = Registered(cls, name, None, None)
    else:
        entry = of_fields(cls, name)
    if entry is None:
        raise TypeError(
            f"{name} is no enum, dataclass or named tuple, nor a tensor with __tensor_flatten__: "
            "give flatten= and unflatten="
        )
    add(entry)
    return cls
