"""`States`: torchtitan's state of a run as one state that a store saves and resumes.

Its layout is that of torchtitan's own manager: the model's tensors are at the top, beside
``optimizer``, ``lr_scheduler``, ``dataloader``, ``train_state`` and others. So
`penstock.integrations.dcp` and converted checkpoints have the same tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER

import penstock
from penstock.checkpoint.state.tree.references import reference
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.integrations.torchtitan import places
from penstock.plugin import NEW, SKIPPED, LiveState, branches
from penstock.tensors.dtypes import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.plugin import Node, SealingKeys, View

RANDOM = "rng"
"""Name of the random states, as in a `penstock.Training`."""

_NAMED_MAX = 5


class RandomStates:
    """The states of this process's random generators, as a stateful object."""

    def __init__(self) -> None:
        self._training = penstock.Training()

    def state_dict(self) -> Any:
        """The present random states."""
        return self._training.state_dict()[RANDOM]

    def load_state_dict(self, state: Any) -> None:
        """Restores the random states."""
        self._training.load_state_dict({RANDOM: state})


class States(LiveState):
    """The state of a run to save or restore.

    Args:
        states: Stateful objects, by torchtitan's names; tensors and plain values are stored as they
            are. States that are omitted stay unchanged when the others are restored.
        known: All names of states in this run: other names at the top belong to the model.
        is_trusted: Whether positions in the data may be pickled.
        keys: The keys that open sealed checkpoints.
    """

    def __init__(
        self,
        states: Mapping[str, Any],
        *,
        known: Iterable[str],
        is_trusted: bool,
        keys: SealingKeys,
    ) -> None:
        self._states = dict(states)
        self._known = set(known)
        self._is_trusted = is_trusted
        self._keys = keys

    def state_dict(self) -> dict[str, Any]:
        """The present state; tensors are not copied."""
        captured: dict[str, Any] = {}
        for name, value in self._states.items():
            if name == MODEL:
                captured |= self._model()
            elif name == DATALOADER:
                captured[name] = places.capture(value, is_trusted=self._is_trusted)
            else:
                captured[name] = value.state_dict() if _is_stateful(value) else value
        return captured

    def _requested_names(self) -> dict[str, Any]:
        # The names under which states of other pipeline stages are found.
        wanted: dict[str, Any] = {name: None for name in self._states if name != MODEL}
        if OPTIMIZER in wanted:
            wanted[OPTIMIZER] = dict.fromkeys(self._states[OPTIMIZER].state_dict())
        return {**dict.fromkeys(self._model()), **wanted}

    def _targets(
        self, node: Node, seen: View, path: str, *, is_partial: bool, is_strict: bool
    ) -> tuple[Node, Any]:
        stored = {key: child for key, child in branches(node) or () if child is not SKIPPED}
        into = self._to_fill()
        self._check(stored, into, path)
        if self._states.keys() == {MODEL}:
            # A run may begin with a model that was exported in another type.
            into = {name: _as_stored(value, stored[name], seen) for name, value in into.items()}
        return {name: stored[name] for name in into}, into

    def _restore(
        self,
        state: Any,
        *,
        path: str | None = None,
        is_partial: bool = False,
        is_strict: bool = True,
    ) -> list[str]:
        if DATALOADER in self._states:
            loader = self._states[DATALOADER]
            # Raises on a mismatch before any object takes its state.
            state[DATALOADER] = places.to_restore(
                loader,
                state[DATALOADER],
                path or "",
                is_trusted=self._is_trusted,
                keys=self._keys,
            )
        for name, value in self._states.items():
            if name == MODEL:
                # The whole state, as asking the model for its names would restore its old values.
                value.load_state_dict(state)
            elif _is_stateful(value):
                value.load_state_dict(state[name])
                if name == DATALOADER:
                    places.begin(value)
        return []

    def _optimizers(self) -> list[Any]:
        return list(getattr(self._states.get(OPTIMIZER), "optimizers", ()))

    # Inside.

    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = self._states[MODEL].state_dict() if MODEL in self._states else {}
        for name in model:
            if name in self._known:
                raise UnsupportedStateError(
                    f"{name}: a tensor of the model has the name of another state: rename either",
                    key=name,
                )
        return model

    def _to_fill(self) -> dict[str, Any]:
        """Values to fill in place, by name; `NEW` for values to build."""
        into = {name: _fillable(value) for name, value in self._model().items()}
        for name, value in self._states.items():
            if name in (DATALOADER, RANDOM):
                # Its structure differs within an epoch, or with other devices.
                into[name] = NEW
            elif name != MODEL:
                into[name] = _fillable(value.state_dict() if _is_stateful(value) else value)
        return into

    def _check(self, stored: Mapping[str, Node], into: Mapping[str, Any], path: str) -> None:
        """Compares the names at the top."""
        missing = [name for name in into if name not in stored]
        if OPTIMIZER in missing and all(name in stored for name in self._model()):
            raise StateMismatchError(
                f"{path} holds a model only, as the last step does unless last_save_model_only is "
                "False: go on with an earlier step (load_step), or begin a new run with it "
                "(initial_load_path, in an empty folder)",
                key=OPTIMIZER,
                path=path,
            )
        ours = into.keys() | self._known
        beyond = [name for name, child in stored.items() if name not in ours and _is_tensor(child)]
        texts = [f"{name} is not in the checkpoint" for name in missing]
        texts += [f"{name} is not in the model" for name in beyond]
        if not texts:
            return
        more = f"; and {len(texts) - _NAMED_MAX} more" if len(texts) > _NAMED_MAX else ""
        remedy = "build the model as the run did that saved it"
        if any(name in self._known for name in missing):
            remedy += ", or name what is to stay as it is in exclude_from_loading"
        raise StateMismatchError(
            f"{path} does not fit this run, nothing was changed: "
            f"{'; '.join(texts[:_NAMED_MAX])}{more}; {remedy}",
            key=(missing or beyond)[0],
            path=path,
        )


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "load_state_dict", None))


def _is_tensor(node: Node) -> bool:
    return type(node) is dict and node.get("$") == "tensor"


def _fillable(state: Any) -> Any:
    """A state whose tensors are filled in place; values without tensors are built."""
    if isinstance(state, torch.Tensor):
        return state
    if isinstance(state, dict):
        found = {key: _fillable(value) for key, value in state.items()}
        return NEW if _holds_none(found.values()) else found
    if type(state) in (list, tuple):
        items = [_fillable(value) for value in state]
        return NEW if _holds_none(items) else type(state)(items)
    return NEW


def _as_stored(value: Any, node: Node, seen: View) -> Any:
    """A tensor to fill, of the stored type: the model converts it when it takes it."""
    if not isinstance(value, torch.Tensor) or not isinstance(node, dict) or not _is_tensor(node):
        return value
    index, _ = reference(node, seen.tensors, seen.aliases)
    dtype = torch_dtype(seen.tensors[index].dtype)
    are_floats = dtype.is_floating_point and value.is_floating_point()
    return torch.empty_like(value, dtype=dtype) if are_floats and dtype != value.dtype else value


def _holds_none(values: Iterable[Any]) -> bool:
    return all(value is NEW for value in values)
