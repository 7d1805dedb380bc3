"""What a `Training` consists of: how each kind of part is captured, and restored.

Whatever is stored is an ordinary state. Names in it do not depend on how a model is wrapped or on
how many processes train it: `DistributedDataParallel`, `torch.compile` and checkpointed layers add
words to the names of parameters, which are left out, and an optimizer's moments go by the names
of their parameters. So do those of `torch.distributed.checkpoint.state_dict`, whose functions are
not used here: they take a step with a fresh optimizer to have its moments, also when it is only
saved, know no optimizer that needs a closure, and lose the versions of a wrapped model's modules.

A `Component` is what a user calls a part of the training; the stored part is another thing. To
restore, it is asked what it has to be filled with (`Component.targets`): only the `DTensor`s that
it holds, of which a rank reads its boxes. All else is read beside and handed over at the end, so
that nothing is changed before everything was read and compared.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.loading.targets import NEW, is_sharded
from penstock.state.tree import SKIPPED, Node, branches
from penstock.training.filling import differences_of, has_wholes, like, stored_type, target_like
from penstock.training.moments import moments_differences, settings_differences
from penstock.training.naming import Names, bare, canonical
from penstock.training.randomness import Generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.loading.view import View


_ATOMS = frozenset({type(None), bool, int, float, str})
"""Values of which no look inside is needed."""


class Component:
    """One part of a training: whatever has ``state_dict`` and ``load_state_dict``.

    Attributes:
        value: What the user gave; of a model, without what it is wrapped in.
        is_model: Whether it is one, of which some names can be restored and others left.
        is_optimizer: Whether it is one, which a lazy save has guarded.
        inner: The parts in it, of a group.
    """

    is_model = False
    is_optimizer = False

    def __init__(self, value: Any) -> None:
        self.value = value
        self.inner: dict[Any, Component] = {}

    def capture(self) -> Any:
        """What is stored of it: tensors as they are, not copied."""
        return self.value.state_dict()

    def wanted(self) -> Any:
        """What of a checkpoint it takes, as far as it can tell: names, and None for anything."""
        return None

    def targets(self, node: Node, seen: View) -> Any:
        """What is filled in place, in a structure like the node's; `NEW` for what is built."""
        # Some begin to work when they are asked for their state, such as loaders with workers.
        return like(self.capture(), node) if has_wholes(node, seen) else NEW

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        """Why it cannot take over a state; nothing is changed."""
        if state is None:
            yield "None in the checkpoint"

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Takes over a state."""
        self.value.load_state_dict(state)

    def all(self) -> Iterator[Component]:
        """It, and all that are inside."""
        yield self
        for part in self.inner.values():
            yield from part.all()


def make(value: Any, name: str, names: Names) -> Component | None:
    """The part that a value is; None for a plain one.

    Args:
        value: What the user gave.
        name: What it is called.
        names: Of the parameters of all models; those of this one come to them.

    Raises:
        TypeError: It mixes parts with plain values.
        UnsupportedStateError: Its state depends on the number of ranks, or cannot be had.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        model = _Model(value, name)
        names.add(name, model.value)
        return model
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return _Optimizer(value, names)
    if Generator.is_one(value):
        return _Random(value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return Component(value)
    if type(value) in (list, tuple, dict):
        entries = value if isinstance(value, dict) else dict(enumerate(value))
        if set(map(type, entries.values())) <= _ATOMS:
            # A history of thousands of numbers, most of all.
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


class _Model(Component):
    """A model, or anything else made of modules."""

    is_model = True

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(bare(value))
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(
            isinstance(one, fsdp.FullyShardedDataParallel) for one in self.value.modules()
        ):
            raise UnsupportedStateError(
                f"{name}: FullyShardedDataParallel shards parameters in a way that no name tells: "
                "use torch.distributed.fsdp.fully_shard",
                key=name,
            )

    def capture(self) -> Any:
        state = self.value.state_dict()
        names = {key: canonical(self.value, key) for key in state}
        if all(key == name for key, name in names.items()):
            return state
        found = OrderedDict((names[key], value) for key, value in state.items())
        versions = getattr(state, "_metadata", None)
        if versions is not None:
            # Those of what is wrapped come after those of the wrapper, and stay.
            inner = ((canonical(self.value, key), value) for key, value in versions.items())
            found.__dict__["_metadata"] = OrderedDict(inner)
        return found

    def wanted(self) -> Any:
        # Any of a further state is taken, whatever structure it has.
        return {key: None if _is_further(key) else value for key, value in self.capture().items()}

    def targets(self, node: Node, seen: View) -> Any:
        live = self.capture()
        if not any(map(is_sharded, live.values())):
            return NEW
        asked = {key for key, child in branches(node) or () if child is not SKIPPED}
        is_whole = len(asked) == len(branches(node) or ())
        return OrderedDict(
            (key, target_like(value) if is_sharded(value) and not _is_further(key) else NEW)
            for key, value in live.items()
            if is_whole or key in asked
        )

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        if not isinstance(state, dict):
            yield "no state of a model in the checkpoint"
            return
        live = self.capture()
        for key, value in state.items():
            if key not in live:
                yield f"{key} is in the checkpoint, not in the model"
            elif not _is_further(key):
                yield from (f"{key}: {text}" for text in differences_of(value, live[key]))
        if not is_partial:
            yield from (
                f"{key} is in the model, not in the checkpoint" for key in live if key not in state
            )

    def restore(self, state: Any, *, is_partial: bool) -> None:
        keys = {key: canonical(self.value, key) for key in self.value.state_dict()}
        if any(key != name for key, name in keys.items()):
            found = OrderedDict((key, state[name]) for key, name in keys.items() if name in state)
            versions = getattr(state, "_metadata", None)
            if versions is not None:
                inner = ((name, canonical(self.value, name)) for name, _ in self._named_modules())
                known = ((name, versions[key]) for name, key in inner if key in versions)
                found.__dict__["_metadata"] = OrderedDict(known)
            state = found
        self.value.load_state_dict(state, strict=not is_partial)

    def _named_modules(self) -> Iterator[tuple[str, Any]]:
        found: Iterator[tuple[str, Any]] = self.value.named_modules(remove_duplicate=False)
        return found


class _Optimizer(Component):
    """An optimizer: its groups with all that they say, and what it keeps for each parameter."""

    is_optimizer = True

    def __init__(self, value: Any, names: Names) -> None:
        super().__init__(value)
        self._names_of_all = names

    def capture(self) -> Any:
        state = self.value.state_dict()
        names = self._names()
        if names is None or not _is_standard(state):
            return state
        name_of = {
            number: name
            for group, named in zip(state["param_groups"], names, strict=True)
            for number, name in zip(group["params"], named, strict=True)
        }
        groups = [
            {**group, "params": named}
            for group, named in zip(state["param_groups"], names, strict=True)
        ]
        moments = {name_of.get(key, key): value for key, value in state["state"].items()}
        return {**state, "state": moments, "param_groups": groups}

    def wanted(self) -> Any:
        names = self._names()
        if names is None:
            return None
        return {"state": {name: None for group in names for name in group}, "param_groups": None}

    def targets(self, node: Node, seen: View) -> Any:
        sharded = {name: one for name, one in self._parameters().items() if is_sharded(one)}
        children = branches(node)
        if not sharded or not children:
            return NEW
        found: dict[Any, Any] = dict.fromkeys((key for key, _ in children), NEW)
        for name, child in branches(dict(children).get("state")) or ():
            parameter = sharded.get(name)
            moments = branches(child)
            if parameter is None or moments is None:
                continue
            if found["state"] is NEW:
                every = branches(dict(children)["state"]) or ()
                found["state"] = dict.fromkeys((key for key, _ in every), NEW)
            found["state"][name] = {
                key: self._moment(f"{name}.{key}", parameter, key, leaf, seen)
                for key, leaf in moments
            }
        return found

    def _moment(self, name: str, parameter: Any, key: Any, leaf: Node, seen: View) -> Any:
        """What a moment of a `DTensor` is filled into: it lies on the ranks as that does."""
        stored = stored_type(leaf, seen)
        live = self.value.state.get(parameter, {}).get(key)
        if stored is None or live is not None:
            return target_like(live) if is_sharded(live) else NEW
        dtype, shape = stored
        if shape == tuple(parameter.shape):
            torch = sys.modules["torch"]
            return torch.empty_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
        if not shape:
            return NEW
        raise StateMismatchError(
            f"optimizer: {name!r} has another shape than its parameter, so nobody knows how it "
            "lies on the ranks: take a step with the optimizer before it is restored",
            key=name,
        )

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        live = self.capture()
        if not _is_standard(live):
            return
        if not _is_standard(state):
            yield "no state of an optimizer in the checkpoint"
            return
        stored, own = state["param_groups"], live["param_groups"]
        if len(stored) != len(own):
            yield f"{len(stored)} parameter groups in the checkpoint, {len(own)} in the training"
            return
        for index, (group, named) in enumerate(zip(stored, own, strict=True)):
            given, names = group["params"], named["params"]
            if len(given) != len(names):
                yield (
                    f"group {index} has {len(given)} parameters in the checkpoint, {len(names)} in "
                    "the training"
                )
            elif all(type(one) is int for one in given):
                # As `optimizer.state_dict()` has them: by their order.
                continue
            else:
                odd = [one for one in given if one not in set(names)]
                if odd:
                    yield f"group {index} has {odd[0]!r} in the checkpoint, not in the training"
            yield from settings_differences(self.value, index, group, named)
        yield from moments_differences(self.value, state, self._parameters)

    def restore(self, state: Any, *, is_partial: bool) -> None:
        optimizer = self.value
        names = self._names()
        packed = optimizer.state_dict()
        if names is not None and _is_standard(packed) and _is_standard(state):
            number_of = {
                name: number
                for group, named in zip(packed["param_groups"], names, strict=True)
                for number, name in zip(group["params"], named, strict=True)
            }
            groups = [
                {**group, **{key: own[key] for key in ("params", "param_names") if key in own}}
                for group, own in zip(state["param_groups"], packed["param_groups"], strict=True)
            ]
            moments = {number_of.get(key, key): value for key, value in state["state"].items()}
            state = {**state, "state": moments, "param_groups": groups}
        if _is_standard(state):
            groups = [
                {key: _beside(value, own.get(key)) for key, value in group.items()}
                for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
            ]
            state = {**state, "param_groups": groups}
        optimizer.load_state_dict(state)
        if _is_standard(state) and _is_standard(packed):
            self._keep_types(state, packed)

    def _keep_types(self, state: Any, packed: Any) -> None:
        """Gives moments the types that were stored.

        PyTorch casts them to that of their parameter: 32-bit moments of a 16-bit parameter too.
        """
        for group, own in zip(packed["param_groups"], self.value.param_groups, strict=True):
            for number, parameter in zip(group["params"], own["params"], strict=True):
                found = self.value.state.get(parameter)
                stored = state["state"].get(number)
                if isinstance(found, dict) and isinstance(stored, dict):
                    found.update(
                        (key, _typed(found[key], value))
                        for key, value in stored.items()
                        if key in found
                    )

    def _names(self) -> list[list[str]] | None:
        return self._names_of_all.of(self.value.param_groups)

    def _parameters(self) -> dict[str, Any]:
        names = self._names()
        if names is None:
            every = (one for group in self.value.param_groups for one in group["params"])
            if any(map(is_sharded, every)):
                raise UnsupportedStateError(
                    "an optimizer of DTensors is restored by their names: give the model that "
                    "they are in as well",
                    key="optimizer",
                )
            return {}
        return {
            name: parameter
            for group, named in zip(self.value.param_groups, names, strict=True)
            for parameter, name in zip(group["params"], named, strict=True)
        }


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

    def wanted(self) -> Any:
        return self._made({key: part.wanted() for key, part in self.inner.items()})

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

    def restore(self, state: Any, *, is_partial: bool) -> None:
        for key, part in self.inner.items():
            part.restore(state[key], is_partial=is_partial)

    def _made(self, found: dict[Any, Any]) -> Any:
        kind = type(self.value)
        return found if kind is dict else kind(found.values())


def _is_further(key: str) -> bool:
    """Whether it is what a module's ``get_extra_state`` returns, of any type and any shape."""
    return key.rpartition(".")[2] == "_extra_state"


def _is_standard(state: Any) -> bool:
    """Whether the state of an optimizer has the form that PyTorch gives it."""
    return (
        isinstance(state, dict)
        and isinstance(state.get("state"), dict)
        and isinstance(state.get("param_groups"), list)
        and all("params" in group for group in state["param_groups"])
    )


def _beside(value: Any, live: Any) -> Any:
    """A stored setting of a group, where the one in use is: a rate may be a tensor of a device."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        return value.to(live.device)
    return value


def _typed(found: Any, stored: Any) -> Any:
    """A moment as it was stored, where the optimizer has put it."""
    torch = sys.modules["torch"]
    if isinstance(found, torch.Tensor) and isinstance(stored, torch.Tensor):
        return found if found.dtype == stored.dtype else stored.to(found.device)
    if isinstance(found, dict) and isinstance(stored, dict):
        return {key: _typed(value, stored.get(key)) for key, value in found.items()}
    if type(found) in (list, tuple) and type(stored) is type(found) and len(found) == len(stored):
        return type(found)(_typed(*pair) for pair in zip(found, stored, strict=True))
    return found
