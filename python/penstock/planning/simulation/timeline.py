"""The timeline of one run, as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.planning.simulation.runs import simulate

if TYPE_CHECKING:
    from penstock.planning.simulation.model import Scenario
    from penstock.planning.simulation.runs import Floats

_LANES = {"train": 1, "stall": 2, "write": 3, "down": 4, "restart": 5}

EVENTS_MAX = 200_000
"""Most spans of a timeline; the trace says where it was cut."""


def timeline(
    scenario: Scenario,
    *,
    days: float,
    seed: int = 0,
    gaps: Floats | None = None,
    repairs: Floats | None = None,
) -> dict[str, Any]:
    """Simulates one run and returns its trace in the JSON format of Chrome.

    One second of the run is one second of the trace. Lanes are ``train``, ``stall``, ``write``,
    ``down`` and ``restart``; in the lane ``write`` are saves that became durable. The arguments are
    those of `simulate`, for one run.

    Raises:
        ValueError: A number is out of range.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for name, lane in _LANES.items()
    ]
    cut_seconds: list[float] = []

    def record(kind: str, began: float, ended: float, facts: dict[str, Any]) -> None:
        if len(events) >= EVENTS_MAX:
            cut_seconds[:] = cut_seconds or [began]
            return
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": _LANES[kind],
                "name": kind,
                "ts": began * 1e6,
                "dur": (ended - began) * 1e6,
                "args": facts,
            }
        )

    results = simulate(
        scenario, days=days, runs=1, seed=seed, gaps=gaps, repairs=repairs, record=record
    )
    facts: dict[str, Any] = {"scenario": scenario.name, **results.summary()}
    if cut_seconds:
        facts["cut_at_seconds"] = cut_seconds[0]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
