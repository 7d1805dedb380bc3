"""Reading traces back: the spans, requests and levels of one or several processes."""

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
"""Above the number of any row."""

_LINE_BYTES_MAX = 1 << 20
"""More than any event takes."""

_NUMBER_MAX = 2.0**63


class TraceError(PenstockError, ValueError):
    """A file is no trace of Penstock."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that was done in one row. Times are seconds since the trace began."""

    name: str
    row: str
    begin: float
    end: float
    detail: str | None

    @property
    def seconds(self) -> float:
        """How long it took."""
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
        """How long it was in flight."""
        return self.end - self.begin


@dataclass(slots=True)
class Trace:
    """What one process recorded.

    Attributes:
        name: Of the process, for people.
        about: What it said of itself.
        spans: In the order of their begin, the outer one first.
        requests: In the order of their begin.
        levels: Of each counter, times and values in order.
        seconds: From the trace's begin to the last thing in it.
        is_cut: Whether the process ended before its trace.
        lost: How many things were not recorded, as the file could not be written fast enough.
    """

    name: str
    about: dict[str, Any]
    spans: list[Span] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    levels: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    seconds: float = 0.0
    is_cut: bool = True
    lost: int = 0


def read(path: Path) -> Trace:
    """Reads a trace; that of a process that was killed up to where it ends.

    Raises:
        TraceError: The file is none of Penstock's traces, or of a newer version.
    """
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
    """What a process says of itself, first of all."""
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
            trace.spans.append(Span(name, rows[event["tid"]], begin, end, detail))
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
"""What the first event of a trace is called."""

_END = "penstock end"
"""What the last event of a whole trace is called."""


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
    """A number that times, sizes and rates can have."""
    if type(value) not in (int, float) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"a number: {str(value)[:40]!r}")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a name: {str(value)[:40]!r}")
    return value


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, of which each has a line of its own."""
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
                # The process was killed in the middle of it.
                return
            if not isinstance(event, dict):
                raise TraceError(f"{path} is damaged: {text[:80]!r} is no event")
            yield event


def merge(paths: list[Path], output: Path) -> None:
    """Writes the traces of several processes as one, at the times of the wall clock.

    Raises:
        TraceError: A file is no trace of Penstock.
        OSError: The output cannot be written; it is as it was.
    """
    heads = [read(path).about for path in paths]
    origin_ns = min(head["began_at_unix_ns"] for head in heads)
    is_first = True
    # Written apart: the output may be one of the traces by another name.
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
    """An event among those of other processes.

    Processes of several machines may have one id, and viewers take threads of one number for the
    same wherever they are.
    """
    event["pid"] = index + 1
    if "tid" in event:
        event["tid"] += _ROWS_MAX * (index + 1)
    if "ts" in event:
        event["ts"] += shift
    return event
