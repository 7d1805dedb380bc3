"""`OptimizerComponent`: an optimizer, captured and restored by the names of its parameters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.target import NEW, is_sharded
from penstock.checkpoint.state.tree.tree import Node, branches
from penstock.checkpoint.training.component import Component
from penstock.checkpoint.training.filling import stored_type, target_like
from penstock.checkpoint.training.moments import moments_differences, settings_differences
from penstock.errors import StateMismatchError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.training.naming import Names
    from penstock.checkpoint.view.view import View


class OptimizerComponent(Component):
    """An optimizer: its groups with all settings, and its state for each parameter."""

    is_optimizer = True

    def __init__(self, value: Any, names: Names) -> None:
        super().__init__(value)
        self._names_of_all = names

    def capture(self) -> Any:
        """Returns the state to store; tensors are not copied."""
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

    def requested_names(self) -> Any:
        """Returns the names that the optimizer takes from a checkpoint; None for any."""
        names = self._names()
        if names is None:
            return None
        return {"state": {name: None for group in names for name in group}, "param_groups": None}

    def targets(self, node: Node, seen: View) -> Any:
        """Returns the tensors to fill in place, in the node's structure; `NEW` for other values."""
        children = branches(node)
        filled = self._filled()
        if not filled or not children:
            return NEW
        found: dict[Any, Any] = dict.fromkeys((key for key, _ in children), NEW)
        for name, child in branches(dict(children).get("state")) or ():
            parameter = filled.get(name)
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

    def _filled(self) -> dict[Any, Any]:
        """Returns the parameters whose moments may be filled in place, by their stored names."""
        parameters = self._parameters()
        if not hasattr(self.value, "_file_target"):
            return {name: one for name, one in parameters.items() if is_sharded(one)}
        # Numbers follow the order in `optimizer.state_dict()`.
        every = (one for group in self.value.param_groups for one in group["params"])
        return {**dict(enumerate(every)), **parameters}

    def _moment(self, name: str, parameter: Any, key: Any, leaf: Node, seen: View) -> Any:
        """Returns the target of a moment: a file, or a tensor with the layout of its `DTensor`."""
        stored = stored_type(leaf, seen)
        in_file = getattr(self.value, "_file_target", None)
        if stored is not None and in_file is not None:
            dtype, shape = stored
            target = in_file(parameter, key, getattr(sys.modules["torch"], dtype), shape)
            if target is not None:
                return target
        if not is_sharded(parameter):
            return NEW
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
        """Yields the reasons why the optimizer cannot take over a state; changes nothing."""
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
            # Numbers follow the order in `optimizer.state_dict()`.
            elif not all(type(one) is int for one in given):
                odd = [one for one in given if one not in set(names)]
                if odd:
                    yield f"group {index} has {odd[0]!r} in the checkpoint, not in the training"
            yield from settings_differences(self.value, index, group, named)
        yield from moments_differences(self.value, state, self._parameters)

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Takes over a state."""
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
        """Restores the stored types of moments.

        PyTorch casts moments to the type of their parameter, even 32-bit moments of a 16-bit
        parameter.
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


def _is_standard(state: Any) -> bool:
    """Whether an optimizer's state has the form that PyTorch gives it."""
    return (
        isinstance(state, dict)
        and isinstance(state.get("state"), dict)
        and isinstance(state.get("param_groups"), list)
        and all("params" in group for group in state["param_groups"])
    )


def _beside(value: Any, live: Any) -> Any:
    """Returns a stored setting on the live one's device: a rate may be a device tensor."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        return value.to(live.device)
    return value


def _typed(found: Any, stored: Any) -> Any:
    """Returns a moment with its stored type, on the device that the optimizer chose."""
    torch = sys.modules["torch"]
    if isinstance(found, torch.Tensor) and isinstance(stored, torch.Tensor):
        return found if found.dtype == stored.dtype else stored.to(found.device)
    if isinstance(found, dict) and isinstance(stored, dict):
        return {key: _typed(value, stored.get(key)) for key, value in found.items()}
    if type(found) in (list, tuple) and type(stored) is type(found) and len(found) == len(stored):
        return type(found)(_typed(*pair) for pair in zip(found, stored, strict=True))
    return found
