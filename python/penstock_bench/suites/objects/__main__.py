"""The command behind `make bench SUITE=objects`."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import machine, memory
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import names_option
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.suites.objects import server, table, worker
from penstock_bench.suites.objects.contenders import (
    CONNECTOR,
    CONTENDERS,
    LOAD,
    MIRRORED,
    PENSTOCK,
    PRELOADED,
    SAVE,
    STORES,
    STREAMER,
    Setting,
)
from penstock_bench.suites.objects.proxy import Limits, Proxy
from penstock_bench.suites.objects.server import Server
from penstock_bench.suites.objects.table import (
    DISK,
    LARGE,
    MEMORY,
    PACED,
    PARTIAL,
    PLACES,
    PROXIED,
    SMALL,
    Transfer,
)
from penstock_bench.suites.objects.worker import StoreTask, Task

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_MIB = 1 << 20
_SIZE_MIB, _QUICK_SIZE_MIB = 1024, 64
_LARGE_TIMES_SIZE = 3
# The server has parts of an upload and the object made of them at the same time.
_SERVER_TIMES_STATE = 2.2

# One of each of two stores, and what one of them replaces.
_STORES_TIMES_STATE = 4
_STORE_SAVES = 3

# A third of the tensors, in runs of four: those of a layer, say.
_RUN_TENSORS, _RUN_EVERY = 4, 12

_SWEEP_RUNS = 2
_SETTLE_SECONDS_MAX = 5.0

_COMPLETING = "CompleteMultipartUpload"

_MODEL = "model"
"""Where the file is that is only loaded."""


# Libraries that are missing are not preloaded; no first import is timed.
@suite(
    "objects",
    CONTENDERS,
    "Who saves and loads",
    preload=["penstock_bench.suites.objects.worker", *PRELOADED],
)
@names_option("--places", "places", (*PLACES, MIRRORED), "Where, separated by commas")
@click.option("--size-mib", type=click.IntRange(min=16), help="MiB of the state. [1024]")
@click.option(
    "--memory-directory",
    type=click.Path(path_type=Path, exists=True),
    default=Path("/dev/shm"),
    show_default=True,
    help="Where the server in memory has its objects.",
)
@click.option(
    "--limits",
    "limits_in_all",
    default="200,400",
    show_default=True,
    help="MB/s up and down of all connections through the paced proxy.",
)
@click.option(
    "--shared", is_flag=True, help="All processors for servers and clients, not half for each."
)
@click.option("--sweep/--no-sweep", default=None, help="Find the best settings. [not with --quick]")
def main(
    run: Run,
    places: tuple[str, ...],
    size_mib: int | None,
    memory_directory: Path,
    limits_in_all: str,
    shared: bool,
    sweep: bool | None,
) -> Report:
    """Save checkpoints to buckets of a server on this machine, and load them."""
    size_bytes = (size_mib or (_QUICK_SIZE_MIB if run.is_quick else _SIZE_MIB)) * _MIB
    spec = worker.describe(size_bytes)
    up, down = map(float, limits_in_all.split(","))
    limits = Limits(up=20, down=90, up_in_all=up, down_in_all=down, latency_seconds=0.03)
    client_cores, server_cores = _halves(sorted(os.sched_getaffinity(0)), shared)
    run.results.settings |= {
        "size_bytes": spec.nbytes,
        "tensors": len(spec.tensors),
        "client_cores": client_cores,
        "server_cores": server_cores,
        "server": " ".join([server.program().parent.name, *server.FLAGS, *server.STORAGE_FLAGS]),
        "limits": asdict(limits),
        "versions": {
            one.package: machine.package_version(one.package) for one in CONTENDERS.values()
        },
    }
    run.results.extra |= {"best": {}, "sweep": []}
    largest = size_bytes * (_LARGE_TIMES_SIZE if LARGE in places else 1)
    on_disk = _SERVER_TIMES_STATE * (DISK in places) + _STORES_TIMES_STATE * (MIRRORED in places)
    with (
        workplace(memory_directory, _SERVER_TIMES_STATE * largest + size_bytes) as in_memory,
        run.at_work(on_disk * size_bytes) as place,
    ):
        is_swept = not run.is_quick if sweep is None else sweep
        _Scenario(run, places, size_bytes).measure(
            {MEMORY: in_memory, DISK: place}, limits, is_swept
        )
    return Report(table.page(run.results), table.derived(run.results))


def _halves(cores: list[int], is_shared: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Processors for clients, and others for servers, so that neither takes the other's."""
    half = len(cores) // 2
    if is_shared or not half:
        return tuple(cores), tuple(cores)
    return tuple(cores[:half]), tuple(cores[half:])


@dataclass(frozen=True)
class _Site:
    """Where checkpoints go.

    A proxy may stand before the server, and rounds may be fewer than elsewhere.
    """

    server: Server
    size_bytes: int
    names: list[str]
    proxy: Proxy | None = None
    rounds_max: int | None = None

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return (self.proxy or self.server).endpoint


class _Scenario:
    def __init__(self, run: Run, places: tuple[str, ...], size_bytes: int) -> None:
        self._run = run
        self._places = places
        self._size_bytes = size_bytes
        self._sites: dict[str, _Site] = {}

    def measure(self, work: dict[str, Path], limits: Limits, is_swept: bool) -> None:
        """Starts the servers, sweeps settings, then measures in rounds."""
        with ExitStack() as stack:
            self._start(stack, work, limits)
            turns = [(place, name) for place, site in self._sites.items() for name in site.names]
            self._run.say("touching memory")
            memory.warm(self._size_bytes)
            for name in self._run.each(self._run.names, lambda name: f"sweep: {name}"):
                self._prepare(name, is_swept)
            for index, (place, name) in self._run.in_rounds(turns, lambda one: ", ".join(one)):
                if index >= (self._sites[place].rounds_max or self._run.rounds):
                    continue
                if place == MIRRORED:
                    self._stores(index)
                else:
                    self._turn(place, name, index)

    def _start(self, stack: ExitStack, work: dict[str, Path], limits: Limits) -> None:
        cores, size_bytes = self._run.results.settings["server_cores"], self._size_bytes
        ours = [name for name in self._run.names if name == PENSTOCK]
        in_memory = stack.enter_context(Server(work[MEMORY] / "server", cores))
        sites = {MEMORY: _Site(in_memory, size_bytes, list(self._run.names))}
        if DISK in self._places:
            on_disk = stack.enter_context(Server(work[DISK] / "server", cores))
            sites[DISK] = _Site(on_disk, size_bytes, list(self._run.names))
        for place, held_to, nbytes, peers in (
            (PROXIED, Limits(), size_bytes, ()),
            (PACED, limits, size_bytes, (CONNECTOR,)),
            (SMALL, limits, _MIB, (CONNECTOR,)),
        ):
            if place in self._places:
                proxy = stack.enter_context(Proxy(in_memory.address, held_to, cores))
                names = [name for name in self._run.names if name in (PENSTOCK, *peers)]
                sites[place] = _Site(in_memory, nbytes, names, proxy)
        if LARGE in self._places:
            sites[LARGE] = _Site(in_memory, _LARGE_TIMES_SIZE * size_bytes, ours, rounds_max=1)
        sites[MIRRORED] = _Site(in_memory, size_bytes, ours)
        self._sites = {place: site for place, site in sites.items() if place in self._places}

    def _prepare(self, name: str, is_swept: bool) -> None:
        """The best settings of a contender, and what it loads if it saves nothing."""
        contender = CONTENDERS[name]
        best = {operation: found[0] for operation, found in contender.settings.items()}
        self._run.results.extra["best"][name] = best
        if name == STREAMER:
            for site in self._sites.values():
                if name in site.names:
                    self._process(site, self._task(site, name, SAVE, _MODEL))
        site = next(iter(self._sites.values()))
        if not is_swept or name not in site.names or contender.is_missing():
            return
        for operation, settings in contender.settings.items():
            if len(settings) == 1:
                continue
            key = _MODEL if name == STREAMER else "sweep"
            found = [self._tried(site, name, operation, key, setting) for setting in settings]
            seconds = {index: one for index, one in enumerate(found) if one is not None}
            if seconds:
                best[operation] = settings[min(seconds, key=lambda index: seconds[index])]
        site.server.remove("sweep")

    def _tried(
        self, site: _Site, name: str, operation: str, key: str, setting: Setting
    ) -> float | None:
        """Seconds at a setting, the better of two; what it saved stays, for loads."""
        tried = []
        for _ in range(_SWEEP_RUNS):
            if operation == SAVE:
                site.server.remove(key)
            task = replace(self._task(site, name, operation, key), setting=setting)
            tried.append(self._process(site, task))
        seconds = [found["seconds"] for found in tried if "error" not in found]
        self._run.results.extra["sweep"].append(
            {
                "row": name,
                "operation": operation,
                "setting": setting,
                "seconds": seconds,
                "error": next((found["error"] for found in tried if "error" in found), None),
            }
        )
        return min(seconds, default=None)

    def _turn(self, place: str, name: str, index: int) -> None:
        site = self._sites[place]
        if name == STREAMER:
            self._measure(place, self._task(site, name, LOAD, _MODEL), index)
            return
        key = f"{name}-{index}"
        if self._measure(place, self._task(site, name, SAVE, key), index):
            self._measure(place, self._task(site, name, LOAD, key), index)
            if place == PROXIED and name == PENSTOCK:
                self._measure(place, self._partial(site, key), index)
        site.server.remove(key)

    def _stores(self, index: int) -> None:
        site = self._sites[MIRRORED]
        directory = self._run.place / "stores"
        directory.mkdir()
        key = f"{MIRRORED}-{index}"
        cores = self._run.results.settings["client_cores"]
        size_bytes = self._size_bytes
        task = StoreTask(site.endpoint, key, str(directory), size_bytes, cores, _STORE_SAVES)
        found = self._run.child(worker.run_stores, task)
        nbytes = worker.describe(size_bytes).nbytes
        for place in STORES:
            sample = Transfer(PENSTOCK, index, SAVE, nbytes, found.get(place, 0.0), place=place)
            sample.error = found.get("error")
            self._run.results.samples.append(sample)
        shutil.rmtree(directory)
        site.server.remove(key)

    def _measure(self, place: str, task: Task, index: int) -> bool:
        """Measures one process; returns whether it succeeded."""
        site = self._sites[place]
        if place == DISK:
            quiesce(self._run.place, seconds_max=_SETTLE_SECONDS_MAX)
        spec = worker.describe(site.size_bytes)
        nbytes = sum(one.nbytes for one in spec.tensors if not task.names or one.name in task.names)
        operation = PARTIAL if task.names else task.operation
        sample = Transfer(task.contender, index, operation, nbytes, place=place)
        if task.names:
            sample.runs = runs(site.server.files(task.key), task.names)
        site.server.answered(worker.WARM_UP)
        before = site.proxy.counts() if site.proxy else {}
        used = site.server.cpu_seconds
        found = self._process(site, task)
        after = site.proxy.counts() if site.proxy else {}
        sample.traffic = {name: after[name] - before[name] for name in after}
        sample.server_cpu_seconds = site.server.cpu_seconds - used
        answered = site.server.answered(worker.WARM_UP)
        sample.requests = dict(Counter(name for name, _ in answered))
        sample.completing_seconds = sum(took for name, took in answered if name == _COMPLETING)
        return self._run.results.add(sample, found).error is None

    def _partial(self, site: _Site, key: str) -> Task:
        """A load of a third of the tensors, in runs of neighbours in the files."""
        names = stored_names(site.server.files(key))
        wanted = [name for at, name in enumerate(names) if at % _RUN_EVERY < _RUN_TENSORS]
        return replace(
            self._task(site, PENSTOCK, LOAD, key), names=tuple(wanted), is_warmed_up=False
        )

    def _task(self, site: _Site, name: str, operation: str, key: str) -> Task:
        return Task(
            contender=name,
            setting=self._run.results.extra["best"][name][operation],
            operation=operation,
            endpoint=site.endpoint,
            key=key,
            size_bytes=site.size_bytes,
            cores=self._run.results.settings["client_cores"],
        )

    def _process(self, site: _Site, task: Task) -> dict[str, Any]:
        contender = CONTENDERS[task.contender]
        if contender.is_missing():
            return {"error": f"{contender.package} is not installed: run make bench SUITE=objects"}
        found = self._run.child(worker.run, task)
        site.server.remove(worker.WARM_UP)
        return found


def stored_names(files: Iterable[Path]) -> list[str]:
    """The names of all tensors of safetensors files, in the order of their bytes."""
    return [name for file in files for name in _ordered(file)]


def runs(files: Iterable[Path], wanted: Collection[str]) -> int:
    """How many contiguous ranges of the files hold these tensors and no others."""
    count = 0
    for file in files:
        is_wanted = [False, *(name in wanted for name in _ordered(file))]
        count += sum(one and not before for before, one in pairwise(is_wanted))
    return count


def _ordered(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return []
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"])


if __name__ == "__main__":
    main()
