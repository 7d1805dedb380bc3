"""One save, or one load, by all ranks together, and its measurement.

It lasts from a common moment until the slowest rank is done. Each rank runs these functions in the
same order; where one fails, all of them raise.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import PenstockError
from penstock_bench.harness import storage
from penstock_bench.harness.running import described
from penstock_bench.harness.storage import counted_syncs, files_below, sync_directories, sync_files
from penstock_bench.results.results import Measurement
from penstock_bench.workloads.content import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock_bench.peers.checkpoint.base import Detail, Writer
    from penstock_bench.suites.checkpoint.team import Team
    from penstock_bench.workloads.content import StateSpec

_T = TypeVar("_T")

_RESIDENT_MAX = 0.01
"""The largest part of files in the page cache for a read to be called cold."""


_DIRECT_RESIDENT_MAX = 0.5
"""The largest cached part of files written with direct I/O: headers and metadata."""


class WriterError(PenstockError):
    """A writer failed on a rank; it says on which, and how."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome on one rank.

    Attributes:
        nbytes: Bytes of its tensors.
        seconds: Until the writer's call returned.
        durable_seconds: Until what it wrote was synced as well.
        named_seconds: Until the first rank had synced the names of all files; 0 if it does not.
        cpu_seconds: Processor time of the process.
        files: Files it wrote.
        strays: Files that no rank says it wrote, as the first one sees it.
        syncs: Calls of fsync and fdatasync.
        pages: Of its files in the page cache, and in all: after a save, or before a load.
        checked: Tensors that were compared.
        detail: What the writer tells.
    """

    nbytes: int
    seconds: float
    durable_seconds: float
    cpu_seconds: float
    named_seconds: float = 0.0
    files: int = 0
    strays: int = 0
    syncs: int = 0
    pages: tuple[int, int] = (0, 0)
    checked: int = 0
    detail: Detail = field(default_factory=dict)


def together(team: Team, function: Callable[[], _T]) -> _T:
    """Calls a function on every rank; returns its result here once all have returned."""
    value, problem = None, None
    try:
        value = function()
    except Exception as error:
        problem = described(error)
    for rank, said in enumerate(team.gather(problem)):
        if said is not None:
            raise WriterError(f"rank {rank}: {said}" if team.ranks > 1 else said)
    return cast("_T", value)


def save(
    team: Team, writer: Writer, directory: Path, held: StateSpec, *, syncs: bool
) -> list[Outcome]:
    """Saves into a fresh directory.

    If it syncs, it ends when all is on stable storage: what the writer does not sync is synced
    afterwards, and counts.
    """

    def prepare() -> Any:
        if not team.rank:
            directory.mkdir(parents=True)
        return writer.input(held)

    state = together(team, prepare)
    gc.collect()
    started_at = team.begin()

    def act() -> Outcome:
        cpu = time.process_time()
        with counted_syncs() as calls:
            detail = writer.save(directory, state) or {}
            done_at = time.monotonic()
            if syncs and writer.synced == "nothing":
                sync_files(writer.own_files(directory))
        return Outcome(
            nbytes=held.nbytes,
            seconds=done_at - started_at,
            durable_seconds=time.monotonic() - started_at,
            cpu_seconds=time.process_time() - cpu,
            syncs=len(calls) + detail.get("syncs", 0),
            detail=detail,
        )

    # Names are synced last, when all files have theirs.
    made = together(team, act)
    if syncs and writer.synced != "everything" and not team.rank:
        with counted_syncs() as calls:
            sync_directories(directory)
        made.named_seconds = time.monotonic() - started_at
        made.syncs += len(calls)

    def look() -> Outcome:
        files = writer.own_files(directory)
        made.files, made.pages = len(files), storage.resident_pages(files)
        return made

    found = team.gather(together(team, look))
    if not team.rank:
        found[0].strays = len(files_below(directory)) - sum(one.files for one in found)
    return found


def load(
    team: Team, writer: Writer, directory: Path, held: StateSpec, *, verifies: bool
) -> list[Outcome]:
    """Loads what `save` has saved, from files that are not in the page cache.

    If it verifies, every tensor is compared, after the time.
    """

    def drop() -> tuple[int, int]:
        files = writer.own_files(directory)
        # Pages that are not on storage stay in the cache.
        sync_files(files)
        storage.drop(files)
        return storage.resident_pages(files)

    pages = together(team, drop)
    targets = together(team, lambda: writer.targets(held))
    gc.collect()
    started_at = team.begin()

    def act() -> Outcome:
        cpu = time.process_time()
        state, detail = writer.load(directory, targets)
        seconds = time.monotonic() - started_at
        cpu_seconds = time.process_time() - cpu
        tensors = dict(flatten(state))
        problem = held.difference(tensors) if verifies else None
        if problem is not None:
            raise ValueError(problem)
        return Outcome(
            nbytes=held.nbytes,
            seconds=seconds,
            durable_seconds=seconds,
            cpu_seconds=cpu_seconds,
            pages=pages,
            checked=len(tensors) if verifies else 0,
            detail=detail or {},
        )

    return team.gather(together(team, act))


def summed_up(
    outcomes: Sequence[Outcome], writer: Writer, *, case: str, by: str, number: int, syncs: bool
) -> Measurement:
    """The measurement of a save or a load of all ranks; the time is that of the slowest."""
    details = [one.detail for one in outcomes]
    seconds = max(one.seconds for one in outcomes)
    durable_seconds = max(max(one.durable_seconds, one.named_seconds) for one in outcomes)
    is_save = any(one.files for one in outcomes)
    resident, pages = (sum(one.pages[index] for one in outcomes) for index in range(2))
    fraction = resident / pages if pages else 0.0
    notes = list(dict.fromkeys(str(note) for one in details for note in one.get("fallbacks", [])))
    if not is_save and fraction > _RESIDENT_MAX:
        notes.append(f"{fraction:.0%} of the files were in memory when they were read")
    is_direct = all(one.get("direct_io", False) for one in details)
    if is_direct and is_save and fraction > _DIRECT_RESIDENT_MAX:
        # As on tmpfs, which takes the flag and keeps everything in memory.
        is_direct = False
        notes.append(f"asked for direct I/O, and {fraction:.0%} of the files are in memory")
    if strays := sum(one.strays for one in outcomes):
        notes.append(f"{strays} files are of no rank, and were not synced")
    made = Measurement(
        case=case,
        by=by,
        round_index=number,
        nbytes=sum(one.nbytes for one in outcomes),
        requests=sum(one.get("requests", 0) for one in details),
        seconds=seconds,
        sync_seconds=durable_seconds - seconds,
        cpu_seconds=sum(one.cpu_seconds for one in outcomes),
        is_direct=is_direct,
        setup=", ".join(filter(None, (details[0].get(key) for key in ("engine", "engine_setup")))),
        notes=notes,
        rate_spread=[one.nbytes / one.durable_seconds / 1e9 for one in outcomes],
        checked=sum(one.checked for one in outcomes),
        metadata=_metadata(outcomes, is_save=is_save),
        resident_fraction=fraction,
    )
    if is_save:
        made.synced_by = _synced_by(writer, syncs=syncs)
        stalls = [one["stall_seconds"] for one in details if "stall_seconds" in one]
        made.stall_seconds = max(stalls) if stalls else None
    return made


def _metadata(outcomes: Sequence[Outcome], *, is_save: bool) -> dict[str, int]:
    counted: dict[str, int] = {}
    if is_save:
        counted = {
            "create": sum(one.files for one in outcomes),
            "sync": sum(one.syncs for one in outcomes),
        }
    for one in outcomes:
        for name, count in one.detail.get("metadata", {}).items():
            counted[name] = counted.get(name, 0) + count
    return counted


def _synced_by(writer: Writer, *, syncs: bool) -> str:
    if writer.synced == "everything":
        return "writer"
    if writer.synced == "files":
        return "writer, directories by the benchmark" if syncs else "writer, not directories"
    return "benchmark" if syncs else "nobody"
