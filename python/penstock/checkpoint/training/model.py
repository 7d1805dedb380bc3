"""`ModelComponent`: a model, captured and restored independently of its wrappers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.target import NEW, is_sharded
from penstock.checkpoint.state.tree.tree import SKIPPED, Node, branches
from penstock.checkpoint.training.component import Component
from penstock.checkpoint.training.filling import differences_of, is_array, target_like, unfillable
from penstock.checkpoint.training.naming import bare, canonical, check_one_to_one
from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.view.view import View


class ModelComponent(Component):
    """A model, or anything else made of modules."""

    is_model = True

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(bare(value, name))
        self._name = name
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
        """Returns the state to store; tensors are not copied."""
        state = self.value.state_dict()
        names = {key: canonical(self.value, key) for key in state}
        versions = getattr(state, "_metadata", None)
        # The wrapped module's versions come after the wrapper's, and replace them.
        inner = {canonical(self.value, key): value for key, value in (versions or {}).items()}
        is_bare = all(key == name for key, name in names.items())
        if is_bare and inner.keys() == (versions or {}).keys():
            return state
        check_one_to_one(names.values(), self._name)
        found = OrderedDict((names[key], value) for key, value in state.items())
        if versions is not None:
            found.__dict__["_metadata"] = OrderedDict(inner)
        return found

    def requested_names(self) -> Any:
        """Returns the names that the model takes from a checkpoint; None for any."""
        # An extra state may have any structure.
        return {key: None if _is_further(key) else value for key, value in self.capture().items()}

    def targets(self, node: Node, seen: View) -> Any:
        """Returns the tensors to fill in place, in the node's structure; `NEW` for other values."""
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
        """Yields the reasons why the model cannot take over a state; changes nothing."""
        if not isinstance(state, dict):
            yield "no state of a model in the checkpoint"
            return
        live = self.capture()
        for key, value in state.items():
            if key not in live:
                yield f"{key} is in the checkpoint, not in the model"
            elif not _is_further(key):
                yield from (f"{key}: {text}" for text in differences_of(value, live[key]))
                yield from (f"{key} {text}" for text in unfillable(live[key]))
        if not is_partial:
            yield from (
                f"{key} is in the model, not in the checkpoint" for key in live if key not in state
            )

    def filled(self, state: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields name, live tensor and stored tensor of each tensor filled in place."""
        live = self.capture()
        return (
            (key, live[key], state[key])
            for key in live
            if key in state and not _is_further(key) and is_array(live[key])
        )

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Takes over a state."""
        keys = {key: canonical(self.value, key) for key in self.value.state_dict()}
        inner = [(name, canonical(self.value, name)) for name, _ in self._named_modules()]
        if any(key != name for key, name in (*keys.items(), *inner)):
            found = OrderedDict((key, state[name]) for key, name in keys.items() if name in state)
            versions = getattr(state, "_metadata", None)
            if versions is not None:
                known = ((name, versions[key]) for name, key in inner if key in versions)
                found.__dict__["_metadata"] = OrderedDict(known)
            state = found
        self.value.load_state_dict(state, strict=not is_partial)

    def _named_modules(self) -> Iterator[tuple[str, Any]]:
        found: Iterator[tuple[str, Any]] = self.value.named_modules(remove_duplicate=False)
        return found


def _is_further(key: str) -> bool:
    """Whether a key is that of a module's ``get_extra_state``, of any type and any shape."""
    return key.rpartition(".")[2] == "_extra_state"
