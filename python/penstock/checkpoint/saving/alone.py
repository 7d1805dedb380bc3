"""A blocking save of one process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.saving.apart import untied
from penstock.checkpoint.saving.grouping import Grouping
from penstock.checkpoint.state.flatten import flatten
from penstock.checkpoint.view.live import captured
from penstock.common.events import observed
from penstock.common.progress import Progress, shown
from penstock.common.tracing import span
from penstock.reports import SaveReport

if TYPE_CHECKING:
    from penstock.checkpoint.saving.destination import Destination


@observed("save")
def save_single(
    destination: Destination, state: Any, settings: dict[str, Any], progress: bool | Progress
) -> SaveReport:
    """Saves the state of this process alone; the arguments are checked."""
    return write_single(destination, state, settings, progress=progress)


def write_single(
    destination: Destination, state: Any, settings: dict[str, Any], *, progress: bool | Progress
) -> SaveReport:
    """Saves as a part of another call, without an event for observers."""
    began = time.perf_counter()
    with span("flatten"):
        flat = flatten(captured(state))
        grouping = Grouping.of(destination.groups, flat)
    flatten_seconds = time.perf_counter() - began
    destination.make_way()
    with shown(progress, "saving") as update:
        fields = _native.save(
            destination.path,
            flat.tensors,
            flat.aliases,
            flat.tree,
            linked=flat.linked,
            grouped=grouping.rows,
            step=destination.step,
            metadata=destination.metadata,
            overwrite=destination.overwrite,
            files=list(destination.files),
            index=grouping.index,
            options=settings,
            progress=update,
        )
    phases = {"flatten": flatten_seconds, **fields["phases"]}
    seconds = time.perf_counter() - began
    fields["fallbacks"] += [*grouping.fallbacks, *untied(flat)]
    return SaveReport(**{**fields, "path": destination.path, "phases": phases, "seconds": seconds})
