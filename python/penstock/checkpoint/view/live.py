"""`LiveState`: an object that has a state and can take over a loaded one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.tensors.marks import Frozen

if TYPE_CHECKING:
    from penstock.checkpoint.state.tree.tree import Node
    from penstock.checkpoint.view.view import View


class LiveState:
    """The interface of `penstock.Training` that saves and loads use.

    Its names begin with an underscore, because users own all others. It is no `abc.ABC`, whose
    metaclass adds names.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the current state; tensors are not copied."""
        raise NotImplementedError

    def _requested_names(self) -> dict[str, Any]:
        """Returns the names to take from a checkpoint; None for any."""
        raise NotImplementedError

    def _targets(
        self, node: Node, seen: View, path: str, *, is_partial: bool, is_strict: bool
    ) -> tuple[Node, Any]:
        """Returns the part of the tree to load, and the state to fill; `NEW` for none.

        Args:
            node: The tree, `SKIPPED` where nothing was requested.
            seen: The view to which the tree belongs.
            path: The checkpoint.
            is_partial: Whether parts may be missing in the checkpoint.
            is_strict: Whether otherwise every part must be in both.
        """
        raise NotImplementedError

    def _restore(
        self,
        state: Any,
        *,
        path: str | None = None,
        is_partial: bool = False,
        is_strict: bool = True,
    ) -> list[str]:
        """Takes over a loaded state.

        Returns:
            Warnings for the user.
        """
        raise NotImplementedError

    def _optimizers(self) -> list[Any]:
        """Returns all optimizers, for guards."""
        raise NotImplementedError


def captured(state: Any) -> Any:
    """Returns the state to save: a live object's current state, or the given one."""
    if isinstance(state, Frozen):
        return state.value
    return state.state_dict() if isinstance(state, LiveState) else state
