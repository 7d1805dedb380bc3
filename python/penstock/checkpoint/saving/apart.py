"""The report entry for memory shared in a state that is loaded as independent tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.reports import Fallback

if TYPE_CHECKING:
    from penstock.checkpoint.state.flattened import Flattened

_NAMED_MAX = 8


def untied(flat: Flattened) -> list[Fallback]:
    """Returns the fallback for tensors that share memory but load independently, if any."""
    if not flat.untied:
        return []
    named = ", ".join(f"{name} and {other}" for name, other in flat.untied[:_NAMED_MAX])
    more = len(flat.untied) - _NAMED_MAX
    reason = (
        f"{named}{f', and {more} more' if more > 0 else ''} have elements in common, and neither "
        "is a part of a contiguous tensor of the state: they come back independent; save the "
        "tensor that they are views of, too, in their type"
    )
    return [Fallback(reason, "untied")]
