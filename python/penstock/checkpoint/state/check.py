"""`check_storable`, `check_stateful`: check early whether a state can be saved."""

from __future__ import annotations

import sys
from typing import Any

from penstock.checkpoint.state.composites import refuse_part
from penstock.checkpoint.state.flatten import Flattener
from penstock.checkpoint.state.tree.tree import ROOT, Node
from penstock.tensors import dtypes
from penstock.tensors.gc_paused import gc_paused
from penstock.tensors.memory import of_tensor


def check_storable(state: Any) -> None:
    """Walks a state as a save does, without copying, reading or keeping any of it.

    Only types are checked, since memory may change until the save: tensors on the meta device or
    with freed storage are accepted, and so are `DTensor`s with any placements.

    Args:
        state: Any state, such as ``{"optimizer": optimizer.state_dict()}``.

    Raises:
        UnsupportedStateError: A leaf cannot be stored; the message names it.

    Example:
        >>> check_storable({"step": 7, "rates": [0.1, 0.2]})
        >>> check_storable({"optimizer": {"hook": print}})
        Traceback (most recent call last):
        ...
        penstock.errors.UnsupportedStateError: optimizer.hook: a value of type \
builtin_function_or_method cannot be stored: code is never stored; leave it out and create it \
anew after loading
    """
    with gc_paused():
        _Check().encode(state, ROOT, 0)


def check_stateful(name: str, value: Any) -> None:
    """Walks the current state of an object.

    Args:
        name: Its name in a save.
        value: The object. One that cannot return a state now is skipped: it may have one by the
            first save, which fails otherwise.

    Raises:
        UnsupportedStateError: A leaf cannot be stored; the message names it.
    """
    try:
        state = value.state_dict()
    except Exception:
        return
    check_storable({name: state})


class _Check(Flattener):
    """A walk that examines no memory."""

    def __init__(self) -> None:
        super().__init__()
        # No `DTensor` exists before the module is imported, which takes a while.
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None:
            self.handlers[module.DTensor] = type(self)._dtensor

    def encode_tensor(self, value: Any, name: str, level: int) -> Node:
        if value.dtype not in dtypes.torch_names() or value.layout is not self._strided:
            of_tensor(value, name)
        return None

    def _dtensor(self, value: Any, name: str, level: int) -> Node:
        refuse_part(value._local_tensor, name)
        return None
