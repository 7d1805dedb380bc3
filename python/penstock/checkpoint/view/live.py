"""`LiveState`: an object that has a state, and takes one over when it was loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.tensors.marks import Frozen

if TYPE_CHECKING:
    from penstock.checkpoint.state.tree import Node
    from penstock.checkpoint.view.view import View


class LiveState:
    """What saves and loads ask of a `penstock.Training`, which they know nothing else of.

    Names begin with an underscore, as those without are its users'; no `abc.ABC`, whose metaclass
    has names of its own.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now; tensors are not copied."""
        raise NotImplementedError

    def _wanted(self) -> dict[str, Any]:
        """What of a checkpoint it takes: names, and None for anything."""
        raise NotImplementedError

    def _targets(
        self, node: Node, seen: View, path: str, *, is_partial: bool, is_strict: bool
    ) -> tuple[Node, Any]:
        """What of a checkpoint's tree is loaded, and the state that is filled; `NEW` for none.

        Args:
            node: The tree, `SKIPPED` where nothing was asked for.
            seen: The view that it belongs to.
            path: The checkpoint.
            is_partial: Whether parts may be missing in it.
            is_strict: Whether else every part has to be in both.

        Raises:
            StateMismatchError: Parts are missing on either side.
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
        """Takes over a state that was loaded.

        Returns:
            What the user should know.

        Raises:
            StateMismatchError: It does not fit.
        """
        raise NotImplementedError

    def _optimizers(self) -> list[Any]:
        """All of its optimizers, for guards."""
        raise NotImplementedError


def captured(state: Any) -> Any:
    """A state to save: what a live one has now, or what was given."""
    if isinstance(state, Frozen):
        return state.value
    return state.state_dict() if isinstance(state, LiveState) else state
