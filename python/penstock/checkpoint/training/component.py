"""`Component`: a part of a `Training`, with its own way to be captured and restored.

A restore first asks each part for the layout of its `DTensor`s (`Component.targets`), so that a
rank reads only the regions (boxes) that it holds, into copies on the host. The part takes over
these and all other values at the end, so that nothing is changed before everything was read and
compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.target import NEW
from penstock.checkpoint.training.filling import has_wholes, like

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.state.tree.tree import Node
    from penstock.checkpoint.view.view import View


class Component:
    """A part of a training: any object with ``state_dict`` and ``load_state_dict``.

    Attributes:
        value: The user's object; a model without its outer wrappers.
        is_model: Whether the part is a model, whose names can be restored selectively.
        is_optimizer: Whether the part is an optimizer, which a lazy save guards.
        inner: The parts of a group.
    """

    is_model = False
    is_optimizer = False

    def __init__(self, value: Any) -> None:
        self.value = value
        self.inner: dict[Any, Component] = {}

    def capture(self) -> Any:
        """Returns the state to store; tensors are not copied."""
        return self.value.state_dict()

    def requested_names(self) -> Any:
        """Returns the names that the part takes from a checkpoint, if known; None for any."""
        return None

    def targets(self, node: Node, seen: View) -> Any:
        """Returns the tensors to fill in place, in the node's structure; `NEW` for other values."""
        # Some objects start working when asked for their state, such as loaders with workers.
        return like(self.capture(), node) if has_wholes(node, seen) else NEW

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        """Yields the reasons why the part cannot take over a state; changes nothing."""
        if state is None:
            yield "None in the checkpoint"

    def filled(self, state: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields name, live tensor and stored tensor of each tensor filled in place."""
        return iter(())

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Takes over a state."""
        self.value.load_state_dict(state)

    def all(self) -> Iterator[Component]:
        """Yields the part and all parts in it."""
        yield self
        for part in self.inner.values():
            yield from part.all()
