"""Failures from Slurm's accounting: the output of ``sacct -XP``.

Columns are found by the header, so that any ``--format`` with State, Elapsed and NNodes is read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.planning.records.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Iterable

_FAILURES = ("BOOT_FAIL", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
_OTHERS = (
    "CANCELLED", "DEADLINE", "PREEMPTED", "REQUEUED", "RESIZING", "REVOKED", "SPECIAL_EXIT",
    "STOPPED", "SUSPENDED", "TIMEOUT",
)  # fmt: skip
"""Ends by a person, by a limit or by the scheduler."""

_RUNS = ("COMPLETED", "COMPLETING", "CONFIGURING", "PENDING", "RUNNING", "SIGNALING", "STAGE_OUT")
"""States of jobs that go on, or that ended as they should."""

_STATES = (*_FAILURES, *_OTHERS, *_RUNS)

_NEEDED = ("State", "Elapsed", "NNodes")

START_SECONDS = 120.0
"""A job that failed within this time lost no training: a mistake in its script, most often."""

_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")

_NODES = re.compile(r"(\d+(?:\.\d+)?)([KM]?)")

_NODE_UNITS = {"": 1, "K": 1024, "M": 1024**2}
"""Slurm writes 2048 nodes as 2K unless it is called with ``--noconvert``."""

_TORN_MAX = 0.5
"""Largest share of torn lines in a file that is still believed."""


def is_header(line: str) -> bool:
    """Whether a line is the header of ``sacct -P``."""
    return len({"JobID", *_NEEDED}.intersection(line.split("|"))) > 1


def read(lines: Iterable[str], path: str) -> Counts:
    """Counts the failures and the node-hours of all jobs.

    Args:
        lines: The lines of the file.
        path: Its name, for errors.

    Raises:
        ValueError: A column is missing, or most lines are torn.
    """
    counts = Counts()
    header: list[str] = []
    known: set[str] = set()
    used = 0
    for line in lines:
        if is_header(line):
            header = line.split("|")
            missing = [name for name in _NEEDED if name not in header]
            if missing:
                raise ValueError(
                    f"{path}: the column {missing[0]} is missing: call sacct -XPD "
                    "--format=JobID,State,Elapsed,NNodes"
                )
            continue
        if not line.strip() or not header:
            continue
        fields = dict(zip(header, line.split("|"), strict=False))
        if "." in fields.get("JobID", ""):
            counts.left_out["of steps"] += 1
        elif "JobID" in fields and line in known:
            counts.left_out["repeated"] += 1
        elif len(line.split("|")) == len(header) and _count(fields, counts):
            known.add(line)
            used += 1
        else:
            counts.left_out["torn"] += 1
    if counts.left_out["torn"] > _TORN_MAX * (used + counts.left_out["torn"]):
        raise ValueError(f"{path}: {counts.left_out['torn']} lines are torn, and {used} whole")
    counts.left_out = +counts.left_out
    return counts


def _count(fields: dict[str, str], counts: Counts) -> bool:
    """Counts one job; False if its line is torn."""
    seconds, nodes = _seconds(fields["Elapsed"]), _node_count(fields["NNodes"])
    # As in "CANCELLED by 1000".
    state = fields["State"].split(" ")[0]
    if seconds is None or nodes is None or not state:
        return False
    found = [one for one in _STATES if one == state]
    if state.endswith("+"):
        # Without -P, Slurm cuts a state that is wider than its column.
        found = [one for one in _STATES if one.startswith(state[:-1])]
    if len(found) != 1:
        counts.left_out[f"of the unknown state {state[:40]}"] += 1
        return True
    (state,) = found
    if state in _FAILURES and seconds < START_SECONDS:
        counts.left_out["of jobs that failed within 2 min"] += 1
        return True
    counts.node_seconds += seconds * nodes
    if seconds:
        counts.nodes = nodes
    if state in _FAILURES:
        counts.failures[state] += 1
    elif state in _OTHERS:
        counts.others[state] += 1
    return True


def _seconds(text: str) -> float | None:
    """Seconds of ``[days-][hours:]minutes:seconds``; None for anything else."""
    found = _ELAPSED.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(one or 0) for one in found.groups())
    return 86_400.0 * days + 3600 * hours + 60 * minutes + seconds


def _node_count(text: str) -> int | None:
    found = _NODES.fullmatch(text.strip())
    return None if found is None else round(float(found[1]) * _NODE_UNITS[found[2]])
