"""`JobLog`: failures and running time from the log of a job, by Slurm or by torchrun."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from penstock.planning.models.failures import NODE_RATE, SECONDS_PER_DAY, mtbf, mtbf_counted
from penstock.planning.models.quantity import Quantity
from penstock.planning.records import elastic, slurm

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from penstock.planning.records.counts import Counts

LINE_BYTES_MAX = 64 << 10
"""Longest line that is read at once; a longer one is read in pieces."""

_LINES_LOOKED_AT = 100_000
"""Lines in which the kind of a log has to show."""

_CHARACTERS_LOOKED_AT = 64 << 20
"""Characters in which it has to show, if the lines are long."""

_EXPECTED = (
    "expected the output of `sacct -XPD --format=JobID,State,Elapsed,NNodes`, or the log of "
    "torchrun with LOGLEVEL=INFO"
)


@dataclass(frozen=True)
class JobLog:
    """The failures that a log shows, and the time in which they could have happened.

    Attributes:
        path: The file.
        kind: ``Slurm`` or ``torchrun``.
        failures: Number of failures by kind: states of Slurm, exit codes and signals of workers.
        others: Ends that are no failures, by kind, such as ``PREEMPTED`` and ``TIMEOUT``.
        node_seconds: Running time of all nodes, in seconds.
        nodes: Nodes of the newest job.
        left_out: Number of lines that were not used, by reason.
    """

    path: str
    kind: str
    failures: dict[str, int]
    others: dict[str, int]
    node_seconds: float
    nodes: int
    left_out: dict[str, int]

    def node_rate(self) -> Quantity:
        """Failures per 1,000 node-days; the spread has 90 % of the mass, see `mtbf_counted`.

        A log without failures lowers `failures.NODE_RATE` by its running time.
        """
        count = sum(self.failures.values())
        counted = "1 failure" if count == 1 else f"{count:,} failures"
        prior = None if count else mtbf(1, NODE_RATE)
        source = f"{self.path}: {counted} in {self.node_seconds / 3600:,.1f} node-hours"
        between = mtbf_counted(count, self.node_seconds, source, prior)
        scale, (low, high) = 1000 * SECONDS_PER_DAY, between.bounds
        return Quantity(
            scale / between.value,
            NODE_RATE.unit,
            between.origin,
            source,
            scale / high,
            scale / low,
        )

    def __str__(self) -> str:
        rate = self.node_rate()
        low, high = rate.bounds
        text = (
            f"{rate.source} ({self.kind}): {rate.value:.3g} per 1,000 node-days "
            f"[{low:.3g} to {high:.3g}]"
        )
        if self.failures:
            text += f"; failures{_listed(self.failures)}"
        if self.others:
            text += f"; ends without failure{_listed(self.others)}"
        if self.left_out:
            text += f"; lines left out{_listed(self.left_out)}"
        return text

    def as_json(self) -> dict[str, Any]:
        """The counts and the rate as plain JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "failures": self.failures,
            "others": self.others,
            "node_seconds": self.node_seconds,
            "nodes": self.nodes,
            "left_out": self.left_out,
            "node_rate": self.node_rate().as_json(),
        }


def read_job_log(path: str | os.PathLike[str], *, nodes: int | None = None) -> JobLog:
    """Reads the log of a job, or of many.

    Args:
        path: The output of ``sacct -XP`` with the columns State, Elapsed and NNodes, or the log of
            torchrun.
        nodes: Nodes of the job, for a log of torchrun that does not name them.

    Raises:
        ValueError: The file is of no such kind or of both, or shows no running time.
        OSError: The file cannot be read.

    Example:
        >>> from penstock.planning import read_job_log
        >>> with open("jobs.txt", "w") as file:
        ...     print("JobID|State|Elapsed|NNodes", file=file)
        ...     print("1|NODE_FAIL|2-00:00:00|64", file=file)
        >>> log = read_job_log("jobs.txt")
        >>> log.failures, log.node_seconds / 3600
        ({'NODE_FAIL': 1}, 3072.0)
    """
    name = os.fspath(path)
    counts: Counts
    with closing(_lines(name)) as lines:
        # A pipe, as of `<(sacct …)`, gives its lines once.
        looked_at = list(_first(lines))
        kind = _kind_of(looked_at, name)
        if kind == "Slurm":
            counts = slurm.read(chain(looked_at, lines), name)
        else:
            counts = elastic.read(chain(looked_at, lines), name, nodes)
    if not counts.node_seconds > 0:
        raise ValueError(f"{name}: no job of it has run for any time; {_EXPECTED}")
    return JobLog(
        name,
        kind,
        dict(counts.failures.most_common()),
        dict(counts.others.most_common()),
        counts.node_seconds,
        counts.nodes,
        dict(counts.left_out.most_common()),
    )


def _first(lines: Iterator[str]) -> Iterator[str]:
    """The lines in which the kind of a log has to show."""
    left = _CHARACTERS_LOOKED_AT
    for line in islice(lines, _LINES_LOOKED_AT):
        yield line
        left -= len(line)
        if left < 0:
            return


def _kind_of(lines: Sequence[str], path: str) -> str:
    if lines and elastic.is_error_file(lines[0]):
        raise ValueError(
            f"{path}: an error file of torchrun shows one failure and no running time; {_EXPECTED}"
        )
    found = set()
    for line in lines:
        if slurm.is_header(line):
            found.add("Slurm")
        elif elastic.is_of_torchrun(line):
            found.add("torchrun")
        if len(found) > 1:
            break
    if len(found) > 1:
        raise ValueError(f"{path}: Slurm's accounting and a log of torchrun are mixed: give one")
    if not found:
        raise ValueError(f"{path}: neither Slurm's accounting nor a log of torchrun; {_EXPECTED}")
    return found.pop()


def _lines(path: str) -> Generator[str]:
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(LINE_BYTES_MAX), b""):
            yield line.decode(errors="replace").lstrip("\ufeff").rstrip("\r\n")


def _listed(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {name}' for name, count in counts.items())})" * bool(counts)
