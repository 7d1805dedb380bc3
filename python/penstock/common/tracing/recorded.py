"""Reads traces: the spans, requests and counter levels of one or several processes."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.common.tracing import FORMAT_VERSION
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_ROWS_MAX = 10_000
"""An upper bound of row numbers."""

_LINE_BYTES_MAX = 1 << 20
"""An upper bound of an event's size."""

_NUMBER_MAX = 2.0**63


class TraceError(PenstockError, ValueError):
    """The file is not a trace of Penstock."""


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """A named interval of one row. Times are seconds since the trace began."""

    name: str
    row: str
    begin: float
    end: float
    detail: str | None

    @property
    def seconds(self) -> float:
        """The duration of the span."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the kernel, from submission to completion."""

    operation: str
    begin: float
    end: float
    file: str
    offset: int
    nbytes: int
    is_direct: bool
    is_aligned: bool
    has_failed: bool

    @property
    def seconds(self) -> float:
        """The time in flight."""
        return self.end - self.begin


@dataclass(slots=True)
class Trace:
    """The trace of one process.

    Attributes:
        name: The process's name, for people.
        about: The process's description of itself.
        spans: All spans by their begin, outer ones first.
        requests: All requests by their begin.
        levels: Times and values of each counter, in order.
        seconds: Time from the trace's begin to its last event.
        is_cut: Whether the process ended before its trace was complete.
        lost: Number of events that were dropped because the file could not be written fast enough.
    """

    name: str
    about: dict[str, Any]
    spans: list[RecordedSpan] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    levels: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    seconds: float = 0.0
    is_cut: bool = True
    lost: int = 0


def read(path: Path) -> Trace:
    """Reads a trace; for a killed process, up to the last complete event."""
    events = _events(path)
    first = next(events, None)
    about = _about(path, first)
    trace = Trace(name=str(path), about=about)
    try:
        _take(trace, path, events)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path} is damaged: an event lacks or misstates {error}") from None
    trace.spans.sort(key=lambda span: (span.begin, -span.end))
    trace.requests.sort(key=lambda request: request.begin)
    for levels in trace.levels.values():
        levels.sort()
    ends = [span.end for span in trace.spans] + [one.end for one in trace.requests]
    ends += [levels[-1][0] for levels in trace.levels.values()]
    trace.seconds = max(ends, default=0.0)
    return trace


def _about(path: Path, first: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the process's description of itself, from the first event."""
    about = first.get("args") if first is not None and first.get("name") == _BEGIN else None
    if not isinstance(about, dict) or type(about.get("version")) is not int:
        raise TraceError(
            f"{path} is no trace of Penstock: those are made with penstock.trace(file) or "
            "PENSTOCK_TRACE=file"
        )
    if about["version"] > FORMAT_VERSION:
        raise TraceError(
            f"{path} has version {about['version']}, made by Penstock {about.get('penstock')}: "
            f"this one reads up to version {FORMAT_VERSION}"
        )
    if type(about.get("began_at_unix_ns")) is not int:
        raise TraceError(f"{path} is damaged: it does not say when it began")
    return about


def _take(trace: Trace, path: Path, events: Iterable[dict[str, Any]]) -> None:
    rows: dict[int, str] = {}
    begun: dict[str, dict[str, Any]] = {}
    for event in events:
        kind, name = event["ph"], _text(event["name"])
        if kind == "X":
            begin = _number(event["ts"]) / 1e6
            end = begin + _number(event["dur"]) / 1e6
            detail = event.get("args", {}).get("of")
            trace.spans.append(RecordedSpan(name, rows[event["tid"]], begin, end, detail))
        elif kind == "b":
            begun[event["id2"]["local"]] = event
        elif kind == "e":
            end = _number(event["ts"]) / 1e6
            trace.requests.append(_request(begun.pop(event["id2"]["local"]), end))
        elif kind == "C":
            ((unit, level),) = event["args"].items()
            at = _number(event["ts"]) / 1e6
            trace.levels.setdefault(f"{name} {unit}", []).append((at, _number(level)))
        elif name == "thread_name":
            rows[event["tid"]] = _text(event["args"]["name"])
        elif name == "process_name":
            trace.name = _text(event["args"]["name"])
        elif name == _BEGIN:
            raise TraceError(
                f"{path} holds the traces of several processes, for a viewer: sum up each by itself"
            )
        elif name == _END:
            trace.is_cut = False
            trace.lost = int(_number(event["args"]["lost"]))


_BEGIN = "penstock"
"""Name of the first event of a trace."""

_END = "penstock end"
"""Name of the last event of a complete trace."""


def _request(event: dict[str, Any], end: float) -> Request:
    args = event["args"]
    return Request(
        operation=_text(event["name"]),
        begin=_number(event["ts"]) / 1e6,
        end=end,
        file=_text(args["file"]),
        offset=int(_number(args["offset"])),
        nbytes=int(_number(args["bytes"])),
        is_direct=bool(args["direct"]),
        is_aligned=bool(args["aligned"]),
        has_failed=bool(args["failed"]),
    )


def _number(value: Any) -> float:
    """Checks a number that is a time, size or rate."""
    if type(value) not in (int, float) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"a number: {str(value)[:40]!r}")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a name: {str(value)[:40]!r}")
    return value


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a file, which has one per line."""
    with path.open("rb") as file:
        if file.readline(_LINE_BYTES_MAX).strip() != b"[":
            return
        while line := file.readline(_LINE_BYTES_MAX):
            text = line.strip()
            if text == b"]":
                return
            try:
                event = json.loads(text.removesuffix(b","))
            except (ValueError, RecursionError):
                if file.read(1):
                    raise TraceError(f"{path} is damaged: {text[:80]!r} is no event") from None
                # The process was killed while writing this event.
                return
            if not isinstance(event, dict):
                raise TraceError(f"{path} is damaged: {text[:80]!r} is no event")
            yield event


def merge(paths: list[Path], output: Path) -> None:
    """Writes the traces of several processes as one, aligned by the wall clock.

    Raises:
        TraceError: A file is not a trace of Penstock.
        OSError: The output cannot be written; it is unchanged.
    """
    heads = [read(path).about for path in paths]
    origin_ns = min(head["began_at_unix_ns"] for head in heads)
    is_first = True
    # Written to a temporary file: the output may be one of the traces under another name.
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=output.absolute().parent, suffix=".tmp", delete=False
    ) as file:
        try:
            file.write("[\n")
            for index, (path, head) in enumerate(zip(paths, heads, strict=True)):
                shift = (head["began_at_unix_ns"] - origin_ns) / 1e3
                for event in _events(path):
                    line = json.dumps(_moved(event, index, shift), ensure_ascii=False)
                    file.write(line if is_first else f",\n{line}")
                    is_first = False
            file.write("\n]\n")
            file.close()
            os.replace(file.name, output)
        except BaseException:
            os.unlink(file.name)
            raise


def _moved(event: dict[str, Any], index: int, shift: float) -> dict[str, Any]:
    """Returns an event renumbered among those of other processes.

    Processes of several machines may have the same id, and viewers merge threads with the same
    number.
    """
    event["pid"] = index + 1
    if "tid" in event:
        event["tid"] += _ROWS_MAX * (index + 1)
    if "ts" in event:
        event["ts"] += shift
    return event
