"""`Component`: what a `Training` consists of, each with its own way to be captured and restored.

A `Component` is what a user calls a part of the training; the stored part is another thing. To
restore, it is asked what it has to be filled with (`Component.targets`): only the `DTensor`s that
it holds, of which a rank reads its boxes. All else is read beside and handed over at the end, so
that nothing is changed before everything was read and compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.target import NEW
from penstock.checkpoint.training.filling import has_wholes, like

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.state.tree import Node
    from penstock.checkpoint.view.view import View


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

    def filled(self, state: Any) -> Iterator[tuple[str, Any, Any]]:
        """Tensors that are filled in place out of a state that fits: name, tensor, stored one."""
        return iter(())

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Takes over a state."""
        self.value.load_state_dict(state)

    def all(self) -> Iterator[Component]:
        """It, and all that are inside."""
        yield self
        for part in self.inner.values():
            yield from part.all()
