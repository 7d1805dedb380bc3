"""Captures a state for a save: flattens it, groups its tensors, and keeps the facts about it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.layout.sharding import Sharder
from penstock.checkpoint.saving.grouping import Grouping
from penstock.checkpoint.state.flatten import flatten
from penstock.checkpoint.view.live import captured
from penstock.common.tracing import span
from penstock.reports import Fallback, SaveReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.ranks.members import Copy
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.destination import Destination
    from penstock.checkpoint.state.flattened import Flattened
    from penstock.tensors.native_rows import Grouped

_NAMED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Facts about a captured state; holds no tensors, which are released as they are copied.

    Attributes:
        destination: The destination.
        began: Start of the save, by `time.perf_counter`.
        flatten_seconds: Time until the state was flattened, in seconds.
        index: The group that gets an index; None for no index.
        fallbacks: Fallbacks for the report of the rank that commits.
        balance: The sum that the ranks compare; 0 for this process alone.
        copies: The replicated tensors, for the comparison of ranks.
        has_pieces: Whether this rank gives pieces of tensors.
    """

    destination: Destination
    began: float
    flatten_seconds: float
    index: str | None
    fallbacks: list[Fallback]
    balance: int = 0
    copies: Sequence[Copy] = ()
    has_pieces: bool = False

    def report(self, written: dict[str, Any], **facts: object) -> SaveReport:
        """Completes the fields of a report that the native module returned."""
        changes = {
            "path": self.destination.path,
            "step": self.destination.step,
            "phases": {"flatten": self.flatten_seconds, **written["phases"]},
            "seconds": time.perf_counter() - self.began,
        }
        return SaveReport(**{**written, **changes, **facts})


def capture(
    destination: Destination,
    state: Any,
    save_round: Round | None = None,
    *,
    began: float,
    finds_overlaps: bool = False,
) -> tuple[Flattened, list[Grouped], Captured]:
    """Returns a state's tensors and tree, the tensors in groups, and the facts about the state.

    Args:
        destination: The destination.
        state: The state.
        save_round: The round in which many ranks save; None for this process alone.
        began: Start of the save, by `time.perf_counter`.
        finds_overlaps: Whether to find leaves that share memory.
    """
    balance, rank = 0, None
    copies: Sequence[Copy] = ()
    with span("flatten"):
        if save_round is None:
            flat = flatten(captured(state), finds_overlaps=finds_overlaps, is_alone=True)
        else:
            from penstock.checkpoint.saving.sharded import flatten_sharded

            rank = save_round.rank
            flat = sharded = flatten_sharded(
                captured(state),
                Sharder(rank, save_round.global_ranks),
                save_round.holders,
                finds_overlaps=finds_overlaps,
                groups=destination.groups,
            )
            balance, copies = sharded.balance.sum, sharded.balance.copies
        grouping = Grouping.of(destination.groups, flat, rank)
    facts = Captured(
        destination=destination,
        began=began,
        flatten_seconds=time.perf_counter() - began,
        index=grouping.index,
        fallbacks=[*grouping.fallbacks, *_untied(flat)],
        balance=balance,
        copies=copies,
        has_pieces=bool(flat.pieces),
    )
    return flat, grouping.rows, facts


def _untied(flat: Flattened) -> list[Fallback]:
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
