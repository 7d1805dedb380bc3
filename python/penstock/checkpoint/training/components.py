"""The parts of a `Training`: each kind of value, captured and restored.

The stored state is an ordinary one. Its names do not depend on how a model is wrapped or on how
many processes train it: `DistributedDataParallel`, `torch.compile` and activation checkpointing add
words to the names of parameters, which are removed, and an optimizer's moments are named by their
parameters. The functions of `torch.distributed.checkpoint.state_dict` use the same names but are
not used here: with a fresh optimizer they take a step to create its moments, even for a save, they
support no optimizer that needs a closure, and they lose the versions of a wrapped model's modules.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.target import NEW
from penstock.checkpoint.state.tree.tree import Node, branches
from penstock.checkpoint.training.component import Component
from penstock.checkpoint.training.filling import ATOMS
from penstock.checkpoint.training.model import ModelComponent
from penstock.checkpoint.training.optimizer import OptimizerComponent
from penstock.checkpoint.training.randomness import Generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.training.naming import Names
    from penstock.checkpoint.view.view import View


def make(value: Any, name: str, names: Names) -> Component | None:
    """Returns the part for a value; None for a plain value.

    ``names``, those of all models' parameters, get those of this model.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        model = ModelComponent(value, name)
        names.add(name, model.value)
        return model
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return OptimizerComponent(value, names)
    if Generator.is_one(value):
        return _Random(value)
    if LoaderComponent.is_one(value):
        return LoaderComponent(value)
    methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    # A class has the two methods as well, but no state.
    if all(map(callable, methods)) and not isinstance(value, type):
        return Component(value)
    if type(value) in (list, tuple, dict):
        entries = value if isinstance(value, dict) else dict(enumerate(value))
        if set(map(type, entries.values())) <= ATOMS:
            # Mostly a history of thousands of numbers.
            return None
        found = {key: make(one, f"{name}.{key}", names) for key, one in entries.items()}
        parts = {key: part for key, part in found.items() if part is not None}
        if parts and len(parts) < len(found):
            odd = next(key for key in found if key not in parts)
            raise TypeError(
                f"{name}: holds what has a state_dict and what has none ({odd!r}): give the plain "
                "values a name of their own"
            )
        if parts:
            return _Group(value, parts)
    return None


class _Random(Component):
    """A generator of random numbers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._generator = Generator(value)

    def capture(self) -> Any:
        return self._generator.capture()

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        return self._generator.mismatches(state)

    def restore(self, state: Any, *, is_partial: bool) -> None:
        self._generator.restore(state)


class _Group(Component):
    """A list, tuple or dictionary of parts, such as the optimizers of two models."""

    def __init__(self, value: Any, parts: dict[Any, Component]) -> None:
        super().__init__(value)
        self.inner = parts

    def capture(self) -> Any:
        return self._made({key: part.capture() for key, part in self.inner.items()})

    def requested_names(self) -> Any:
        return self._made({key: part.requested_names() for key, part in self.inner.items()})

    def targets(self, node: Node, seen: View) -> Any:
        children = branches(node) or ()
        found = {
            key: self.inner[key].targets(child, seen) if key in self.inner else NEW
            for key, child in children
        }
        return NEW if all(one is NEW for one in found.values()) else self._made(found)

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        here = dict(enumerate(state)) if isinstance(state, list | tuple) else state
        if not isinstance(here, dict) or here.keys() != self.inner.keys():
            count = len(here) if isinstance(here, dict) else "no"
            yield f"{count} parts in the checkpoint, {len(self.inner)} in the training"
            return
        for key, part in self.inner.items():
            found = part.mismatches(here[key], is_partial=is_partial)
            yield from (f"{key}: {text}" for text in found)

    def filled(self, state: Any) -> Iterator[tuple[str, Any, Any]]:
        for key, part in self.inner.items():
            for name, live, stored in part.filled(state[key]):
                yield f"{key}.{name}" if name else str(key), live, stored

    def restore(self, state: Any, *, is_partial: bool) -> None:
        for key, part in self.inner.items():
            part.restore(state[key], is_partial=is_partial)

    def _made(self, found: dict[Any, Any]) -> Any:
        kind = type(self.value)
        return found if kind is dict else kind(found.values())


class LoaderComponent(Component):
    """A loader that moves to its position when restored, not at its first iteration.

    Starting an iterator draws a number from PyTorch's generator. The saved run had already drawn
    it, so a resumed run must not draw it after the random states are restored.
    """

    @staticmethod
    def is_one(value: Any) -> bool:
        """Whether a value is such a loader."""
        module = sys.modules.get("torchdata.stateful_dataloader")
        return module is not None and isinstance(value, module.StatefulDataLoader)

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        """Yields the reasons why the loader cannot move to a position; changes nothing."""
        yield from super().mismatches(state, is_partial=is_partial)
        saved, here = _workers(state), self.value.num_workers
        if saved is not None and saved != here:
            yield (
                f"{saved} workers in the checkpoint, {here} in the training: each has a place of "
                f"its own, so it takes num_workers={saved}"
            )

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Moves to the stored position."""
        super().restore(state, is_partial=is_partial)
        # This starts the iterator, which ``iter(loader)`` then returns.
        self.value.state_dict()


def _workers(state: Any) -> int | None:
    """Returns the number of workers of the saved loader; None if its state does not contain it."""
    try:
        if "_snapshot" in state:
            return int(state["_snapshot"]["_main_snapshot"]["_num_workers"])
        return 0 if "_num_yielded" in state else None
    except (TypeError, KeyError):
        return None
